"""The prototype of every sample: a k-means cluster of its features, or for comparison its true label. Mo et al., 2022, section 3.2.

Dimension key: N data set, F features, L levels, A features of a step.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.clustering import ClusterLabels

Source = Literal["clusters", "labels"]


class Assigned(nn.Module):
    """Prototypes of all samples at L numbers of them.

    Args:
        num_samples: N.
        num_features: F.
        source: "clusters", made anew at every refresh; "labels": the true ones, of one level, which need none.
        num_clusters: of each level, or of the only one; None: one, with a prototype for every 98 samples.
        labels: (N,) the true ones, −1: unknown; with "labels" only.
        seed, warm_start, iterations, warm_iterations, points_per_cluster: see `ClusterLabels`.

    State: the clusters. True labels are no state: they are given anew.
    """

    truth: Tensor | None
    clusters: ClusterLabels | None
    num_prototypes: tuple[int, ...]

    def __init__(
        self,
        num_samples: int,
        num_features: int,
        source: Source,
        num_clusters: int | tuple[int, ...] | None,
        labels: Tensor | None,
        seed: int,
        warm_start: bool,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        if source not in ("clusters", "labels"):
            raise ValueError(f"`prototypes` (={source!r}) must be 'clusters' or 'labels'")
        if source == "labels" and (labels is None or not (labels >= 0).any()):
            raise ValueError("`prototypes` (='labels') needs labels and the data has none; use 'clusters'")
        self.num_samples, self.clusters = num_samples, None
        self.register_buffer("truth", None, persistent=False)
        if source == "labels":
            assert labels is not None
            self.truth, self.num_prototypes = labels.to(torch.int64), (int(labels.max()) + 1,)
            return
        chosen = max(2, num_samples // 98) if num_clusters is None else num_clusters
        self.clusters = ClusterLabels(
            num_samples,
            num_features,
            chosen,
            seed=seed,
            warm_start=warm_start,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )
        self.num_prototypes = self.clusters.num_clusters

    @property
    def device(self) -> torch.device:
        """Where the prototypes are."""
        return self.truth.device if self.clusters is None and self.truth is not None else next(self.buffers()).device

    @property
    def ready(self) -> bool:
        """Whether there are any."""
        return self.clusters is None or bool(self.clusters.refreshed)

    def refresh(self, features: Tensor | None) -> None:
        """Clusters (N, F) features of all samples, in data-set order, at unit norm; with true labels nothing."""
        if self.clusters is not None:
            assert features is not None
            self.clusters.refresh(F.normalize(features, dim=1))

    def levels(self, ids: Tensor) -> Tensor:
        """(L, A) prototypes of these samples; −1: none, or none yet."""
        if self.truth is not None:
            return self.truth[ids].unsqueeze(0)
        assert self.clusters is not None
        return self.clusters.labels[:, ids] if self.ready else torch.full_like(ids, -1).expand(len(self.clusters.labels), -1)

    def first(self, ids: Tensor) -> Tensor:
        """(A,) prototypes of these samples at the first level; one that has none is its own."""
        first_A = self.levels(ids)[0]
        return first_A.where(first_A >= 0, -1 - ids)
