"""What a framework is: it says where anchors and candidates come from, and owns the networks that make them.

Dimension key: V views, B batch, F features, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

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

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Tells schedules and warm-ups where the training is; `epoch` counts from 0."""
        self.objective.set_progress(epoch, num_epochs)


class BatchFramework(Framework, ABC):
    """Abstract. Anchors and candidates are the two views of the batch, and of all ranks' batches."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        z1, z2 = self.head(self.encoder(views.flatten(0, 1))).chunk(2)  # one pass, so BatchNorm sees both views together
        loss: Tensor = self.objective(z1, z2, ids)
        return loss
