"""Pseudo-labels of all samples: the state of every method that clusters them once per epoch.

`kmeans_levels` and `dbscan_levels` cluster each level of a hierarchy separately, as RCL does for
comparison (its Table 4). Their levels are not nested; `conforming` measures to what extent they
are.

Dimension key: N samples, S samples that are clustered, D features, L or H levels, K clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering.confidence import accepted, centroid_distance
from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.kmeans import Clusters, check, kmeans
from kinfolk.stores.per_sample import Exact, size_differs

ConfidenceOf = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(S,) the confidence of (S, D) features with (K, D) centroids in their clusters (S,), at a
level."""


class PseudoLabels(Exact):
    """The k-means clusters of all samples at L levels, of which all or only the most confident are
    labels. Equal on all ranks.

    Args:
        num_samples: N.
        dim: D, the size of a feature; None: that of the first refresh.
        num_clusters: K of each level, each below N; a number means a single level.
        seed: of the clusterings; level l has seed + l.
        accepts: whether a cluster becomes a label only when `accept` chooses it.
        warm_start: a refresh starts from the last centroids, with fewer iterations.
        spherical: centroids of unit norm, samples assigned by the inner product.
        iterations, warm_iterations: of Lloyd's algorithm, from new centroids and from the last
            ones.
        points_per_cluster: maximum number of samples per cluster from which centroids are learned,
            see `kmeans`.

    State: `labels` (L, N), the clusters, where every sample is its own before the first refresh;
    `centroids` (ΣK, D), zero before it; `refreshed`. With `accepts` also `accepted` (L, N) and
    `confidence` (L, N). The owner saves these two, in the format of its files, and calls
    `set_acceptance` when it loads them.

    Example:
        >>> clusters = PseudoLabels(4, 1, (2,), seed=0)
        >>> clusters.of(torch.arange(4))
        tensor([[-1, -1, -1, -1]])
        >>> clusters.refresh(torch.tensor([[0.0], [0.1], [9.0], [9.1]]))
        >>> label = clusters.of(torch.arange(4))[0]
        >>> (label[0] == label[1]).item(), (label[0] == label[2]).item()
        (True, False)
    """

    on_host = ("refreshed",)
    labels: Tensor
    centroids: Tensor
    refreshed: Tensor
    accepted: Tensor | None
    confidence: Tensor | None
    highest: Tensor | None

    def __init__(
        self,
        num_samples: int,
        dim: int | None,
        num_clusters: int | tuple[int, ...],
        *,
        seed: int,
        accepts: bool = False,
        warm_start: bool = True,
        spherical: bool = False,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        self.num_clusters = (
            (num_clusters,) if isinstance(num_clusters, int) else tuple(num_clusters)
        )
        if not self.num_clusters:
            raise ValueError("`num_clusters` must name at least one number of clusters")
        for number in self.num_clusters:
            if not 1 <= number < num_samples:
                raise ValueError(
                    f"`num_clusters` (={number}) must be at least 1 and below the number of samples"
                    f" ({num_samples})"
                )
        counts = (
            ("iterations", iterations),
            ("warm_iterations", warm_iterations),
            ("points_per_cluster", points_per_cluster),
        )
        for name, value in counts:
            if value < 1:
                raise ValueError(f"`{name}` (={value}) must be at least 1")
        self.num_samples, self.dim, self.seed, self.warm_start, self.spherical = (
            num_samples,
            dim,
            seed,
            warm_start,
            spherical,
        )
        self.iterations, self.warm_iterations, self.points_per_cluster = (
            iterations,
            warm_iterations,
            points_per_cluster,
        )
        self.register_buffer("labels", torch.arange(num_samples).repeat(len(self.num_clusters), 1))
        self.register_buffer("centroids", torch.zeros(sum(self.num_clusters), dim or 0))
        self.register_buffer("refreshed", torch.tensor(False))
        shape = len(self.num_clusters), num_samples
        self.register_buffer(
            "accepted", torch.zeros(shape, dtype=torch.bool) if accepts else None, persistent=False
        )
        self.register_buffer(
            "confidence", torch.zeros(shape) if accepts else None, persistent=False
        )
        self.register_buffer("highest", torch.ones(shape[0]) if accepts else None, persistent=False)
        self._some = False

    @property
    def unusual(self) -> dict[str, int]:
        """The settings of k-means that are not the default, for the `__repr__` of the owner."""
        usual = {"iterations": 20, "warm_iterations": 5, "points_per_cluster": 256}
        return {
            name: getattr(self, name)
            for name, value in usual.items()
            if getattr(self, name) != value
        }

    @property
    def some(self) -> bool:
        """Whether any sample has a label. Known to the host."""
        return self._some

    def of(self, ids: Tensor) -> Tensor:
        """(L, …) the labels of the samples `ids`; −1 for a sample that has none."""
        if not self.some:
            return torch.full_like(ids, -1).expand(len(self.labels), *ids.shape)
        labels = self.labels[:, ids]
        return labels if self.accepted is None else labels.where(self.accepted[:, ids], -1)

    @property
    def distinct(self) -> Tensor:
        """(L, N) the labels, where a sample without one has a label of its own: K of the level plus
        its number."""
        own_LN = torch.arange(self.num_samples, device=self.labels.device) + self.labels.new_tensor(
            self.num_clusters
        ).unsqueeze(1)
        if self.accepted is None:
            return self.labels if self.some else own_LN
        return self.labels.where(self.accepted, own_LN)

    def level(self, level: int) -> Tensor:
        """(K, D) the centroids of one level."""
        first = sum(self.num_clusters[:level])
        return self.centroids[first : first + self.num_clusters[level]]

    @torch.no_grad()
    def refresh(
        self, features: Tensor, ids: Tensor | None = None, *, seed: int | None = None
    ) -> None:
        """Clusters (N, D) `features`, the same on all ranks, on this module's device; see `kmeans`
        for how ranks share the work.

        Args:
            features: of all samples in data-set order, or of `ids` in their order; on any device.
            ids: the samples that are clustered; any other gets a label of its own, K plus its
                number. None: all.
            seed: instead of the module's.
        """
        number = self.num_samples if ids is None else len(ids)
        if len(features) != number or (self.dim is not None and features.shape[1:] != (self.dim,)):
            wanted = f"({number}, {'features' if self.dim is None else self.dim})"
            raise ValueError(
                f"`features` (={tuple(features.shape)}) must have the shape {wanted}: all samples"
                " in data-set order"
            )
        check(features, self.num_clusters)
        warm = (
            self.warm_start
            and bool(self.refreshed)
            and self.centroids.shape[1] == features.shape[1]
        )
        found = [
            self._clusters(features, level, self.seed if seed is None else seed, warm)
            for level in range(len(self.num_clusters))
        ]
        labels = torch.arange(self.num_samples, device=self.labels.device) + self.labels.new_tensor(
            self.num_clusters
        ).unsqueeze(1)
        labels[:, slice(None) if ids is None else ids] = torch.stack(
            [each.labels for each in found]
        )
        self.labels, self.centroids = (
            labels,
            torch.cat([each.centroids for each in found]).to(self.centroids.dtype),
        )
        self.refreshed.fill_(True)
        self._some = self.accepted is None or self._some

    @torch.no_grad()
    def accept(
        self, features: Tensor, rate: float, confidence: ConfidenceOf, ids: Tensor | None = None
    ) -> None:
        """Accepts the most confident share `rate` of the clustered samples as labels, at each
        level. Of equally confident samples, those nearer to their centroid are accepted.

        Args:
            features, ids: those of the last `refresh`, on this module's device.
            rate: in [0, 1].
            confidence: called with features (S, D), centroids (K, D), clusters (S,) and the number
                of the level; returns (S,).
        """
        assert self.accepted is not None, "`accepts` must be True"
        ids_S = torch.arange(self.num_samples, device=self.labels.device) if ids is None else ids
        accepted_LN, confidence_LN = (
            torch.zeros_like(self.accepted),
            torch.zeros_like(self.accepted, dtype=torch.float32),
        )
        for level, clusters_N in enumerate(self.labels):
            cluster_S, centroids_KD = clusters_N[ids_S], self.level(level).to(features.dtype)
            confidence_S = confidence(features, centroids_KD, cluster_S, level)
            accepted_LN[level, ids_S] = accepted(
                confidence_S, rate, centroid_distance(features, centroids_KD, cluster_S)
            )
            confidence_LN[level, ids_S] = confidence_S.to(confidence_LN.dtype)
        if distributed.world_size() > 1:  # sums on an accelerator may differ in the last bit
            for result in (accepted_LN, confidence_LN):
                dist.broadcast(result, 0)
        self.set_acceptance(accepted_LN, confidence_LN)

    def set_acceptance(
        self, accepted: Tensor | None = None, confidence: Tensor | None = None
    ) -> None:
        """Sets (L, N) which clusters are labels, and their (L, N) confidence, if it is known. None:
        none are accepted."""
        assert self.accepted is not None
        assert self.confidence is not None
        self.accepted = (
            torch.zeros_like(self.accepted)
            if accepted is None
            else accepted.to(self.accepted.device)
        )
        self.confidence = (
            torch.zeros_like(self.confidence)
            if confidence is None
            else confidence.to(self.confidence)
        )
        self._some, highest_L = bool(self.accepted.any()), self.confidence.amax(1)
        self.highest = highest_L.where(highest_L > 0, torch.ones_like(highest_L))

    def _clusters(self, features: Tensor, level: int, seed: int, warm: bool) -> Clusters:
        return kmeans(
            features,
            self.num_clusters[level],
            seed=seed + level,
            init=self.level(level) if warm else None,
            iterations=self.warm_iterations if warm else self.iterations,
            spherical=self.spherical,
            points_per_cluster=self.points_per_cluster,
            device=self.labels.device,
            over_ranks=True,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        labels, centroids = state_dict.get(prefix + "labels"), state_dict.get(prefix + "centroids")
        advice = f"use the same data set and the same `num_clusters` (={self.num_clusters})"
        if size_differs(
            f"{prefix}labels",
            labels,
            others[-1],
            advice,
            levels=len(self.num_clusters),
            num_samples=self.num_samples,
        ):
            return
        if size_differs(
            f"{prefix}centroids", centroids, others[-1], advice, clusters=sum(self.num_clusters)
        ):
            return
        if centroids is not None and self.dim is None and centroids.shape != self.centroids.shape:
            # the size of a feature is known only from the first refresh on
            self.centroids = self.centroids.new_zeros(centroids.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self.accepted is None:
            self._some = bool(self.refreshed)


def kmeans_levels(
    features: Tensor,
    num_clusters: Sequence[int],
    *,
    seed: int,
    iterations: int = 20,
    over_ranks: bool = False,
) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one k-means for each of `num_clusters`,
    which fall.

    The paper: 1,000,000, 500,000 and 250,000 clusters of ImageNet. `over_ranks`: see `kmeans`.
    """
    check_falling(num_clusters)
    levels = [
        kmeans(
            features,
            number,
            seed=seed + place,
            iterations=iterations,
            spherical=True,
            over_ranks=over_ranks,
        ).labels
        for place, number in enumerate(num_clusters)
    ]
    return _with_first(torch.stack(levels))


def dbscan_levels(features: Tensor, radii: Sequence[float], *, min_samples: int = 4) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one DBSCAN for each of `radii`, which grow.
    The paper: 0.6, 0.7 and 0.8."""
    return _with_first(dbscan(features, radii, min_samples=min_samples, nested=False))


def check_falling(num_clusters: Sequence[int]) -> None:
    """Raises if the numbers of clusters do not fall from one level to the next."""
    if any(a <= b for a, b in pairwise(num_clusters)):
        raise ValueError(
            f"`num_clusters` (={list(num_clusters)}) must fall: higher levels have fewer clusters"
        )


def _with_first(labels: Tensor) -> Tensor:
    return torch.cat((torch.arange(labels.shape[1], device=labels.device).unsqueeze(0), labels))
