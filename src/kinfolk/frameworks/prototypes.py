"""The prototypes of PCL: clusters of all samples at several granularities, how concentrated each is, and who is held to belong to his.

Dimension key: N samples, D embedding, K clusters of a level, L levels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering import ClusterLabels
from kinfolk.clustering.concentration import concentration
from kinfolk.clustering.confidence import Confidence, accepted, centroid_distance, sample_confidence
from kinfolk.stores.exact import Exact


class Prototypes(Exact):
    """Clusters with their concentrations, refreshed as a whole; the same on all ranks.

    Args:
        num_samples, dim: N, D.
        num_clusters: of each level.
        temperature: mean concentration of a level.
        alpha, clip: see `concentration`.
        confidence: by what samples are accepted where not all are; of equal ones, the nearest to their prototype. "cluster": the members
            of the most concentrated clusters first (PCL); "sample": softmax over the prototypes of cos / `temperature`, at the sample's
            own (IFND, equation 2).
        warm_start, seed, iterations, warm_iterations, points_per_cluster: see `ClusterLabels`.

    State: the clusters', `concentration` (ΣK,), `accepted` (L, N).
    """

    concentration: Tensor
    accepted: Tensor

    def __init__(
        self,
        num_samples: int,
        dim: int,
        num_clusters: int | tuple[int, ...],
        *,
        temperature: float,
        alpha: float,
        clip: float,
        confidence: Confidence,
        warm_start: bool,
        seed: int,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        self.temperature, self.alpha, self.clip, self.confidence = temperature, alpha, clip, confidence
        self.clusters = ClusterLabels(
            num_samples,
            dim,
            num_clusters,
            seed=seed,
            warm_start=warm_start,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )
        self.register_buffer("concentration", torch.zeros(sum(self.clusters.num_clusters)))
        self.register_buffer("accepted", torch.zeros(len(self.clusters.num_clusters), num_samples, dtype=torch.bool))

    @property
    def ready(self) -> bool:
        """Whether there are prototypes."""
        return bool(self.clusters.refreshed)

    @property
    def labels(self) -> Tensor:
        """(L, N) pseudo-labels; a sample that is not accepted has one of its own."""
        own_N = max(self.clusters.num_clusters) + torch.arange(self.clusters.num_samples, device=self.accepted.device)
        return self.clusters.labels.where(self.accepted, own_N)

    def of(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(K, D) centroids, (K,) concentrations and (A,) labels of the samples `ids` (A,), −1 where not accepted, for each level."""
        phi = torch.split(self.concentration, list(self.clusters.num_clusters))
        labels = self.clusters.labels[:, ids].where(self.accepted[:, ids], -1)
        return [(self.clusters.level(level), phi[level], labels[level]) for level in range(len(phi))]

    @torch.no_grad()
    def refresh(self, features: Tensor, rate: float) -> None:
        """Clusters (N, D) unit-norm embeddings, and accepts the share `rate` of the samples, the most confident, at each level."""
        features = features.to(self.accepted.device)
        self.clusters.refresh(features)
        for level, (centroids_KD, phi_K, _) in enumerate(self.of(self.accepted.new_zeros(0, dtype=torch.int64))):
            labels_N = self.clusters.labels[level]
            phi_K.copy_(concentration(features, labels_N, centroids_KD, temperature=self.temperature, alpha=self.alpha, clip=self.clip))
            if self.confidence == "cluster":
                confidence_N = phi_K[labels_N].reciprocal()
            else:
                unit_ND, unit_KD = (F.normalize(x, dim=1) for x in (features, centroids_KD.to(features.dtype)))
                confidence_N = sample_confidence(unit_ND, unit_KD, labels_N, self.temperature)
            self.accepted[level] = accepted(confidence_N, rate, centroid_distance(features, centroids_KD, labels_N))
        if distributed.world_size() > 1:  # sums on an accelerator may differ in the last bit
            dist.broadcast(self.concentration, 0)
            dist.broadcast(self.accepted, 0)
