"""The base class of frameworks. A framework owns the networks and decides where anchors and
candidates come from.

Dimension key: V views, B batch, S batches of an epoch, F features, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk.detectors.base import Detector, Space
from kinfolk.errors import require, warn_if_warmup_too_long
from kinfolk.objectives import Objective
from kinfolk.pairs import unit
from kinfolk.stats import Stats
from kinfolk.stores.per_sample import OnHost


@dataclass(frozen=True)
class OwnRate:
    """Parameters with a separate learning rate, without weight decay and outside the schedule,
    which `factor` multiplies, called after every step."""

    parameters: tuple[nn.Parameter, ...]
    lr: float
    factor: Callable[[], float]


class Framework(OnHost, ABC):
    """Abstract. An encoder (B, 3, H, W) → (B, F) and a head (B, F) → (B, D) in training, with the
    loss and its detector. Its `state_dict` is the complete state of the method. Arguments and
    deviations from the papers: docs/methods/NAME.md."""

    paper: ClassVar[str]
    needs: ClassVar[str] = ""
    num_views: ClassVar[int] = 2
    channels: ClassVar[tuple[int, ...]] = (3,)
    """Image channels of each encoder; with several, encoder and head are a `SplitEncoder` and a
    `SplitHead`."""
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """With "text", `forward` also receives `tokens` and `groups`."""
    weak_views: tuple[int, ...] = ()
    """Which of its views are only cropped and flipped."""
    guides: ClassVar[frozenset[str]] = frozenset()
    """What it can pass to a detector as the guide of `Pairs`; see `Detector.guide`."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Settings of the loss that make no sense here, each with the reason."""
    loss_kind: ClassVar[Any] = None
    """The loss, whose arguments the framework takes as `given`."""
    head_options: ClassVar[Mapping[str, object]] = {}
    """Settings of the projection head that differ from the defaults of a training."""
    view_options: ClassVar[Mapping[str, object]] = {}
    """Settings of the views that the framework requires."""

    def __init__(self, encoder: nn.Module, head: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective
        self.step_shares: dict[str, Tensor] = {}
        """(2,) counts of the last step, a part and the whole, by name; the log has their ratio."""

    @abstractmethod
    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        """Scalar loss of (V, B, 3, H, W) views of the samples `ids` (B,)."""

    def features(self, images: Tensor) -> Tensor:
        """(B, F) features that are evaluated and exported."""
        features: Tensor = self.encoder(images)
        return features

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings that are contrasted."""
        return unit(self.head(self.features(images)))

    def after_step(self) -> None:
        """Called after every optimiser step."""

    @property
    def own_rates(self) -> tuple[OwnRate, ...]:
        return ()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged at the end of each epoch; of two detectors, that of the first counts."""
        return {
            name: value
            for detector in reversed(self.detectors)
            for name, value in detector.metrics.items()
        }

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All losses, each with a detector for its direction."""
        return (self.objective,)

    @property
    def detectors(self) -> tuple[Detector, ...]:
        return tuple(each.detector for each in self.objectives if each.detector is not None)

    @property
    def stats(self) -> Stats:
        """Counts of the last step."""
        first, *others = (each.stats for each in self.objectives)
        return sum(others, first)

    @property
    def space(self) -> Space:
        """The space of the features that `refresh` receives."""
        return next((detector.space for detector in self.detectors), "projected")

    @property
    def known_features(self) -> Tensor | None:
        """(N, D) unit-norm embeddings of all samples that `refresh` can use; None: compute them."""
        return None

    @property
    def collects(self) -> bool:
        """Whether `refresh` needs no features, because its detectors collect theirs."""
        return bool(self.detectors) and all(detector.collects for detector in self.detectors)

    def set_eval_labels(self, labels: Tensor | None) -> None:
        for objective in self.objectives:
            objective.set_eval_labels(labels)

    def set_groups(self, groups: Tensor | None) -> None:
        for objective in self.objectives:
            objective.set_groups(groups)

    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch, counted from 0."""
        return any(detector.due(epoch) for detector in self.detectors)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The once-per-epoch step; see `Detector.refresh`."""
        for detector in self.detectors:
            detector.refresh(features, progress)

    def finish(self, features: Tensor | None) -> None:
        """Called after the last epoch: refreshes detectors that describe the final encoder."""
        for detector in self.detectors:
            if detector.refreshed_at_end:
                detector.refresh(self.features_for(detector, features), 1.0)

    def features_for(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        """The features that a detector's refresh receives, of those of `space`."""
        return None if detector.collects else features

    @property
    def refresh_model(self) -> nn.Module:
        """The model whose `features` and `embed` provide the features for `refresh`."""
        return self

    @property
    def reinitialised(self) -> tuple[nn.Parameter, ...]:
        """Parameters that this epoch's refresh resets, and the optimiser's state with them."""
        return ()

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        """(S·B,) samples of the global batches of an epoch, by the state and the generator alone;
        None: a random order."""
        return None

    def silent_reason(self) -> str | None:
        """Why nothing can be flagged in this training, if it cannot."""
        reasons = (detector.silent_reason() for detector in self.detectors)
        return next((reason for reason in reasons if reason is not None), None)

    def on_metric(self, name: str, value: float) -> None:
        """Called with a training metric, on all ranks; see `Detector.needed_metrics`."""
        for detector in self.detectors:
            if name in detector.needed_metrics:
                detector.on_metric(name, value)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        """Sets the epoch, counted from 0. Called once per epoch."""
        for objective in self.objectives:
            objective.set_progress(epoch, num_epochs)


class ClusteringFramework(Framework, ABC):
    """Abstract. Clusters the features of all samples after a warm-up and every few epochs."""

    clusters_are: ClassVar[str] = "clusters"  # in messages
    epoch, num_epochs, _warned = 0, 1, False

    def set_schedule(self, warmup_epochs: int, every: int) -> None:
        require(warmup_epochs >= 0, "warmup_epochs", warmup_epochs, "at least 0")
        require(every >= 1, "every", every, "at least 1")
        self.warmup_epochs, self.every = warmup_epochs, every

    def require_projected(self, what: str) -> None:
        for detector in self.detectors:
            must = f"'projected', as the {what} use projected embeddings"
            require(detector.space == "projected", "detector.space", detector.space, must)

    @abstractmethod
    def cluster(self, features: Tensor | None, progress: float) -> None:
        """Clusters the features of all samples."""

    def clusters_in(self, epoch: int) -> bool:
        since = epoch - self.warmup_epochs
        return since >= 0 and since % self.every == 0

    def due(self, epoch: int) -> bool:
        return self.clusters_in(epoch) or super().due(epoch)

    @property
    def collects(self) -> bool:
        return super().collects and not self.clusters_in(self.epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(self.features_for(detector, features), progress)
        if self.clusters_in(self.epoch):
            self.cluster(features, progress)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self._warned = self._warned or warn_if_warmup_too_long(
            self.warmup_epochs, num_epochs, self.clusters_are
        )
        self.epoch, self.num_epochs = int(epoch), num_epochs
