"""Online hierarchical clustering: Tang et al., Relative Contrastive Loss for Unsupervised
Representation Learning, ECCV 2022, section 4.3. Also measures what share of the samples conform to
a hierarchy (section 5.3).

Levels are counted from 1 as in the paper; at level 1 every sample is its own cluster.

Dimension key: N data set, D embedding, H levels, B rows of an update, U distinct samples among
them, C clusters, P pairs of a cluster and one above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.clustering.hierarchy_update import Limits, refine
from kinfolk.clustering.tree import Tree
from kinfolk.stores.per_sample import Arriving, check_ids, skips


def conforming(labels: Tensor, *, strict: bool = False) -> float:
    """Share in [0, 1] of the samples that conform, of (H, N) labels from the lowest level to the
    highest.

    A sample conforms if, at every higher level, it is in the same cluster as most samples of each
    of its lower clusters (in a tie, the smallest label counts). With `strict`, as all of them, so
    that one sample elsewhere counts against its whole cluster. Nested labels give 1. The paper
    reports figures (k-means 73.88 %, DBSCAN 97.3 %) without a definition.

    Example:
        >>> conforming(torch.tensor([[0, 0, 0, 1], [5, 5, 7, 7]]))
        0.75
        >>> conforming(torch.tensor([[0, 0, 0, 1], [5, 5, 7, 7]]), strict=True)
        0.25
    """
    if labels.ndim != 2 or not labels.shape[1]:
        raise ValueError(f"`labels` (={tuple(labels.shape)}) must have the shape (levels, samples)")
    good_N = torch.ones(labels.shape[1], dtype=torch.bool, device=labels.device)
    for high in range(1, len(labels)):
        for low in range(high):
            good_N &= _with_most(labels[low], labels[high], strict)
    return good_N.double().mean().item()


def level_figures(labels: Tensor) -> dict[str, float]:
    """Metrics of (H, N) levels: the share of samples that are `conforming`, the share that are
    `clustered` (not alone at the highest level), and the share in its `largest_cluster`.

    Example:
        >>> level_figures(torch.tensor([[0, 1, 2, 3], [5, 5, 7, 8]]))
        {'conforming': 1.0, 'clustered': 0.5, 'largest_cluster': 0.5}
    """
    size = torch.unique(labels[-1], return_counts=True)[1].double()
    total = labels.shape[1]
    return {
        "conforming": conforming(labels),
        "clustered": size[size > 1].sum().item() / total,
        "largest_cluster": size.max().item() / total,
    }


def _with_most(low_N: Tensor, high_N: Tensor, strict: bool) -> Tensor:
    """(N,) whether the higher label of each sample is that of most, or of all, samples of its lower
    cluster."""
    low_N = torch.unique(low_N, return_inverse=True)[1]
    high_N = torch.unique(high_N, return_inverse=True)[1]
    span = int(high_N.max()) + 1
    pair_P, inverse_N, count_P = torch.unique(
        low_N * span + high_N, return_inverse=True, return_counts=True
    )
    cluster_P = pair_P // span
    size = torch.bincount(low_N)
    if strict:
        whole_N: Tensor = count_P[inverse_N] == size[low_N]
        return whole_N
    most = torch.zeros_like(size).scatter_reduce(0, cluster_P, count_P, "amax")
    largest_P = count_P == most[cluster_P]
    place_P = torch.arange(len(pair_P), device=low_N.device)
    first = torch.full_like(size, len(pair_P)).scatter_reduce(
        0, cluster_P[largest_P], place_P[largest_P], "amin"
    )
    with_most_N: Tensor = first[low_N] == inverse_N
    return with_most_N


class Hierarchy(nn.Module):
    """H levels of labels of all samples, refined with every batch. The cost of an update depends on
    the batch, not on N.

    Samples that share a cluster at a level share one at every higher level, after every update (the
    cluster-preserve property). An update goes from level 2 to H. Every cluster that contains a
    sample of the batch is split by density peaks into at most `parts` parts, made of whole clusters
    of the level below. Parts and clusters inside one cluster of the level above are merged if they
    are similar. The top level has no border. See `hierarchy_update.py`.

    Args:
        num_samples: N.
        levels: H, with level 1.
        merge_similarity: σ_m, a number or one for each of the levels 2 … H; centres that are more
            similar are merged.
        dim: D; None: the size of the first features.
        parts: m.
        max_units: maximum number of units of one cluster, and of its siblings that are not touched,
            that are used in a step. Of a larger cluster, the touched units are used first, and the
            others count as one unit; merging it into another takes several steps.
        feature_momentum: m in [0, 1) of f ← normalised(m f + (1 − m) new), because the views of
            several steps describe a sample better than those of one.

    State: `tree`, with the features of all samples, the levels, and the sums and sizes of all
    clusters, on the CPU. Memory is linear in N · H. The same updates give the same state.

    Deviates from the paper in: σ_m may differ between the levels, because with one σ_m for all they
    tend to become equal; the limit `max_units`; moving averages of the features; the details of
    density peaks, which the paper leaves to a supplement; units and clusters are compared by their
    centres alone, while the paper also names label propagation without its formulae.

    Example:
        >>> hierarchy = Hierarchy(4, levels=2, merge_similarity=0.8)
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> hierarchy.update(torch.arange(4), features)
        >>> label = hierarchy.labels[1]
        >>> (label[0] == label[1]).item(), (label[0] == label[2]).item()
        (True, False)
    """

    def __init__(
        self,
        num_samples: int,
        levels: int,
        *,
        merge_similarity: float | Sequence[float],
        dim: int | None = None,
        parts: int = 3,
        max_units: int = 32,
        feature_momentum: float = 0.5,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("levels", levels, 1),
            ("parts", parts, 2),
            ("max_units", max_units, 2),
        ):
            if value < least:
                raise ValueError(f"`{name}` (={value}) must be at least {least}")
        if not 0 <= feature_momentum < 1:
            raise ValueError(f"`feature_momentum` (={feature_momentum}) must be in [0, 1)")
        each = (
            tuple(merge_similarity)
            if isinstance(merge_similarity, Sequence)
            else (merge_similarity,) * (levels - 1)
        )
        if len(each) != levels - 1 or not all(-1 <= value <= 1 for value in each):
            raise ValueError(
                f"`merge_similarity` (={merge_similarity}) must be a number in [-1, 1], or one for"
                f" each of the levels 2 to {levels}"
            )
        if any(later > earlier for earlier, later in pairwise(each)):
            raise ValueError(
                f"`merge_similarity` (={merge_similarity}) must not rise: a higher level joins less"
                " similar samples"
            )
        self.num_samples, self.levels, self.merge_similarity = num_samples, levels, each
        self.parts, self.max_units, self.feature_momentum = parts, max_units, feature_momentum
        self.tree = Tree(num_samples, levels, dim)
        self._arriving: Arriving | None = None

    @property
    def labels(self) -> Tensor:
        """(H, N) the cluster of every sample at every level. Takes a pass over all samples."""
        return self.labels_of(torch.arange(self.num_samples, device=self.tree.device))

    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) the clusters of some samples, after all updates so far."""
        self.settle()
        return self.tree.labels_of(ids)

    def centres(self, level: int) -> tuple[Tensor, Tensor]:
        """(C,) labels of the clusters of a level, counted from 1, and (C, D) their unit-norm
        centres."""
        self.settle()
        label_C = self.tree.sizes[level - 1].nonzero().flatten()
        return label_C, F.normalize(self.tree.sums_at(level - 1)[label_C], dim=1)

    def start(self, labels: Tensor, features: Tensor | None = None) -> None:
        """Sets all levels to (H, N) nested labels, any integers, the first row one of its own for
        every sample; and (N, D) features."""
        self._arriving = None
        self.tree.start(labels, features)

    @torch.no_grad()
    def update(self, ids: Tensor, features: Tensor, is_finite: Tensor | None = None) -> None:
        """Takes in (B, D) features of samples (B,) and refines the clusters that contain them.

        Rows of one id count as their mean. Rows that are not finite are left out, and so is a step
        whose loss is not. With several processes, pass the rows of all of them to each. They then
        find the same moves, because the sums have a fixed order on the CPU.

        Rows on an accelerator are copied to the host without waiting for them, and taken in by
        `settle`."""
        if ids.is_floating_point() or ids.shape != features.shape[:1]:
            rule = f"must be integers, one for each row of `features` (={len(features)})"
            raise ValueError(f"`ids` (={tuple(ids.shape)}, {ids.dtype}) {rule}")
        check_ids(ids, self.num_samples)
        self.tree.set_features(features)
        self.settle()
        if ids.device.type != "cpu":
            self._arriving = Arriving(ids, features, *(() if is_finite is None else (is_finite,)))
        elif not skips(is_finite):
            self._take_in(ids, features)

    @torch.no_grad()
    def settle(self) -> None:
        """Takes in what the last `update` on an accelerator has copied. Called by everything that
        reads the hierarchy: in a training by the next step, when the device has finished the
        forward pass of the last one and is still busy with its backward pass."""
        if self._arriving is not None:
            (ids, features, *is_finite), self._arriving = self._arriving.read(), None
            if not is_finite or bool(is_finite[0]):
                self._take_in(ids, features)

    def share(self) -> None:
        """Makes the hierarchies of all ranks equal to that of rank zero. They are equal anyway
        where all processors round alike."""
        self.settle()
        if distributed.world_size() > 1:
            held = [buffer for buffer in self.tree.buffers() if buffer is not self.tree.pointers]
            distributed.overwrite_from_rank_zero(held, self.tree.device)
            self.tree.send_all()

    def _take_in(self, ids: Tensor, features: Tensor) -> None:
        finite_B = features.isfinite().all(1)
        rows_BD = features[finite_B].to(torch.float64)
        ids_U, inverse = torch.unique(ids[finite_B], return_inverse=True)
        if not len(ids_U):
            return
        total_UD = rows_BD.new_zeros(len(ids_U), rows_BD.shape[1]).index_add_(0, inverse, rows_BD)
        mean_UD = F.normalize(total_UD, dim=1).lerp(
            self.tree.features[ids_U].to(total_UD), self.feature_momentum
        )
        self.tree.write(ids_U, F.normalize(mean_UD, dim=1).to(self.tree.features.dtype))
        # a step in mixed precision calls this from its forward pass
        with torch.autocast("cpu", enabled=False):
            for level in range(1, self.levels):
                touched = torch.unique(self.tree.labels_of(ids_U)[level - 1])
                limits = Limits(self.parts, self.merge_similarity[level - 1], self.max_units)
                self.tree.move(level, refine(self.tree.at(level), touched, limits))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.settle()  # before the tree is saved
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self._arriving = None
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __repr__(self) -> str:
        how = f"dim={self.tree.dim}, parts={self.parts}, max_units={self.max_units}"
        means = (
            f"merge_similarity={self.merge_similarity}, {how},"
            f" feature_momentum={self.feature_momentum}"
        )
        return f"Hierarchy(num_samples={self.num_samples}, levels={self.levels}, {means})"
