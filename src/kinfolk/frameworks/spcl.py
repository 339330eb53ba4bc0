"""SPCL: Mo, Sun and Li, Siamese Prototypical Contrastive Learning, 2022, algorithm 1 and equations 1 to 5.

Dimension key: V views, B batch, A features (A = B·V, sample-major), F features, D embedding, N data set, K prototypes, L levels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.cautions import warn_if_warmup_too_long
from kinfolk.clustering.batches import cluster_pair_batches
from kinfolk.detectors.base import Detector, Space
from kinfolk.frameworks.assigned import Assigned, Source
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.renew import renew, require_renewable
from kinfolk.models.heads import embedding_size, embeddings, projection_head
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import Shared
from kinfolk.objectives.prototype import PrototypeCrossEntropy
from kinfolk.objectives.siamese import SiameseMetric
from kinfolk.pairs import integer_ids

Head = Literal["contrast", "metric", "prototype"]


class SPCL(Framework):
    """NT-Xent on batches that are half of one prototype, a siamese loss on prototypes, and a classifier of them; all anew every epoch.

        loss = α · NT-Xent(g_c(h)) + β · metric(g_m, h) + γ · cross-entropy(g_p(h))

    Prototypes are k-means clusters of the encoder's features h of all samples, at unit norm, made anew before every epoch. Eq. 1: the
    denominator of NT-Xent holds neither z nor z′. Metric: see `SiameseMetric`; prototype: see `PrototypeCrossEntropy`; batches: see
    `cluster_pair_batches`. Before there are prototypes, NT-Xent is alone, on random batches. Detector and action concern NT-Xent alone.
    With β = γ = 0 and `positive_in_denominator` it is SimCLR on batches by cluster.

    Args:
        encoder, head: f and g_c; see `Framework`.
        num_samples: N.
        num_clusters: K; of several, the prototype losses of all are averaged, batches and pairs go by the first. None: one for every 98
            samples, the paper's proportion for CIFAR.
        contrast_weight, metric_weight, prototype_weight: α, β, γ; 0: that loss and the training of its head are left out.
        warmup_epochs: before the first prototypes; the paper has none.
        prototypes: "clusters", or "labels": the true ones in their place (the paper's Table 2, for comparison).
        labels: (N,) of the samples, −1: unknown; with "labels" only.
        reinitialise: which heads begin anew at every refresh, as algorithm 1 has it.
        every: epochs between two refreshes.
        reverse_weight, log_zero: symmetric cross-entropy for noisy prototypes; see `prototype_cross_entropy`.
        warm_start, cluster_seed, iterations, warm_iterations, points_per_cluster: of k-means; see `ClusterLabels`.
        temperature, detector, action, min_negatives, kin_weight, block_rows, positive_in_denominator: see `NTXent`.

    State: the clusters, the heads, `seed` (drawn from torch's generator when it is made), the number of `draws` of pairs, and whether
    the prototypes have `begun`.

    Deviates from the paper in: losses are means where the equations have sums, in the same proportion to each other; features are
    clustered without augmentation and at unit norm; a batch of 2N goes by several prototypes where one has fewer than N samples.
    """

    on_host = ("seed", "draws", "begun")
    paper: ClassVar[str] = "Mo et al., 2022"
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_clusters: int | tuple[int, ...] | None = None,
        contrast_weight: float = 1.0,
        metric_weight: float = 1.0,
        prototype_weight: float = 1.0,
        warmup_epochs: int = 0,
        prototypes: Source = "clusters",
        labels: Tensor | None = None,
        reinitialise: tuple[Head, ...] = ("contrast", "metric", "prototype"),
        every: int = 1,
        reverse_weight: float = 0.0,
        log_zero: float = -4.0,
        warm_start: bool = True,
        cluster_seed: int = 0,
        temperature: float = 0.5,
        positive_in_denominator: bool = False,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
        **shared: Unpack[Shared],
    ) -> None:
        objective = NTXent(temperature, positive_in_denominator, **shared)
        super().__init__(encoder, head, objective)
        self.weights = {"contrast_weight": contrast_weight, "metric_weight": metric_weight, "prototype_weight": prototype_weight}
        _check(self.weights, reinitialise, warmup_epochs, every)
        self.warmup_epochs, self.every, self.reinitialise, self.epoch, self._told = warmup_epochs, every, reinitialise, 0, False
        size = embedding_size(encoder, nn.Identity())
        self.assigned = Assigned(
            num_samples,
            size,
            prototypes,
            num_clusters,
            labels,
            cluster_seed,
            warm_start,
            iterations,
            warm_iterations,
            points_per_cluster,
        )
        if not contrast_weight:
            head.requires_grad_(False)  # it is looked through for the measures alone; an optimiser and DDP must not wait for its gradient
        self.metric = SiameseMetric(projection_head(size, size, 1, norm=False)) if metric_weight else None
        self.prototype = PrototypeCrossEntropy(size, self.assigned.num_prototypes, reverse_weight, log_zero) if prototype_weight else None
        require_renewable(*self._renewed())
        self.seed: Tensor
        self.draws: Tensor
        self.begun: Tensor
        self.register_buffer("seed", torch.randint(1 << 62, ()))
        self.register_buffer("draws", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(not warmup_epochs))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        h: Tensor = self.encoder(views.flatten(0, 1))
        z1, z2 = self.head(h).chunk(2)
        contrast, metric, prototype = self.weights.values()
        begun = float(self._with_prototypes)  # a factor, as DDP waits for a gradient of every head in every step
        loss = contrast * self.objective(z1, z2, ids) if contrast else 0 * self._measure(z1, z2, ids)
        h_AF = h.view(len(views), len(ids), -1).transpose(0, 1).flatten(0, 1)
        if self.metric is not None:
            (everybody,) = distributed.joined(ids)
            draw = torch.Generator().manual_seed(int(self.seed) ^ int(self.draws))  # the same on all ranks and on resume
            loss = loss + begun * metric * self.metric(h_AF, self.assigned.first(everybody), draw)
            if self.training:
                self.draws.add_(1)
        if self.prototype is not None:
            loss = loss + begun * prototype * self.prototype(h_AF, self.assigned.levels(ids.repeat_interleave(len(views))))
        return loss

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        if not self._with_prototypes:
            return None
        everybody = torch.arange(self.assigned.num_samples, device=self.assigned.device)
        return cluster_pair_batches(self.assigned.first(everybody), batch_size, generator)

    @property
    def space(self) -> Space:
        return "features"

    @property
    def collects(self) -> bool:
        """With the labels for prototypes, features are needed only where a detector asks for them."""
        return self.assigned.clusters is None and all(each.collects or not each.due(self.epoch) for each in self.detectors)

    @property
    def renewed(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for head in self._renewed() for parameter in head.parameters()) if self._own_turn(self.epoch) else ()

    def due(self, epoch: int) -> bool:
        return self._own_turn(epoch) or super().due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Detectors that go by embeddings have those of g_c as it was trained, before it begins anew."""
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(self._seen_by(detector, features), progress)
        if not self._own_turn(self.epoch):
            return
        self.assigned.refresh(features)
        self.begun.fill_(True)
        renew(self._renewed(), int(self.seed) ^ 0x9E3779B1 * (self.epoch + 1))  # torch's generator goes by the lower 32 bits alone

    def finish(self, features: Tensor | None) -> None:
        for detector in self.detectors:
            if detector.refreshed_at_end:
                detector.refresh(self._seen_by(detector, features), 1.0)

    def _seen_by(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        """(N, F or D) what a detector is refreshed with: the encoder's features, their embeddings, or nothing where it collects its own."""
        if detector.collects or features is None:
            return None
        return features if detector.space == "features" else embeddings(self.head, features)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self._told = self._told or warn_if_warmup_too_long(self.warmup_epochs, num_epochs, "prototypes")
        self.epoch = epoch

    @property
    def _with_prototypes(self) -> bool:
        """Whether they have a say yet; of the state alone, as the order of an epoch is asked for before anybody says which it is."""
        return bool(self.begun) and self.assigned.ready

    def _own_turn(self, epoch: int) -> bool:
        since = epoch - self.warmup_epochs
        anew = self.assigned.clusters is not None or bool(self._renewed())
        return (since >= 0 and since % self.every == 0 and anew) or (since == 0 < epoch)

    def _renewed(self) -> list[nn.Module]:
        """The heads that a refresh sets anew."""
        heads = {"contrast": self.head, "metric": self.metric, "prototype": self.prototype}
        return [head for name, head in heads.items() if name in self.reinitialise and head is not None]

    @torch.no_grad()
    def _measure(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        """For the counts and the detector alone."""
        loss: Tensor = self.objective(z1, z2, ids)
        return loss.nan_to_num(0, 0, 0)


def _check(weights: dict[str, float], reinitialise: tuple[Head, ...], warmup_epochs: int, every: int) -> None:
    for name, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"`{name}` (={weight}) must not be negative")
    if not any(weights.values()):
        raise ValueError(f"one of {', '.join(f'`{name}`' for name in weights)} must be above 0")
    for head in reinitialise:
        if head not in ("contrast", "metric", "prototype"):
            raise ValueError(f"`reinitialise` (={head!r}) must hold 'contrast', 'metric' or 'prototype'")
    if warmup_epochs < 0:
        raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be at least 0")
    if warmup_epochs and not weights["contrast_weight"]:
        raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be 0 where `contrast_weight` is: there would be no loss before")
    if every < 1:
        raise ValueError(f"`every` (={every}) must be at least 1")
