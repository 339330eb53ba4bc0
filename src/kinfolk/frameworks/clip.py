"""Images and captions, or the texts of a pair, in one embedding space.

CLIP: Radford et al., ICML 2021. SigLIP: Zhai et al., ICCV 2023. Bimodal SogCLR: Yuan et al., ICML
2022. FastCLIP: Wei et al., 2024. Text pairs: Henderson et al., 2017.

Dimension key: V views, B batch, T tokens, K explicit negatives of each pair, F features, D
embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import require
from kinfolk.frameworks.base import Framework, OwnRate
from kinfolk.objectives import (
    BimodalLoss,
    BimodalSogCLRLoss,
    CLIPLoss,
    FastCLIPLoss,
    Objective,
    SigLIPLoss,
)


class Bimodal(Framework, ABC):
    """Abstract. Contrasts the two sides of samples. `known_groups`: samples that share an image, a
    text or a group are known positives."""

    num_views: ClassVar[int] = 1
    guides: ClassVar[frozenset[str]] = frozenset({"modality"})
    directions: ClassVar[tuple[str, str]]

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        loss: BimodalLoss[Any] | SigLIPLoss,
        known_groups: bool,
    ) -> None:
        super().__init__(encoder, head, loss)  # type: ignore[arg-type]  # contains two objectives, see `objectives`
        self.known_groups = known_groups

    @abstractmethod
    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of the second side."""

    def set_groups(self, groups: Tensor | None) -> None:
        super().set_groups(groups if self.known_groups else None)

    @property
    def loss(self) -> BimodalLoss[Any] | SigLIPLoss:
        loss: BimodalLoss[Any] | SigLIPLoss = self.objective  # type: ignore[assignment]
        return loss

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return self.loss.objectives

    @property
    def temperature(self) -> float:
        return self.loss.current_temperature

    @property
    def metrics(self) -> dict[str, float]:
        return {**super().metrics, "temperature": self.temperature}

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self._update_detector_temperature()
        super().refresh(features, progress)

    def finish(self, features: Tensor | None) -> None:
        self._update_detector_temperature()
        super().finish(features)

    def _update_detector_temperature(self) -> None:
        for detector in self.detectors:
            detector.set_loss_temperature(self.temperature)


