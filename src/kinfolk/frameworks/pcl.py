"""PCL: Li et al., ICLR 2021, equations 11 and 12.

Dimension key: V views, B batch, A anchors, D embedding, N data set, K prototypes of a level, L
levels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.clustering import PseudoLabels
from kinfolk.clustering.labels import (
    Confidence,
    Schedule,
    check_acceptance,
    concentration,
    last_clustering,
    rate_at,
    sample_confidence,
)
from kinfolk.detectors.base import Space
from kinfolk.errors import require_at_least
from kinfolk.frameworks.base import ClusteringFramework
from kinfolk.frameworks.moco import MomentumFramework
from kinfolk.objectives import NTXentLoss
from kinfolk.objectives.prototypes import proto_nce
from kinfolk.pairs import Pairs, integer_ids, two_views, unit
from kinfolk.stores.per_sample import Exact, check_ids, check_num_samples, to_device


class Prototypes(Exact):
    """`PseudoLabels` at several granularities, with the `concentration` of the clusters, of which
    `how` are settings."""

    concentration: Tensor

    def __init__(
        self,
        num_samples: int,
        num_clusters: int | tuple[int, ...],
        confidence: Confidence,
        **how: float,
    ) -> None:
        super().__init__()
        self.confidence, self.how = confidence, how
        self.clusters = PseudoLabels(num_samples, num_clusters, seed=0, accepts=True)
        self.register_buffer("concentration", torch.zeros(sum(self.clusters.num_clusters)))

    @property
    def ready(self) -> bool:
        return bool(self.clusters.refreshed)

    @property
    def accepted(self) -> Tensor:
        assert self.clusters.accepted is not None
        return self.clusters.accepted

    def of(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each level (K, D) centroids, (K,) concentrations and (A,) labels, −1 where none was
        accepted."""
        levels = map(self.clusters.level, range(len(self._phi)))
        return list(zip(levels, self._phi, self.clusters.of(ids), strict=True))

    @torch.no_grad()
    def refresh(self, features: Tensor, rate: float) -> None:
        """Clusters (N, D) unit-norm embeddings and accepts the most confident share `rate`."""
        features = features.to(self.concentration.device)
        self.clusters.refresh(features)
        for level, phi_K in enumerate(self._phi):
            labels_N, centroids_KD = self.clusters.labels[level], self.clusters.level(level)
            phi_K.copy_(concentration(features, labels_N, centroids_KD, **self.how))
        if distributed.world_size() > 1:  # sums on an accelerator may differ in the last bit
            dist.broadcast(self.concentration, 0)
        self.clusters.accept(features, rate, self._confidence)

    def _confidence(
        self, features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor, level: int
    ) -> Tensor:
        if self.confidence == "cluster":
            return self._phi[level][labels_N].reciprocal()
        unit = F.normalize(features_ND, dim=1), F.normalize(centroids_KD, dim=1)
        return sample_confidence(*unit, labels_N, self.how["temperature"])

    @property
    def _phi(self) -> tuple[Tensor, ...]:
        """Views of the concentrations of each level."""
        return torch.split(self.concentration, list(self.clusters.num_clusters))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._save_to_state_dict(destination, prefix, *rest)
        destination[f"{prefix}accepted"] = self.accepted

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        accepted = state_dict.pop(f"{prefix}accepted", None)
        if accepted is None:
            others[2].append(f"{prefix}accepted")
        elif accepted.shape == self.accepted.shape:  # otherwise the clusters are refused too
            self.clusters.set_acceptance(accepted)
        super()._load_from_state_dict(state_dict, prefix, *others)


class PCL(ClusteringFramework, MomentumFramework):
    """InfoNCE plus a contrast of each anchor with prototypes, clusters of all samples.

        loss_i = InfoNCE_i + mean over levels of −log( exp(v_i·c_s / φ_s) / Σ_j exp(v_i·c_j / φ_j) )

    c_s is the prototype (unit-norm centroid) of sample i, φ_j the concentration of prototype j,
    scaled to the mean `temperature`. InfoNCE, to which detector and action apply, is that of MoCo,
    with `queue_size=0` that of SimCLR.
    """

    on_host = ("draws",)
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"
    clusters_are: ClassVar[str] = "prototypes"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_clusters: int | tuple[int, ...] | None = None,
        warmup_epochs: int = 20,
        every: int = 1,
        queue_size: int = 16384,
        momentum: float = 0.999,
        temperature: float = 0.2,
        num_prototypes: int | None = None,
        alpha: float = 10.0,
        clip: float = 0.1,
        schedule: Schedule = "step",
        final_rate: float = 1.0,
        confidence: Confidence = "cluster",
        **given: Any,
    ) -> None:
        super().__init__(encoder, head, NTXentLoss(temperature=temperature, **given))
        self.set_schedule(warmup_epochs, every)
        require_at_least(0, queue_size=queue_size)
        require_at_least(1, num_prototypes=num_prototypes)
        self.require_projected("prototypes")
        check_acceptance(schedule, final_rate, confidence)
        check_num_samples(num_samples)
        self.num_samples, self.num_prototypes = num_samples, num_prototypes
        self.schedule, self.final_rate = schedule, final_rate
        self.has_queue = queue_size > 0
        if self.has_queue:
            self.add_queue(num_samples, queue_size, momentum, "constant")
        if num_clusters is None:
            num_clusters = tuple(max(2, num_samples * share // 100) for share in (2, 4, 8))
        how = {"temperature": temperature, "alpha": alpha, "clip": clip}
        self.prototypes = Prototypes(num_samples, num_clusters, confidence, **how)
        self.draws: Tensor
        self.register_buffer("draws", torch.tensor(0))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        check_ids(ids, self.num_samples)
        if not self.has_queue:
            z1, z2 = self.head(self.encoder(views.flatten(0, 1))).chunk(2)
            anchors, loss = torch.cat((z1, z2)), self.objective.on(two_views(z1, z2, ids))
            return loss + self._prototype_term(anchors, torch.cat((ids, ids)))
        queries: Tensor = self.head(self.encoder(views[0]))
        keys = self.make_keys(views[1])
        candidates, candidate_ids = self.queue.candidates(keys, ids)
        pairs = Pairs(
            *(unit(queries), candidates, keys.unsqueeze(1), ids, candidate_ids),
            unit=True,
            collected=keys,
        )
        loss = self.objective.on(pairs) + self._prototype_term(queries, ids)
        if self.training:
            self.push(keys, ids, loss)
        return loss

    def _prototype_term(self, anchors: Tensor, ids: Tensor) -> Tensor:
        if not self.prototypes.ready or self.epoch < self.warmup_epochs:
            return anchors.new_zeros(())
        levels, number = self.prototypes.of(ids), self.num_prototypes
        if number is None:
            return proto_nce(anchors, levels)
        # equal on all ranks and after a resume
        draw = torch.Generator().manual_seed(int(self.draws))
        orders = (torch.randperm(len(phi), generator=draw) for _, phi, _ in levels)
        drawn = [to_device(order[:number], ids.device) for order in orders]
        if self.training:
            self.draws.add_(1)
        return proto_nce(anchors, levels, drawn)

    def embed(self, images: Tensor) -> Tensor:
        return self.slow.embed(images) if self.has_queue else super().embed(images)

    @property
    def space(self) -> Space:
        return "projected"

    def cluster(self, features: Tensor | None, progress: float) -> None:
        assert features is not None, "`collects` is False in such an epoch"
        last = last_clustering(self.every, self.num_epochs, self.warmup_epochs)
        rate = rate_at(self.schedule, self.final_rate, progress, last=last)
        self.prototypes.refresh(features, rate)
