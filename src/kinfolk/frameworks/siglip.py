"""SigLIP: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import nn
from typing_extensions import Unpack

from kinfolk.frameworks.clip import ImageText
from kinfolk.objectives import Bimodal, Objective, SigLIPLoss
from kinfolk.objectives.base import Shared


class SigLIP(ImageText):
    """Each pair of an image and a caption of the batch is judged by a sigmoid; temperature and bias are learned.

    Samples that share an image, a caption or a group are positives of each other.

    Args:
        encoder, head, text_encoder, text_head, known_groups: see `ImageText`.
        temperature, bias, learnable, min_temperature, detector, action, kin_weight, block_rows: see `SigLIPLoss`.
    """

    paper: ClassVar[str] = "Zhai et al., ICCV 2023"
    needs: ClassVar[str] = "captions"
    refused: ClassVar[Mapping[str, str]] = SigLIPLoss.refused

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        temperature: float = 0.1,
        bias: float = -10.0,
        learnable: bool = True,
        min_temperature: float = 0.001,
        known_groups: bool = True,
        **shared: Unpack[Shared],
    ) -> None:
        loss = SigLIPLoss(temperature, bias, learnable, min_temperature, **shared)
        super().__init__(encoder, head, text_encoder, text_head, cast(Bimodal[Any], loss), known_groups)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (self.objective,)

    @property
    def temperature(self) -> float:
        return self._siglip.present_temperature

    @property
    def metrics(self) -> dict[str, float]:
        return {**super().metrics, "bias": float(self._siglip.bias.detach())}

    @property
    def _siglip(self) -> SigLIPLoss:
        return cast(SigLIPLoss, self.objective)