class ImageText(Bimodal, ABC):
    """Abstract. Contrasts images and captions. `text_encoder`, `text_head`: (B, T) → (B, F') → (B,
    D)."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "text")
    directions: ClassVar[tuple[str, str]] = ("image_to_text", "text_to_image")
    head_options: ClassVar[Mapping[str, object]] = {"layers": 1}

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        known_groups: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(encoder, head, self.loss_kind(**given), known_groups)
        self.text_encoder, self.text_head = text_encoder, text_head

    def forward(
        self, views: Tensor, ids: Tensor, tokens: Tensor | None = None, groups: Tensor | None = None
    ) -> Tensor:
        """Scalar loss of one view (1, B, 3, H, W) and one caption (B, T) of each sample; `groups`
        (B,) are known positives."""
        if tokens is None:
            raise ValueError("`tokens` (=None) must be given: one caption for each sample")
        image_BD = self.head(self.encoder(views[0]))
        text_BD = self.text_head(self.text_encoder(tokens))
        loss: Tensor = self.loss(image_BD, text_BD, ids, groups if self.known_groups else None)
        return loss

    def embed_text(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.text_head(self.text_encoder(tokens)), dim=-1)


class CLIP(ImageText):
    """InfoNCE in both directions, with a learned temperature. Arguments: `ImageText`,
    `CLIPLoss`."""

    paper: ClassVar[str] = "Radford et al., ICML 2021"
    needs: ClassVar[str] = "captions"
    loss_kind = CLIPLoss


class SogCLRCLIP(ImageText):
    """The global contrastive loss in both directions, with a constant temperature. Arguments:
    `ImageText`, `BimodalSogCLRLoss`."""

    paper: ClassVar[str] = "Yuan et al., ICML 2022"
    needs: ClassVar[str] = "captions; two numbers per sample"
    refused: ClassVar[Mapping[str, str]] = BimodalSogCLRLoss.refused
    loss_kind = BimodalSogCLRLoss


class FastCLIPFramework(ImageText):
    """The robust global contrastive loss in both directions. Arguments: `ImageText`,
    `FastCLIPLoss`, `temperature_lr`."""

    paper: ClassVar[str] = "Wei et al., 2024"
    needs: ClassVar[str] = "captions; two numbers per sample"
    refused: ClassVar[Mapping[str, str]] = FastCLIPLoss.refused
    loss_kind = FastCLIPLoss

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        temperature_lr: float = 2e-4,
        known_groups: bool = True,
        **given: Any,
    ) -> None:
        require(temperature_lr > 0, "temperature_lr", temperature_lr, "above 0")
        super().__init__(encoder, head, text_encoder, text_head, known_groups, **given)
        self.temperature_lr = temperature_lr

    @property
    def own_rates(self) -> tuple[OwnRate, ...]:
        loss = cast(FastCLIPLoss, self.loss)
        parameters = tuple(loss.temperature_parameters())
        if not parameters:
            return ()
        return (OwnRate(parameters, self.temperature_lr, lambda: loss.temperature_lr_factor),)


class SigLIP(ImageText):
    """A sigmoid classifies each pair of an image and a caption. Arguments: `ImageText`,
    `SigLIPLoss`."""

    paper: ClassVar[str] = "Zhai et al., ICCV 2023"
    needs: ClassVar[str] = "captions"
    refused: ClassVar[Mapping[str, str]] = SigLIPLoss.refused
    loss_kind = SigLIPLoss

    @property
    def metrics(self) -> dict[str, float]:
        return {**super().metrics, "bias": float(cast(Tensor, self.loss.bias).detach())}


class TextPairs(Bimodal):
    """InfoNCE of anchors against the positives of the batch and explicit negatives, and of
    positives against anchors, with one text encoder. With `own_negatives_only` an explicit negative
    counts for the anchor of its row only."""

    paper: ClassVar[str] = "Henderson et al., 2017"
    needs: ClassVar[str] = "text pairs"
    modalities: ClassVar[tuple[str, ...]] = ("text",)
    directions: ClassVar[tuple[str, str]] = ("anchor_to_positive", "positive_to_anchor")
    loss_kind = CLIPLoss
    head_options: ClassVar[Mapping[str, object]] = {"layers": 0}

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        temperature: float = 0.05,
        learnable: bool = False,
        own_negatives_only: bool = False,
        known_groups: bool = True,
        **given: Any,
    ) -> None:
        loss = CLIPLoss(temperature=temperature, learnable=learnable, **given)
        super().__init__(encoder, head, loss, known_groups)
        self.own_negatives_only = own_negatives_only

    def forward(
        self,
        views: Tensor,
        ids: Tensor,
        tokens: Tensor | None = None,
        groups: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Scalar loss of anchors (1, B, T), and of positives and explicit negatives (B, 1 + K, T);
        `groups`: (B,) known positives; `negative_ids`: (B, K)."""
        if tokens is None:
            raise ValueError("`tokens` (=None) must be given: the positive of each sample")
        anchor_BD = self.head(self.encoder(views[0]))
        other_BND = self.head(self.encoder(tokens.flatten(0, 1))).unflatten(0, tokens.shape[:2])
        explicit: dict[str, Any] = {}
        if tokens.shape[1] > 1:
            explicit = {
                "negatives": other_BND[:, 1:],
                "negative_ids": negative_ids,
                "own_only": self.own_negatives_only,
            }
        known = groups if self.known_groups else None
        loss: Tensor = self.loss(anchor_BD, other_BND[:, 0], ids, known, **explicit)
        return loss

    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of the positives in (B, 1 + K, T), or of texts (B, T)."""
        return self.embed(tokens[:, 0] if tokens.ndim == 3 else tokens)
