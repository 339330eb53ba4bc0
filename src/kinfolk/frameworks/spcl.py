"""SPCL: Mo, Sun and Li, Siamese Prototypical Contrastive Learning, 2022, algorithm 1 and equations 1 to 5.

Dimension key: V views, B batch, A features (A = B·V, sample-major), F features, D embedding, N data set, K prototypes, L levels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.actions import Action
from kinfolk.clustering import ClusterLabels
from kinfolk.clustering.batches import cluster_pair_batches
from kinfolk.detectors.base import Detector, Space
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.renew import renew, require_renewable
from kinfolk.models.heads import embedding_size, projection_head
from kinfolk.objectives import NTXent
from kinfolk.objectives.metric import SiameseMetric
from kinfolk.objectives.prototype import PrototypeCrossEntropy

Head = Literal["contrast", "metric", "prototype"]
Source = Literal["clusters", "labels"]


class SPCL(Framework):
    """NT-Xent on batches that are half of one prototype, a siamese loss on prototypes, and a classifier of them; all anew every epoch.

        loss = α · NT-Xent(g_c(h)) + β · metric(g_m, h) + γ · cross-entropy(g_p(h))

    Prototypes are k-means clusters of the encoder's features h of all samples, at unit norm, made anew before every epoch. Eq. 1: the
    denominator of NT-Xent holds neither z nor z′. Metric: see `SiameseMetric`; prototype: see `PrototypeCrossEntropy`; batches: see
    `cluster_pair_batches`. Detector and action concern NT-Xent alone. With β = γ = 0 and `positive_in_denominator` it is SimCLR on batches
    by cluster.

    Args:
        encoder, head: f and g_c; see `Framework`.
        num_samples: N.
        num_clusters: K; several: the prototype losses of all are averaged, batches and pairs go by the first. None: one for every 98
            samples, the paper's proportion for CIFAR.
        contrast_weight, metric_weight, prototype_weight: α, β, γ; 0: that loss and the training of its head are left out.
        prototypes: "clusters", or "labels": the true ones in their place (the paper's Table 2, for comparison).
        labels: (N,) of the samples, −1: unknown; with "labels" only.
        reinitialise: which heads begin anew at every refresh, as algorithm 1 has it.
        every: epochs between two refreshes.
        reverse_weight, log_zero: symmetric cross-entropy for noisy prototypes; see `prototype_cross_entropy`.
        warm_start, cluster_seed: of k-means; see `ClusterLabels`.
        temperature, detector, action, min_negatives, kin_weight, block_rows, positive_in_denominator: see `NTXent`.

    State: clusters, the heads, `seed` (drawn from torch's generator when it is made) and the number of `draws` of pairs.

    Deviates from the paper in: losses are means where the equations have sums, in the same proportion to each other; features are
    clustered without augmentation and at unit norm; a batch of 2N goes by several prototypes where one has fewer than N samples.
    """

    paper: ClassVar[str] = "Mo et al., 2022"
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_clusters: tuple[int, ...] | None = None,
        contrast_weight: float = 1.0,
        metric_weight: float = 1.0,
        prototype_weight: float = 1.0,
        prototypes: Source = "clusters",
        labels: Tensor | None = None,
        reinitialise: tuple[Head, ...] = ("contrast", "metric", "prototype"),
        every: int = 1,
        reverse_weight: float = 0.0,
        log_zero: float = -4.0,
        warm_start: bool = True,
        cluster_seed: int = 0,
        temperature: float = 0.5,
        detector: Detector | None = None,
        action: Action = "eliminate",
        min_negatives: int = 1,
        kin_weight: float = 0.5,
        block_rows: int | None = None,
        positive_in_denominator: bool = False,
    ) -> None:
        objective = NTXent(
            temperature,
            detector,
            action,
            min_negatives,
            block_rows=block_rows,
            kin_weight=kin_weight,
            positive_in_denominator=positive_in_denominator,
        )
        super().__init__(encoder, head, objective)
        self.weights = {"contrast_weight": contrast_weight, "metric_weight": metric_weight, "prototype_weight": prototype_weight}
        _check(self.weights, prototypes, labels, reinitialise, every)
        self.every, self.reinitialise, self.num_samples, self.epoch = every, reinitialise, num_samples, 0
        size = embedding_size(encoder, nn.Identity())
        self.clusters: ClusterLabels | None = None
        chosen: tuple[int, ...]
        self.truth: Tensor | None
        self.register_buffer("truth", None, persistent=False)
        if prototypes == "labels":
            assert labels is not None
            self.truth, chosen = labels.to(torch.int64), (int(labels.max()) + 1,)
        else:
            chosen = (max(2, num_samples // 98),) if num_clusters is None else tuple(num_clusters)
            self.clusters = ClusterLabels(num_samples, size, chosen, seed=cluster_seed, warm_start=warm_start)
        if not contrast_weight:
            head.requires_grad_(False)  # it is looked through for the measures alone; an optimiser and DDP must not wait for its gradient
        self.metric = SiameseMetric(projection_head(size, size, 1, norm=False)) if metric_weight else None
        self.prototype = PrototypeCrossEntropy(size, chosen, reverse_weight, log_zero) if prototype_weight else None
        require_renewable(*self._renewed())
        self.seed: Tensor
        self.draws: Tensor
        self.register_buffer("seed", torch.randint(1 << 62, ()))
        self.register_buffer("draws", torch.tensor(0))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = ids.to(views.device, torch.int64)
        h: Tensor = self.encoder(views.flatten(0, 1))
        z1, z2 = self.head(h).chunk(2)
        contrast, metric, prototype = self.weights.values()
        loss = contrast * self.objective(z1, z2, ids) if contrast else 0 * self._measure(z1, z2, ids)
        h_AF = h.view(len(views), len(ids), -1).transpose(0, 1).flatten(0, 1)
        if self.metric is not None:
            (everybody,) = distributed.joined(ids)
            draw = torch.Generator().manual_seed(int(self.seed) ^ int(self.draws))  # the same on all ranks and on resume
            loss = loss + metric * self.metric(h_AF, self._own(everybody), draw)
            if self.training:
                self.draws.add_(1)
        if self.prototype is not None:
            loss = loss + prototype * self.prototype(h_AF, self._levels(ids.repeat_interleave(len(views))))
        return loss

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        if self.clusters is not None and not self.clusters.refreshed:
            return None
        everybody = torch.arange(self.num_samples, device=self.seed.device)
        return cluster_pair_batches(self._own(everybody), batch_size, generator)

    @property
    def space(self) -> Space:
        return "features"

    @property
    def collects(self) -> bool:
        """With the labels for prototypes, features are needed only where a detector asks for them."""
        return self.clusters is None and all(each.collects or not each.due(self.epoch) for each in self.detectors)

    @property
    def renewed(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for head in self._renewed() for parameter in head.parameters()) if self._own_turn(self.epoch) else ()

    def due(self, epoch: int) -> bool:
        return self._own_turn(epoch) or super().due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Detectors that go by embeddings have those of g_c as it was trained, before it begins anew."""
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(None if detector.collects else self._for(detector, features), progress)
        if not self._own_turn(self.epoch):
            return
        if self.clusters is not None:
            assert features is not None
            self.clusters.refresh(F.normalize(features, dim=1))
        renew(self._renewed(), int(self.seed) ^ 0x9E3779B1 * (self.epoch + 1))  # torch's generator goes by the lower 32 bits alone

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.epoch = epoch

    def _own_turn(self, epoch: int) -> bool:
        return epoch % self.every == 0 and (self.clusters is not None or bool(self._renewed()))

    def _renewed(self) -> list[nn.Module]:
        """The heads that a refresh sets anew."""
        heads = {"contrast": self.head, "metric": self.metric, "prototype": self.prototype}
        return [head for name, head in heads.items() if name in self.reinitialise and head is not None]

    def _levels(self, ids: Tensor) -> Tensor:
        """(L, A) prototypes of these samples; −1: none, or none yet."""
        if self.clusters is None:
            assert self.truth is not None
            return self.truth[ids].unsqueeze(0)
        return self.clusters.labels[:, ids] if self.clusters.refreshed else torch.full_like(ids, -1).expand(len(self.clusters.labels), -1)

    def _own(self, ids: Tensor) -> Tensor:
        """(A,) prototypes of these samples at the first level; one that has none is its own."""
        first_A = self._levels(ids)[0]
        return first_A.where(first_A >= 0, -1 - ids)

    @torch.no_grad()
    def _measure(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        """For the counts and the detector alone."""
        loss: Tensor = self.objective(z1, z2, ids)
        return loss.nan_to_num(0, 0, 0)

    @torch.no_grad()
    def _for(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        """Which of the features of all samples the detector goes by."""
        if features is None or detector.space == "features":
            return features
        training, weight = self.head.training, next(self.head.parameters())
        self.head.eval()
        parts = [F.normalize(self.head(part.to(weight)), dim=1).to(features) for part in torch.split(features, 4096)]
        self.head.train(training)
        return torch.cat(parts)


def _check(weights: dict[str, float], prototypes: Source, labels: Tensor | None, reinitialise: tuple[Head, ...], every: int) -> None:
    for name, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"`{name}` (={weight}) must not be negative")
    if not any(weights.values()):
        raise ValueError(f"one of {', '.join(f'`{name}`' for name in weights)} must be above 0")
    if prototypes not in ("clusters", "labels"):
        raise ValueError(f"`prototypes` (={prototypes!r}) must be 'clusters' or 'labels'")
    if prototypes == "labels" and (labels is None or not (labels >= 0).any()):
        raise ValueError("`prototypes` (='labels') needs labels and the data has none; use 'clusters'")
    for name in reinitialise:
        if name not in ("contrast", "metric", "prototype"):
            raise ValueError(f"`reinitialise` (={name!r}) must hold 'contrast', 'metric' or 'prototype'")
    if every < 1:
        raise ValueError(f"`every` (={every}) must be at least 1")
