"""PCL: Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR 2021,
equations 11 and 12.

`Prototypes` clusters all samples at several granularities, with the concentration of each cluster;
`PCL` is the framework.

Dimension key: V views, B batch, A anchors, D embedding, N data set, K prototypes of a level, L
levels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.clustering import PseudoLabels
from kinfolk.clustering.confidence import (
    Confidence,
    Schedule,
    check_acceptance,
    concentration,
    last_clustering,
    rate_at,
    sample_confidence,
)
from kinfolk.detectors.base import Space
from kinfolk.errors import warn_if_queue_too_large, warn_if_warmup_too_long
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.moco import MomentumCopy
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import NTXentLoss
from kinfolk.objectives.ntxent import Estimate
from kinfolk.objectives.prototypes import proto_nce
from kinfolk.pairs import Pairs, integer_ids, two_views
from kinfolk.stores import Queue
from kinfolk.stores.per_sample import Exact, check_ids, check_num_samples, finite, sent


class Prototypes(Exact):
    """`PseudoLabels` with the concentrations of their clusters, refreshed together and equal on all
    ranks.

    Args:
        num_samples, dim: N, D.
        num_clusters: clusters of each level.
        temperature: mean concentration of a level.
        alpha, clip: see `concentration`.
        confidence: the order in which samples are accepted if not all are. "cluster" starts with
            the most concentrated clusters (PCL). "sample" uses the softmax of cos / `temperature`
            over the prototypes, at the sample's own prototype (IFND, equation 2). Ties are resolved
            by the distance to the prototype.
        warm_start, seed, iterations, warm_iterations, points_per_cluster: see `PseudoLabels`.

    State: the clusters, `concentration` (ΣK,), `accepted` (L, N).
    """

    concentration: Tensor

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
        self.temperature, self.alpha, self.clip, self.confidence = (
            temperature,
            alpha,
            clip,
            confidence,
        )
        self.clusters = PseudoLabels(
            num_samples,
            dim,
            num_clusters,
            seed=seed,
            accepts=True,
            warm_start=warm_start,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )
        self.register_buffer("concentration", torch.zeros(sum(self.clusters.num_clusters)))

    @property
    def ready(self) -> bool:
        """Whether the prototypes have been computed."""
        return bool(self.clusters.refreshed)

    @property
    def accepted(self) -> Tensor:
        """(L, N) whether a sample has a prototype."""
        assert self.clusters.accepted is not None
        return self.clusters.accepted

    def of(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(K, D) centroids, (K,) concentrations and (A,) labels of the samples `ids` (A,), for each
        level. Samples not accepted have −1."""
        return [
            (self.clusters.level(level), phi_K, labels)
            for level, (phi_K, labels) in enumerate(
                zip(self._phi, self.clusters.of(ids), strict=True)
            )
        ]

    @torch.no_grad()
    def refresh(self, features: Tensor, rate: float) -> None:
        """Clusters (N, D) unit-norm embeddings and accepts the most confident share `rate` of the
        samples at each level."""
        features = features.to(self.concentration.device)
        self.clusters.refresh(features)
        for level, phi_K in enumerate(self._phi):
            labels_N, centroids_KD = self.clusters.labels[level], self.clusters.level(level)
            phi_K.copy_(
                concentration(
                    features,
                    labels_N,
                    centroids_KD,
                    temperature=self.temperature,
                    alpha=self.alpha,
                    clip=self.clip,
                )
            )
        if distributed.world_size() > 1:  # sums on an accelerator may differ in the last bit
            dist.broadcast(self.concentration, 0)
        self.clusters.accept(features, rate, self._confidence)

    def _confidence(
        self, features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor, level: int
    ) -> Tensor:
        if self.confidence == "cluster":
            return self._phi[level][labels_N].reciprocal()
        return sample_confidence(
            F.normalize(features_ND, dim=1),
            F.normalize(centroids_KD, dim=1),
            labels_N,
            self.temperature,
        )

    @property
    def _phi(self) -> tuple[Tensor, ...]:
        """(K,) the concentrations of each level: views of `concentration`."""
        return torch.split(self.concentration, list(self.clusters.num_clusters))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}accepted"] = self.accepted

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        accepted = state_dict.pop(f"{prefix}accepted", None)
        if accepted is None:
            others[2].append(f"{prefix}accepted")
        elif accepted.shape == self.accepted.shape:  # otherwise the clusters are refused too
            self.clusters.set_acceptance(accepted)
        super()._load_from_state_dict(state_dict, prefix, *others)


