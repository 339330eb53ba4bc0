"""What frameworks of pictures and captions share: two towers, one view, one caption.

Dimension key: V views, B batch, T tokens, D embedding.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.frameworks.base import Framework
from kinfolk.objectives import Bimodal, Objective


class ImageText(Framework, ABC):
    """Abstract. A picture is contrasted with the captions of the batch, and a caption with its pictures.

    Args:
        encoder, head: of the pictures, (B, 3, H, W) → (B, F) → (B, D); any two modules.
        text_encoder, text_head: of the captions, (B, T) token ids → (B, F') → (B, D); any two modules.
        loss: called with both embeddings, sample ids and groups.
        known_groups: whether samples that share an image, a caption or a group are known positives; False takes them for negatives.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image", "text")
    num_views: ClassVar[int] = 1

    def __init__(
        self, encoder: nn.Module, head: nn.Module, text_encoder: nn.Module, text_head: nn.Module, loss: Bimodal[Any], known_groups: bool
    ) -> None:
        super().__init__(encoder, head, loss)  # type: ignore[arg-type]  # of two objectives, see `objectives`
        self.text_encoder, self.text_head, self.known_groups = text_encoder, text_head, known_groups

    @property
    def loss(self) -> Bimodal[Any]:
        """The loss of both directions."""
        loss: Bimodal[Any] = self.objective  # type: ignore[assignment]
        return loss

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return self.loss.objectives

    @property
    def metrics(self) -> dict[str, float]:
        return {**super().metrics, "temperature": self.loss.temperature}

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        self.loss.set_progress(epoch, num_epochs)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self._tell_temperature()
        super().refresh(features, progress)

    def finish(self, features: Tensor | None) -> None:
        self._tell_temperature()
        super().finish(features)

    def _tell_temperature(self) -> None:
        """Detectors were given the temperature at the start; a learned one has moved."""
        for detector in self.detectors:
            detector.set_loss_temperature(self.loss.temperature)

    def forward(self, views: Tensor, ids: Tensor, tokens: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        """Scalar loss of one view (1, B, 3, H, W) and one caption (B, T) of each sample; `groups` (B,) are known positives."""
        if tokens is None:
            raise ValueError("`tokens` must be given: a caption for each sample")
        image_BD = self.head(self.encoder(views[0]))
        text_BD = self.text_head(self.text_encoder(tokens))
        loss: Tensor = self.loss(image_BD, text_BD, ids, groups if self.known_groups else None)
        return loss

    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D) the unit-norm embedding of captions (B, T)."""
        return F.normalize(self.text_head(self.text_encoder(tokens)), dim=-1)
