"""Online hierarchical clustering: Tang et al., ECCV 2022, sections 4.3 and 5.3.

The tree of levels is on the CPU, because splitting and merging depend on values; an accelerator has
a copy of its pointers.

Dimension key: N data set, D embedding, H levels, B rows of an update, U distinct samples among
them, F new clusters, M units that move, C clusters, P pairs of a cluster and one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.clustering.dbscan import require_finite
from kinfolk.clustering.hierarchy_update import Moves, Rings, refine
from kinfolk.errors import require, require_at_least
from kinfolk.stores.per_sample import COARSE, Exact, check_ids, is_broken, to_device


def conforming(labels: Tensor) -> float:
    """Share of the samples that conform to (H, N) labels from the lowest level to the highest: that
    are with most samples of each of their lower clusters at every higher level. Nested labels give
    1. The paper does not define its figures.

    Example:
        >>> conforming(torch.tensor([[0, 0, 0, 1], [5, 5, 7, 7]]))
        0.75
    """
    if labels.ndim != 2 or not labels.shape[1]:
        raise ValueError(f"`labels` (={tuple(labels.shape)}) must have the shape (levels, samples)")
    good_N = torch.ones(labels.shape[1], dtype=torch.bool, device=labels.device)
    for high in range(1, len(labels)):
        for low in range(high):
            good_N &= _with_most(labels[low], labels[high])
    return good_N.double().mean().item()


def level_figures(labels: Tensor) -> dict[str, float]:
    """Metrics of (H, N) levels; `clustered`: the share of samples not alone at the highest
    level."""
    size = torch.unique(labels[-1], return_counts=True)[1].double() / labels.shape[1]
    return {
        "conforming": conforming(labels),
        "clustered": size[size > 1.5 / labels.shape[1]].sum().item(),
        "largest_cluster": size.max().item(),
    }


def _with_most(low_N: Tensor, high_N: Tensor) -> Tensor:
    """(N,) whether the higher label of each sample is that of most of its lower cluster."""
    low_N, high_N = (torch.unique(each, return_inverse=True)[1] for each in (low_N, high_N))
    span = int(high_N.max()) + 1
    pair_P, pair_N, count_P = torch.unique(
        low_N * span + high_N, return_inverse=True, return_counts=True
    )
    cluster_P, place_P = pair_P // span, torch.arange(len(pair_P), device=low_N.device)
    rank_P = count_P * len(pair_P) - place_P  # by size, then the smallest label
    top_C = rank_P.new_zeros(int(low_N.max()) + 1).scatter_reduce(0, cluster_P, rank_P, "amax")
    with_most_N: Tensor = (rank_P == top_C[cluster_P])[pair_N]
    return with_most_N


class Tree(Exact):
    """The state of an `OnlineHierarchy`, with levels counted from 0; level H is a single root.

    State: `features` (N, D); (H, N) `parent`, `after`, `before` of the clusters of a level,
    `entry`, `units` of those of the level above; `sizes` (H, N) in samples and `sums` (H − 1, N, D)
    of their features; `free` slots and their number. Not saved: `pointers`, the copy of `parent` on
    an accelerator.
    """

    advice = "use the same data set and levels"
    features: Tensor
    sums: Tensor
    sizes: Tensor
    parent: Tensor
    after: Tensor
    before: Tensor
    entry: Tensor
    units: Tensor
    free: Tensor
    num_free: Tensor
    pointers: Tensor | None

    def __init__(self, num_samples: int, levels: int) -> None:
        super().__init__()
        self.num_samples, self.levels = num_samples, levels
        for name in ("parent", "after", "before", "entry", "units", "free", "sizes"):
            self.register_buffer(name, torch.zeros(levels, num_samples, dtype=torch.int64))
        self.register_buffer("num_free", torch.zeros(levels, dtype=torch.int64))
        self.register_buffer("features", torch.zeros(num_samples, 0))
        self.register_buffer("sums", torch.zeros(levels - 1, num_samples, 0))
        self.register_buffer("pointers", None, persistent=False)
        self.start(torch.arange(num_samples).expand(levels, -1))

    @property
    def device(self) -> torch.device:
        return self.parent.device if self.pointers is None else self.pointers.device

    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) clusters; `ids` are on the CPU or on the device of the pointers."""
        on_host = self.pointers is None or ids.device.type == "cpu"
        above, found = self.parent if on_host else self.pointers, [ids]
        assert above is not None
        found.extend(above[level][found[level]] for level in range(self.levels - 1))
        return torch.stack(found)

    @torch.no_grad()
    def start(self, labels: Tensor, features: Tensor | None = None) -> None:
        shape = self.levels, self.num_samples
        fits = labels.shape == shape and len(torch.unique(labels[0])) == self.num_samples
        must = f"of the shape {shape}, where each sample is a cluster in the first row"
        require(fits, "labels", tuple(labels.shape), must)
        if features is not None:
            self.set_features(features)
            require_finite(features)
            labels, features = labels.cpu(), features.cpu()
            self.features.copy_(F.normalize(features.to(self.features), dim=1))
        device, N = self.parent.device, self.num_samples
        below, alive = torch.arange(N, device=device), N
        self.sizes[0] = 1
        for level in range(1, self.levels + 1):
            row = labels[level] if level < self.levels else torch.zeros_like(below)
            names, label = torch.unique(row, return_inverse=True)
            above = torch.zeros_like(below).scatter_(0, below, label)
            if not torch.equal(above[below], label):
                apart = f"at level {level} and not at level {level + 1}"
                raise ValueError(f"`labels` must be nested: samples share a cluster {apart}")
            self.rings(level - 1).rebuild(above, alive)
            below, alive = label, len(names)
            if level < self.levels:
                self.sizes[level] = torch.bincount(label, minlength=N)
                self.sums[level - 1].zero_().index_add_(0, label, self.features)
                self.num_free[level] = N - alive
                self.free[level, : N - alive] = torch.arange(alive, N, device=device)
        self.send_all()

    def write(self, ids_U: Tensor, new_UD: Tensor) -> None:
        """Writes the features of distinct samples."""
        change_UD = new_UD - self.features[ids_U]
        self.features[ids_U] = new_UD
        for level, label_U in enumerate(self.labels_of(ids_U)[1:]):
            self.sums[level].index_add_(0, label_U, change_UD)

    def move(self, level: int, moves: Moves) -> None:
        """Moves units between clusters of a level; frees clusters that become empty."""
        if not len(moves.unit):
            return
        unit_M, to_M = moves.unit, moves.to.clone()
        from_M = self.parent[level - 1][unit_M]
        new_F, which = torch.unique(-1 - to_M[to_M < 0], return_inverse=True)
        if len(new_F):
            left = int(self.num_free[level]) - len(new_F)
            slot_F = self.free[level, left : left + len(new_F)].clone()
            self.num_free[level] = left
            self.rings(level).put_in(slot_F, moves.border[new_F])
            self._send(level, slot_F)
            to_M[to_M < 0] = slot_F[which]
        self.rings(level - 1).take_out(unit_M)
        self.rings(level - 1).put_in(unit_M, to_M)
        self._send(level - 1, unit_M)
        sum_MD, size_M = self.sums_at(level - 1)[unit_M], self.sizes[level - 1][unit_M]
        for cluster_M, sign in ((to_M, 1), (from_M, -1)):
            self.sums[level - 1].index_add_(0, cluster_M, sum_MD, alpha=sign)
            self.sizes[level].index_add_(0, cluster_M, size_M, alpha=sign)
        left_C = torch.unique(from_M)
        empty_C = left_C[self.units[level - 1][left_C] == 0]
        if len(empty_C):
            self.rings(level).take_out(empty_C)
            self.sums[level - 1, empty_C] = 0
            free = int(self.num_free[level])
            self.free[level, free : free + len(empty_C)] = empty_C
            self.num_free[level] = free + len(empty_C)

    def _send(self, level: int, slots: Tensor) -> None:
        if self.pointers is not None:
            given, device = (slots, self.parent[level, slots]), self.pointers.device
            there, values = (to_device(each, device) for each in given)
            self.pointers[level, there] = values

    def send_all(self) -> None:
        if self.pointers is not None:
            self.pointers = self.parent.to(self.pointers.device)

    def sums_at(self, level: int) -> Tensor:
        return self.features if level == 0 else self.sums[level - 1]

    def rings(self, level: int) -> Rings:
        held = self.after, self.before, self.entry, self.units, self.parent
        return Rings(*[*(each[level] for each in held), self.sums_at(level)])

    def set_features(self, features: Tensor) -> None:
        dim = self.features.shape[1]
        fits = features.ndim == 2 and dim in (0, features.shape[1])
        require(fits, "features", tuple(features.shape), f"of the shape (rows, {dim or 'any'})")
        if not dim:
            self._set_dim(features.shape[1])

    def _set_dim(self, dim: int) -> None:
        self.features = self.features.new_zeros(self.num_samples, dim)
        self.sums = self.sums.new_zeros(self.levels - 1, self.num_samples, dim)

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        return {"parent": {"levels": self.levels, "num_samples": self.num_samples}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        features = state_dict.get(prefix + "features")
        if features is not None and not self.features.shape[1]:
            self._set_dim(features.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.send_all()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tree:
        """Casts the tree, though never to 16 bits; moves only the pointers to another device."""
        probe = fn(torch.empty(0, dtype=self.features.dtype))
        if probe.dtype not in COARSE:
            self.features, self.sums = self.features.to(probe.dtype), self.sums.to(probe.dtype)
        on_host = probe.device.type in ("cpu", "meta")
        self.pointers = None if on_host else self.parent.to(probe.device)
        return self


class OnlineHierarchy(nn.Module):
    """H levels of labels of all samples, refined with every batch at a cost that depends on the
    batch, not on N. At level 1 every sample is a cluster.

    Args:
        num_samples, levels: N and H; H counts level 1.
        merge_similarity: σ_m, or one for each of the levels 2 … H: clusters with more similar
            centres are merged.
        parts: m, into how many a cluster is split at most.
        max_units: units of a cluster that a step uses, the touched ones first. The others count as
            one, so merging a large cluster takes several steps.
        feature_momentum: m in [0, 1) of f ← normalised(m f + (1 − m) new).

    State: `tree`, on the CPU; memory is linear in N · H. The same updates give the same state.

    Deviates from the paper in: σ_m may differ between the levels; `max_units`; moving averages of
    the features; the details of density peaks; no label propagation.

    Example:
        >>> hierarchy = OnlineHierarchy(4, levels=2, merge_similarity=0.8)
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
        parts: int = 3,
        max_units: int = 32,
        feature_momentum: float = 0.5,
    ) -> None:
        super().__init__()
        require_at_least(1, num_samples=num_samples, levels=levels)
        require_at_least(2, parts=parts, max_units=max_units)
        require(0 <= feature_momentum < 1, "feature_momentum", feature_momentum, "in [0, 1)")
        given = merge_similarity
        each = tuple(given) if isinstance(given, Sequence) else (given,) * (levels - 1)
        falls = all(-1 <= b <= a <= 1 for a, b in pairwise((1.0, *each)))
        rule = f"in [-1, 1], a number or one for each of the levels 2 to {levels}, not rising"
        require(falls and len(each) == levels - 1, "merge_similarity", merge_similarity, rule)
        self.num_samples, self.levels, self.merge_similarity = num_samples, levels, each
        self.parts, self.max_units, self.feature_momentum = parts, max_units, feature_momentum
        self.tree = Tree(num_samples, levels)
        self._arriving: tuple[list[Tensor], torch.cuda.Event | None] | None = None

    @property
    def labels(self) -> Tensor:
        """(H, N) the clusters of all samples."""
        return self.labels_of(torch.arange(self.num_samples, device=self.tree.device))

    def labels_of(self, ids: Tensor) -> Tensor:
        self.settle()
        return self.tree.labels_of(ids)

    def start(self, labels: Tensor, features: Tensor | None = None) -> None:
        """Sets all levels to (H, N) nested labels, the first row different for every sample; and
        (N, D) features."""
        self._arriving = None
        self.tree.start(labels, features)

    @torch.no_grad()
    def update(self, ids: Tensor, features: Tensor, is_finite: Tensor | None = None) -> None:
        """Stores (B, D) features of samples, of all ranks, and refines their clusters.

        Rows of one id count as their mean; rows that are not finite are left out, and so is a step
        whose loss is not. Rows on an accelerator are copied without waiting, and used by `settle`.
        """
        fits = not ids.is_floating_point() and ids.shape == features.shape[:1]
        must = f"integers, one for each row of `features` (={len(features)})"
        require(fits, "ids", tuple(ids.shape), must)
        check_ids(ids, self.num_samples)
        self.tree.set_features(features)
        self.settle()
        if ids.device.type != "cpu":
            given = (ids, features) if is_finite is None else (ids, features, is_finite)
            on_cuda = ids.device.type == "cuda"  # other accelerators have no such copy
            copies = [x.to("cpu", non_blocking=on_cuda) for x in given]
            waits = on_cuda and torch.cuda.is_available()
            event = torch.cuda.current_stream(ids.device).record_event() if waits else None
            self._arriving = copies, event
        elif not is_broken(is_finite):
            self._apply_update(ids, features)

    @torch.no_grad()
    def settle(self) -> None:
        """Applies what the last `update` on an accelerator has copied."""
        if self._arriving is not None:
            ((ids, features, *is_finite), event), self._arriving = self._arriving, None
            if event is not None:
                event.synchronize()
            if not is_finite or bool(is_finite[0]):
                self._apply_update(ids, features)

    def share(self) -> None:
        """Makes the hierarchies of all ranks equal, in case processors round differently."""
        self.settle()
        if distributed.world_size() > 1:
            held = [buffer for buffer in self.tree.buffers() if buffer is not self.tree.pointers]
            distributed.overwrite_from_rank_zero(held, self.tree.device)
            self.tree.send_all()

    def _apply_update(self, ids: Tensor, features: Tensor) -> None:
        finite_B = features.isfinite().all(1)
        rows_BD = features[finite_B].to(torch.float64)
        ids_U, inverse = torch.unique(ids[finite_B], return_inverse=True)
        if not len(ids_U):
            return
        total_UD = rows_BD.new_zeros(len(ids_U), rows_BD.shape[1]).index_add_(0, inverse, rows_BD)
        old_UD = self.tree.features[ids_U].to(total_UD)
        new_UD = F.normalize(total_UD, dim=1).lerp(old_UD, self.feature_momentum)
        self.tree.write(ids_U, F.normalize(new_UD, dim=1).to(self.tree.features.dtype))
        # a step in mixed precision calls this from its forward pass
        with torch.autocast("cpu", enabled=False):
            for level in range(1, self.levels):
                touched = torch.unique(self.tree.labels_of(ids_U)[level - 1])
                units, clusters = self.tree.rings(level - 1), self.tree.rings(level)
                limits = self.parts, self.merge_similarity[level - 1], self.max_units
                self.tree.move(level, refine(units, clusters, touched, *limits))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.settle()  # before the tree is saved
        super()._save_to_state_dict(destination, prefix, *rest)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self._arriving = None
        super()._load_from_state_dict(state_dict, prefix, *others)
