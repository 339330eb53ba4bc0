"""The criteria of RCL: levels of clusters over all samples, under each of which a pair is positive or negative. Tang et al., Relative
Contrastive Loss for Unsupervised Representation Learning, ECCV 2022, sections 4.3 and 5.3.

Dimension key: N data set, D embedding, H criteria, B samples of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering import dbscan_levels, kmeans_levels
from kinfolk.clustering.dbscan import require_finite
from kinfolk.clustering.offline import check_falling
from kinfolk.detectors import Hierarchy
from kinfolk.stores.exact import OnHost


class Criteria(OnHost, ABC):
    """Abstract. The cluster of every sample under each of H criteria, the first of which has every sample its own; equal on all ranks."""

    started: Tensor

    @abstractmethod
    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) the clusters of some samples, in [0, N)."""

    @abstractmethod
    def due(self, epoch: int) -> bool:
        """Whether `refresh` is to be called before this epoch."""

    @abstractmethod
    def refresh(self, features: Tensor) -> None:
        """Sets all levels by the unit-norm embeddings (N, D) of all samples, in data-set order."""

    def update(self, ids: Tensor, features: Tensor) -> None:
        """Takes in (B, D) embeddings of this step's samples (B,), of all ranks. Default: waits for the next refresh."""

    def follow(self, epoch: int) -> None:
        """Told at the beginning of an epoch, and where one goes on. Default: nothing."""


class Online(Criteria):
    """Started once by DBSCAN, then refined with every step.

    Args:
        hierarchy: the detector's, which is asked for its labels alone.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        super().__init__()
        self.hierarchy = hierarchy

    @property
    def started(self) -> Tensor:  # type: ignore[override]
        return self.hierarchy.started

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.hierarchy.clusters.labels_of(ids)

    def due(self, epoch: int) -> bool:
        return self.hierarchy.due(epoch)

    def refresh(self, features: Tensor) -> None:
        self.hierarchy.refresh(features, 0.0)

    def follow(self, epoch: int) -> None:
        self.hierarchy.follow(epoch)

    def update(self, ids: Tensor, features: Tensor) -> None:
        if self.started:
            self.hierarchy.collect(ids, features)


class Offline(Criteria):
    """Clustered anew every few epochs, each level for itself, so that levels need not be nested (Table 4).

    Args:
        num_samples: N.
        number: H.
        cluster: (N, D) embeddings → (H, N) labels in [0, N).
        warmup_epochs: before the first clustering.
        every: epochs between two.

    State: `labels` (H, N), before the first clustering every sample its own; `started`.
    """

    on_host = ("started",)
    labels: Tensor

    def __init__(self, num_samples: int, number: int, cluster: Callable[[Tensor], Tensor], warmup_epochs: int, every: int) -> None:
        super().__init__()
        self.cluster, self.warmup_epochs, self.every = cluster, warmup_epochs, every
        self.register_buffer("labels", torch.arange(num_samples).repeat(number, 1))
        self.register_buffer("started", torch.tensor(False))

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.labels[:, ids]

    def due(self, epoch: int) -> bool:
        return epoch >= self.warmup_epochs and (epoch - self.warmup_epochs) % self.every == 0

    @torch.no_grad()
    def refresh(self, features: Tensor) -> None:
        """Rank zero does it and shares the labels."""
        if features.shape[:1] != self.labels.shape[1:]:
            wanted = (self.labels.shape[1], "any")
            raise ValueError(f"`features` (={tuple(features.shape)}) must have the shape {wanted}: all samples in data-set order")
        require_finite(features)
        if distributed.world_size() == 1 or dist.get_rank() == 0:
            self.labels.copy_(self.cluster(features))
        if distributed.world_size() > 1:
            dist.broadcast(self.labels, 0)
        self.started.fill_(True)


def by_dbscan(like: Hierarchy, every: int) -> Offline:
    """DBSCAN anew for each level, at the radii of a hierarchy that is otherwise not used; where they are fitted, anew too."""

    def cluster(features: Tensor) -> Tensor:
        return dbscan_levels(features, like.radii.fit(features), min_samples=like.min_samples)

    return Offline(like.clusters.num_samples, like.clusters.levels, cluster, like.warmup_epochs, every)


def by_kmeans(
    num_samples: int, number: int, warmup_epochs: int, every: int, num_clusters: int | Sequence[int] | None, seed: int
) -> Offline:
    """k-means anew for each level, into `num_clusters` of the levels 2 … H, or by default N/5 at the last and twice as many at each before;
    with H > 4, ⅘ N at level 2 and half as many at each after. For H = 4 both are the paper's proportions."""
    first = min(1 << (number - 2), 4) * num_samples // 5
    given = (num_clusters,) if isinstance(num_clusters, int) else num_clusters
    chosen = tuple(first >> level for level in range(number - 1)) if given is None else tuple(given)
    if len(chosen) != number - 1 or not all(1 <= each < num_samples for each in chosen):
        raise ValueError(f"`num_clusters` (={list(chosen)}) must be one number below {num_samples} for each of the criteria 2 to {number}")
    check_falling(chosen)
    cluster = partial(kmeans_levels, num_clusters=chosen, seed=seed)
    return Offline(num_samples, number, cluster, warmup_epochs, every)
