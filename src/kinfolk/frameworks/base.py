"""What a framework is: it says where anchors and candidates come from, and owns the networks that make them.

Dimension key: V views, B batch, S batches of an epoch, F features, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from kinfolk.detectors.base import Detector, Space
from kinfolk.objectives import Objective
from kinfolk.objectives.base import unit
from kinfolk.stats import Stats
from kinfolk.stores.per_sample import OnHost


@dataclass(frozen=True)
class OwnRate:
    """Parameters with a learning rate of their own: without weight decay, and outside the schedule.

    Args:
        parameters: these.
        lr: their rate.
        factor: what it is multiplied by at the present state; asked after every step.
    """

    parameters: tuple[nn.Parameter, ...]
    lr: float
    factor: Callable[[], float]


class Framework(OnHost, ABC):
    """Abstract. An encoder and a head in training; its `state_dict` is the whole state of the method.

    Args:
        encoder: (B, 3, H, W) → (B, F).
        head: (B, F) → (B, D).
        objective: the loss, with its detector.
    """

    paper: ClassVar[str]
    needs: ClassVar[str] = ""
    num_views: ClassVar[int] = 2
    channels: ClassVar[tuple[int, ...]] = (3,)
    """Channels of a picture that each of its encoders sees; several parts: the encoder and the head are `Split` ones."""
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """What a sample consists of; with "text" its `forward` is given `tokens` and `groups` too, and it has a text tower."""
    view_options: ClassVar[Mapping[str, object]] = {}
    """Settings of the views that it cannot do without."""

    def __init__(self, encoder: nn.Module, head: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective

    @abstractmethod
    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        """Scalar loss of (V, B, 3, H, W) views of the samples `ids` (B,)."""

    def features(self, images: Tensor) -> Tensor:
        """(B, F) what is evaluated and exported."""
        features: Tensor = self.encoder(images)
        return features

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) the unit-norm embedding that is contrasted."""
        return unit(self.head(self.features(images)))

    def after_step(self) -> None:
        """Called after every optimiser step: momentum encoders and the like. Default: nothing."""

    @property
    def own_rates(self) -> tuple[OwnRate, ...]:
        """Parameters whose learning rate is not the optimiser's. Default: none."""
        return ()

    @property
    def metrics(self) -> dict[str, float]:
        """What it has to tell of itself at the end of an epoch, such as a learnt temperature. Default: what its detectors tell; of two
        that tell the same, the first."""
        return {name: value for detector in reversed(self.detectors) for name, value in detector.metrics.items()}

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Every loss it takes; several: each has a detector of its own, which sees one direction."""
        return (self.objective,)

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The detectors of all its objectives."""
        return tuple(each.detector for each in self.objectives if each.detector is not None)

    @property
    def stats(self) -> Stats:
        """The counts of the last step, over all objectives."""
        first, *others = (each.stats for each in self.objectives)
        return sum(others, first)

    @property
    def space(self) -> Space:
        """Which features `refresh` receives."""
        return next((detector.space for detector in self.detectors), "projected")

    @property
    def known_features(self) -> Tensor | None:
        """(N, D) unit-norm embeddings of all samples, where it keeps them anyway and has seen them all; None: they have to be computed for
        `refresh`."""
        return None

    @property
    def collects(self) -> bool:
        """Whether `refresh` needs no features, because its detectors collect their own during the epoch."""
        return bool(self.detectors) and all(detector.collects for detector in self.detectors)

    def set_eval_labels(self, labels: Tensor | None) -> None:
        """Gives (N,) labels for precision, recall and F1 in `stats`; see `Objective.set_eval_labels`."""
        for objective in self.objectives:
            objective.set_eval_labels(labels)

    def set_groups(self, groups: Tensor | None) -> None:
        """Gives (N,) groups, known positives; see `Objective.know`."""
        for objective in self.objectives:
            objective.set_groups(groups)

    def due(self, epoch: int) -> bool:
        """Whether `refresh` is to be called before this epoch, counted from 0."""
        return any(detector.due(epoch) for detector in self.detectors)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The once-per-epoch step; see `Detector.refresh`."""
        for detector in self.detectors:
            detector.refresh(features, progress)

    def finish(self, features: Tensor | None) -> None:
        """Called after the last epoch with features as for `refresh`: detectors that describe the finished encoder are refreshed with the
        progress 1."""
        for detector in self.detectors:
            if detector.refreshed_at_end:
                detector.refresh(None if detector.collects else features, 1.0)

    @property
    def refresh_model(self) -> nn.Module:
        """What embeds the samples for `refresh`, by `features` and `embed`. Default: the framework itself."""
        return self

    @property
    def renewed(self) -> tuple[nn.Parameter, ...]:
        """What the refresh of this epoch sets anew: the optimiser forgets what it knows of these parameters. Default: nothing."""
        return ()

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        """(S·B,) the samples of an epoch's joined batches, one after the other, asked for before its first step; a function of its state
        and the generator. Default: None, a random order."""
        return None

    def silent_reason(self) -> str | None:
        """Why its detectors can flag nothing in this training; see `Detector.silent_reason`."""
        return next((reason for detector in self.detectors if (reason := detector.silent_reason()) is not None), None)

    def on_metric(self, name: str, value: float) -> None:
        """Called with a training metric, "epoch" or "knn"; see `Detector.wanted_metrics`. The same on all ranks."""
        for detector in self.detectors:
            if name in detector.wanted_metrics:
                detector.on_metric(name, value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Tells schedules and warm-ups where the training is; `epoch` counts from 0."""
        for objective in self.objectives:
            objective.set_progress(epoch, num_epochs)


class BatchFramework(Framework, ABC):
    """Abstract. Anchors and candidates are the two views of the batch, and of all ranks' batches."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        z1, z2 = self.head(self.encoder(views.flatten(0, 1))).chunk(2)  # one pass, so BatchNorm sees both views together
        loss: Tensor = self.objective(z1, z2, ids)
        return loss
