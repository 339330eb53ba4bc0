"""Cluster labels of all samples at one or several numbers of clusters: the state of every method that clusters once per epoch.

`kmeans_levels` and `dbscan_levels` cluster each level of a hierarchy separately, as RCL does for comparison (its Table 4). Their levels are
not nested; `conforming` measures to what extent they are.

Dimension key: N samples, D features, L or H levels, K clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.kmeans import Clusters, check, kmeans
from kinfolk.stores.per_sample import OnHost, size_differs


class ClusterLabels(OnHost):
    """Labels and centroids of L clusterings of all samples, refreshed as a whole; the same on all ranks.

    Args:
        num_samples: N.
        dim: D, the size of a feature; None: as the first refresh finds it.
        num_clusters: K of each level, each below N; a number: of the only level.
        seed: of the clusterings; level l has seed + l.
        warm_start: a refresh starts from the last centroids, with fewer iterations.
        spherical: centroids of unit norm, samples assigned by the inner product.
        iterations, warm_iterations: of Lloyd's algorithm, from centroids drawn anew and from the last ones.
        points_per_cluster: centroids are learned from at most so many samples per cluster, see `kmeans`.

    State: `labels` (L, N), before the first refresh every sample its own; `centroids` (ΣK, D), zero before it; `refreshed`.

    Example:
        >>> clusters = ClusterLabels(4, 1, (2,), seed=0)
        >>> clusters.labels
        tensor([[0, 1, 2, 3]])
        >>> clusters.refresh(torch.tensor([[0.0], [0.1], [9.0], [9.1]]))
        >>> (clusters.labels[0, 0] == clusters.labels[0, 1]).item(), (clusters.labels[0, 0] == clusters.labels[0, 2]).item()
        (True, False)
    """

    on_host = ("refreshed",)
    labels: Tensor
    centroids: Tensor
    refreshed: Tensor

    def __init__(
        self,
        num_samples: int,
        dim: int | None,
        num_clusters: int | tuple[int, ...],
        *,
        seed: int,
        warm_start: bool = True,
        spherical: bool = False,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        self.num_clusters = (num_clusters,) if isinstance(num_clusters, int) else tuple(num_clusters)
        if not self.num_clusters:
            raise ValueError("`num_clusters` must name at least one number of clusters")
        for number in self.num_clusters:
            if not 1 <= number < num_samples:
                raise ValueError(f"`num_clusters` (={number}) must be at least 1 and below the number of samples ({num_samples})")
        counts = (("iterations", iterations), ("warm_iterations", warm_iterations), ("points_per_cluster", points_per_cluster))
        for name, value in counts:
            if value < 1:
                raise ValueError(f"`{name}` (={value}) must be at least 1")
        self.num_samples, self.dim, self.seed, self.warm_start, self.spherical = num_samples, dim, seed, warm_start, spherical
        self.iterations, self.warm_iterations, self.points_per_cluster = iterations, warm_iterations, points_per_cluster
        self.register_buffer("labels", torch.arange(num_samples).repeat(len(self.num_clusters), 1))
        self.register_buffer("centroids", torch.zeros(sum(self.num_clusters), dim or 0))
        self.register_buffer("refreshed", torch.tensor(False))

    @property
    def unusual(self) -> dict[str, int]:
        """The settings of k-means that are not the usual ones, for the `__repr__` of what owns it."""
        usual = {"iterations": 20, "warm_iterations": 5, "points_per_cluster": 256}
        return {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}

    def level(self, level: int) -> Tensor:
        """(K, D) the centroids of one level."""
        first = sum(self.num_clusters[:level])
        return self.centroids[first : first + self.num_clusters[level]]

    @torch.no_grad()
    def refresh(self, features: Tensor, ids: Tensor | None = None, *, seed: int | None = None) -> None:
        """Clusters (N, D) `features`, the same on all ranks, on this module's device; see `kmeans` for how ranks share the work.

        Args:
            features: of all samples in data-set order, or of `ids` in their order; on any device.
            ids: the samples that are clustered; any other gets a label of its own, K plus its number. None: all.
            seed: instead of the module's.
        """
        number = self.num_samples if ids is None else len(ids)
        if len(features) != number or (self.dim is not None and features.shape[1:] != (self.dim,)):
            wanted = f"({number}, {'features' if self.dim is None else self.dim})"
            raise ValueError(f"`features` (={tuple(features.shape)}) must have the shape {wanted}: all samples in data-set order")
        check(features, self.num_clusters)
        warm = self.warm_start and bool(self.refreshed) and self.centroids.shape[1] == features.shape[1]
        found = [self._clusters(features, level, self.seed if seed is None else seed, warm) for level in range(len(self.num_clusters))]
        labels = torch.arange(self.num_samples, device=self.labels.device) + self.labels.new_tensor(self.num_clusters).unsqueeze(1)
        labels[:, slice(None) if ids is None else ids] = torch.stack([each.labels for each in found])
        self.labels, self.centroids = labels, torch.cat([each.centroids for each in found]).to(self.centroids.dtype)
        self.refreshed.fill_(True)

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClusterLabels:
        """Moves to another device as any module; but a cast to 16 bits, meant for weights, leaves the centroids as exact as they are."""
        before = self.centroids
        super()._apply(fn, recurse)
        if self.centroids.dtype in (torch.bfloat16, torch.float16):
            self.centroids = before.to(self.centroids.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        labels, centroids = state_dict.get(prefix + "labels"), state_dict.get(prefix + "centroids")
        advice = f"use the same data set and the same `num_clusters` (={self.num_clusters})"
        if size_differs(f"{prefix}labels", labels, others[-1], advice, levels=len(self.num_clusters), num_samples=self.num_samples):
            return
        if size_differs(f"{prefix}centroids", centroids, others[-1], advice, clusters=sum(self.num_clusters)):
            return
        if centroids is not None and self.dim is None and centroids.shape != self.centroids.shape:
            self.centroids = self.centroids.new_zeros(centroids.shape)  # the size of a feature is known only from the first refresh on
        super()._load_from_state_dict(state_dict, prefix, *others)


def kmeans_levels(features: Tensor, num_clusters: Sequence[int], *, seed: int, iterations: int = 20, over_ranks: bool = False) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one k-means for each of `num_clusters`, which fall.

    The paper: 1,000,000, 500,000 and 250,000 clusters of ImageNet. `over_ranks`: see `kmeans`.
    """
    check_falling(num_clusters)
    levels = [
        kmeans(features, number, seed=seed + place, iterations=iterations, spherical=True, over_ranks=over_ranks).labels
        for place, number in enumerate(num_clusters)
    ]
    return _with_first(torch.stack(levels))


def dbscan_levels(features: Tensor, radii: Sequence[float], *, min_samples: int = 4) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one DBSCAN for each of `radii`, which grow. The paper: 0.6, 0.7 and 0.8."""
    return _with_first(dbscan(features, radii, min_samples=min_samples, nested=False))


def check_falling(num_clusters: Sequence[int]) -> None:
    """Raises if the numbers of clusters do not fall from one level to the next."""
    if any(a <= b for a, b in pairwise(num_clusters)):
        hint = "; the paper prints them from the last level to the first" if all(a < b for a, b in pairwise(num_clusters)) else ""
        raise ValueError(f"`num_clusters` (={list(num_clusters)}) must fall: higher levels have fewer clusters{hint}")


def _with_first(labels: Tensor) -> Tensor:
    return torch.cat((torch.arange(labels.shape[1], device=labels.device).unsqueeze(0), labels))
