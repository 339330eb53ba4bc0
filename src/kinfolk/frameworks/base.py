"""What a framework is: it says where anchors and candidates come from, and owns the networks that make them.

Dimension key: V views, B batch, F features, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors.base import Space
from kinfolk.objectives import Objective


class Framework(nn.Module, ABC):
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
        return F.normalize(self.head(self.features(images)), dim=-1)

    def after_step(self) -> None:
        """Called after every optimiser step: momentum encoders and the like. Default: nothing."""

    @property
    def space(self) -> Space:
        """Which features `refresh` receives."""
        return "projected" if self.objective.detector is None else self.objective.detector.space

    @property
    def known_features(self) -> Tensor | None:
        """(N, D) unit-norm embeddings of all samples, where it keeps them anyway; None: they have to be computed for `refresh`."""
        return None

    def due(self, epoch: int) -> bool:
        """Whether `refresh` is to be called before this epoch, counted from 0."""
        return self.objective.detector is not None and self.objective.detector.due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The once-per-epoch step; see `Detector.refresh`."""
        if self.objective.detector is not None:
            self.objective.detector.refresh(features, progress)

    def hear(self, name: str, value: float) -> None:
        """Is told a figure of the training: "knn". The same on all ranks."""
        if self.objective.detector is not None and name in self.objective.detector.hears:
            self.objective.detector.hear(name, value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Tells schedules and warm-ups where the training is; `epoch` counts from 0."""
        self.objective.set_progress(epoch, num_epochs)


class BatchFramework(Framework, ABC):
    """Abstract. Anchors and candidates are the two views of the batch, and of all ranks' batches."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        z1, z2 = self.head(self.encoder(views.flatten(0, 1))).chunk(2)  # one pass, so BatchNorm sees both views together
        loss: Tensor = self.objective(z1, z2, ids)
        return loss
