"""The base class of frameworks.

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
from kinfolk.errors import require, require_at_least, warn_if_warmup_too_long
from kinfolk.objectives import Objective
from kinfolk.objectives.base import HasObjectives
from kinfolk.pairs import unit
from kinfolk.stores.per_sample import OnHost


@dataclass(frozen=True)
class OwnRate:
    """Parameters with a separate learning rate, without weight decay and outside the schedule;
    `factor` is called after every step and multiplies it."""

    parameters: tuple[nn.Parameter, ...]
    lr: float
    factor: Callable[[], float]


class Framework(HasObjectives, OnHost, ABC):
    """Abstract. An encoder (B, 3, H, W) → (B, F) and a head (B, F) → (B, D) with the loss and its
    detector: the complete state of a method. Arguments and deviations from the papers are in
    docs/methods/NAME.md."""

    paper: ClassVar[str]
    needs: ClassVar[str] = ""
    num_views: ClassVar[int] = 2
    channels: ClassVar[tuple[int, ...]] = (3,)
    """Image channels of each encoder; several need a `SplitEncoder` and a `SplitHead`."""
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """With "text", `forward` also receives `tokens` and `groups`."""
    weak_views: tuple[int, ...] = ()
    """Views that are only cropped and flipped."""
    guides: ClassVar[frozenset[str]] = frozenset()
    """What `Pairs.guide` can be; see `Detector.guide`."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Settings of the loss that make no sense here, with the reason."""
    loss_kind: ClassVar[Any] = None
    """The loss, whose arguments the framework takes as `given`."""
    head_options: ClassVar[Mapping[str, object]] = {}
    """Settings of a training's projection head that differ from the defaults."""
    view_options: ClassVar[Mapping[str, object]] = {}  # required settings of the views

    def __init__(self, encoder: nn.Module, head: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.encoder, self.head, self.objective = encoder, head, objective
        # (2,) counts of the last step, a part and the whole; their ratio is logged
        self.step_shares: dict[str, Tensor] = {}

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
        """Metrics logged at the end of each epoch; the first detector has precedence."""
        return {
            name: value
            for detector in reversed(self.detectors)
            for name, value in detector.metrics.items()
        }

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All losses."""
        return (self.objective,)

    @property
    def detectors(self) -> tuple[Detector, ...]:
        return tuple(each.detector for each in self.objectives if each.detector is not None)

    @property
    def space(self) -> Space:
        """The space of the features that `refresh` receives."""
        return next((detector.space for detector in self.detectors), "projected")

    @property
    def known_features(self) -> Tensor | None:
        """(N, D) unit-norm embeddings of all samples for `refresh`; None: compute them."""
        return None

    @property
    def collects(self) -> bool:
        """Whether `refresh` needs no features."""
        return bool(self.detectors) and all(detector.collects for detector in self.detectors)

    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch, counted from 0."""
        return any(detector.due(epoch) for detector in self.detectors)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """See `Detector.refresh`."""
        for detector in self.detectors:
            detector.refresh(features, progress)

    def finish(self, features: Tensor | None) -> None:
        """Called after the last epoch: refreshes detectors that describe the final encoder."""
        for detector in self.detectors:
            if detector.refreshed_at_end:
                detector.refresh(self.features_for(detector, features), 1.0)

    def features_for(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        return None if detector.collects else features

    @property
    def refresh_model(self) -> nn.Module:
        """Its `features` and `embed` provide the features for `refresh`."""
        return self

    @property
    def reinitialised(self) -> tuple[nn.Parameter, ...]:
        """Parameters that this epoch's refresh resets, with the optimiser's state."""
        return ()

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        """(S·B,) samples of the global batches of an epoch, by the state and the generator alone;
        None: a random order."""
        return None

    def silent_reason(self) -> str | None:
        """Why nothing can be flagged in this training."""
        reasons = (detector.silent_reason() for detector in self.detectors)
        return next((reason for reason in reasons if reason is not None), None)

    def on_metric(self, name: str, value: float) -> None:
        """Called on all ranks; see `Detector.needed_metrics`."""
        for detector in self.detectors:
            if name in detector.needed_metrics:
                detector.on_metric(name, value)


class ClusteringFramework(Framework, ABC):
    """Abstract. Clusters all samples after a warm-up and every few epochs."""

    clusters_are: ClassVar[str] = "clusters"  # in messages
    epoch, num_epochs, _warned = 0, 1, False

    def set_schedule(self, warmup_epochs: int, every: int) -> None:
        require_at_least(0, warmup_epochs=warmup_epochs)
        require_at_least(1, every=every)
        self.warmup_epochs, self.every = warmup_epochs, every

    def require_projected(self, what: str) -> None:
        for detector in self.detectors:
            must = f"'projected', as the {what} use projected embeddings"
            require(detector.space == "projected", "detector.space", detector.space, must)

    @abstractmethod
    def cluster(self, features: Tensor | None, progress: float) -> None:
        """See `refresh`."""

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