class PCL(Framework):
    """InfoNCE plus a contrast of each anchor with the prototypes, from a clustering of all samples
    in every epoch.

        loss_i = InfoNCE_i + mean over levels of −log( exp(v_i·c_s / φ_s) / Σ_j exp(v_i·c_j / φ_j) )

    c_s is the prototype (unit-norm centroid) of sample i at a level, φ_j the concentration of
    prototype j, scaled to the mean `temperature`. InfoNCE is that of MoCo: the query of the first
    view against a queue of keys from a momentum encoder, whose embeddings are also clustered. With
    `queue_size=0` it is that of SimCLR: both views are anchors, the batch provides the negatives,
    and there is no momentum encoder, as in the comparison of IFND (appendix E). Detector and action
    apply only to InfoNCE.

    Args:
        encoder, head: see `Framework`.
        num_samples: N.
        num_clusters: prototypes of each level, or of a single level. None means 2, 4 and 8 % of the
            samples, as in the paper.
        warmup_epochs: epochs with InfoNCE only.
        every: epochs between two clusterings.
        queue_size, momentum: see `MoCo`. A queue size of 0 means negatives from the batch.
        temperature: temperature of InfoNCE, and mean concentration of the prototypes.
        num_prototypes: negative prototypes drawn at each step and level. None means all.
        alpha, clip: see `concentration`.
        schedule, final_rate, confidence: share of pseudo-labels that are used, most confident first
            (see `Prototypes`): `final_rate` after the warm-up ("step" and "constant"), or a share
            that grows to `final_rate` at the last clustering ("linear"). A sample that is not
            accepted has no prototype term. The paper uses all after a warm-up.
        warm_start, cluster_seed, iterations, warm_iterations, points_per_cluster: settings of
            k-means; see `PseudoLabels`.
        detector, action, min_negatives, kin_weight, block_rows: see `NTXentLoss`.

    State: prototypes with labels and concentrations, the number of draws, momentum copy and queue.

    Deviates from the published code in: all prototypes are negatives by default, while it draws as
    many as the queue has places; drawn prototypes are the same for all anchors of a step, without
    the prototypes of other anchors; k-means runs once per level, with a warm start. See `MoCo` for
    the queue.
    """

    on_host = ("draws",)
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"

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
        warm_start: bool = True,
        cluster_seed: int = 0,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
        **shared: Unpack[Estimate],
    ) -> None:
        super().__init__(encoder, head, NTXentLoss(temperature=temperature, **shared))
        for name, value, least in (
            ("warmup_epochs", warmup_epochs, 0),
            ("every", every, 1),
            ("queue_size", queue_size, 0),
        ):
            if value < least:
                raise ValueError(f"`{name}` (={value}) must be at least {least}")
        if num_prototypes is not None and num_prototypes < 1:
            raise ValueError(f"`num_prototypes` (={num_prototypes}) must be at least 1")
        detector = shared.get("detector")
        if detector is not None and detector.space != "projected":
            raise ValueError(
                f"`detector` (with `space` {detector.space!r}) must use projected embeddings, as"
                " the prototypes do; remove its `space`"
            )
        check_acceptance(schedule, final_rate, confidence)
        check_num_samples(num_samples)
        self.num_samples = num_samples
        warn_if_queue_too_large(queue_size, num_samples)
        chosen = (
            tuple(max(2, num_samples * share // 100) for share in (2, 4, 8))
            if num_clusters is None
            else num_clusters
        )
        self.warmup_epochs, self.every, self.num_prototypes = warmup_epochs, every, num_prototypes
        self.schedule, self.final_rate, self.cluster_seed, self.epoch = (
            schedule,
            final_rate,
            cluster_seed,
            0,
        )
        self.num_epochs, self._warned = 1, False
        dim = embedding_size(encoder, head)
        self.slow = MomentumCopy(encoder, head, momentum) if queue_size else None
        self.queue = Queue(queue_size, dim) if queue_size else None
        self.prototypes = Prototypes(
            num_samples,
            dim,
            chosen,
            temperature=temperature,
            alpha=alpha,
            clip=clip,
            confidence=confidence,
            warm_start=warm_start,
            seed=cluster_seed,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )
        self.draws: Tensor
        self.register_buffer("draws", torch.tensor(0))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        check_ids(ids, self.num_samples)
        if self.slow is None or self.queue is None:
            z1, z2 = self.head(self.encoder(views.flatten(0, 1))).chunk(2)
            anchors, loss = torch.cat((z1, z2)), self.objective.on(two_views(z1, z2, ids))
            return loss + self._prototype_term(anchors, torch.cat((ids, ids)))
        queries: Tensor = self.head(self.encoder(views[0]))
        keys = F.normalize(self.slow(views[1]).to(self.queue.features.dtype), dim=1)
        candidates, candidate_ids = self.queue.candidates(keys, ids)
        loss = self.objective.on(
            Pairs(
                queries,
                candidates,
                keys.unsqueeze(1),
                ids,
                candidate_ids,
                unit_candidates=True,
                collected=keys,
            )
        )
        loss = loss + self._prototype_term(queries, ids)
        if self.training:
            is_finite = finite(loss)  # of the joined batch, so all ranks agree
            self.queue.push(keys, ids, is_finite)
        return loss

    def _prototype_term(self, anchors: Tensor, ids: Tensor) -> Tensor:
        if not self.prototypes.ready or self.epoch < self.warmup_epochs:
            return anchors.new_zeros(())
        levels, number = self.prototypes.of(ids), self.num_prototypes
        if number is None:
            return proto_nce(anchors, levels)
        # equal on all ranks and after a resume
        draw = torch.Generator().manual_seed(1_000_003 * self.cluster_seed + int(self.draws))
        drawn = [
            sent(torch.randperm(len(phi), generator=draw)[:number], ids.device)
            for _, phi, _ in levels
        ]
        if self.training:
            self.draws.add_(1)
        return proto_nce(anchors, levels, drawn)

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) embeddings that are clustered: those of the momentum encoder if there is one."""
        return (
            super().embed(images) if self.slow is None else F.normalize(self.slow(images), dim=-1)
        )

    def after_step(self) -> None:
        if self.slow is not None:
            self.slow.follow(self.encoder, self.head)

    @property
    def space(self) -> Space:
        return "projected"

    @property
    def collects(self) -> bool:
        """The prototypes need the features of all samples even if the detector collects its own."""
        return super().collects and not self._clusters_in(self.epoch)

    def due(self, epoch: int) -> bool:
        return self._clusters_in(epoch) or super().due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(None if detector.collects else features, progress)
        if self._clusters_in(self.epoch):
            assert features is not None, "`collects` is False in such an epoch"
            last = last_clustering(self.every, self.num_epochs, self.warmup_epochs)
            self.prototypes.refresh(
                features, rate_at(self.schedule, self.final_rate, progress, last=last)
            )

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self._warned = self._warned or warn_if_warmup_too_long(
            self.warmup_epochs, num_epochs, "prototypes"
        )
        self.epoch, self.num_epochs = int(epoch), num_epochs

    def _clusters_in(self, epoch: int) -> bool:
        return epoch >= self.warmup_epochs and (epoch - self.warmup_epochs) % self.every == 0
