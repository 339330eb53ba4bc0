"""CLIP, bimodal SogCLR and FastCLIP: pictures and their captions in one space.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021; Yuan et al., Provable Stochastic
Optimization for Global Contrastive Learning, ICML 2022; Wei et al., FastCLIP, 2024. With detectors as in Balmaseda et al., Discovering
Global False Negatives On the Fly for Self-supervised Contrastive Learning, ICML 2025, section 3.3 and appendix B.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import Unpack

from kinfolk.frameworks.base import OwnRate
from kinfolk.frameworks.image_text import ImageText
from kinfolk.objectives import BimodalSogCLR, CLIPLoss, FastCLIP
from kinfolk.objectives.base import Shared
from kinfolk.objectives.fastclip import TemperatureGradient


class CLIP(ImageText):
    """InfoNCE over the batch in both directions, with a learned temperature.

    Args:
        encoder, head, text_encoder, text_head, known_groups: see `ImageText`.
        temperature, learnable, min_temperature, detector, action, min_negatives, kin_weight, block_rows: see `CLIPLoss`.
    """

    paper: ClassVar[str] = "Radford et al., ICML 2021"
    needs: ClassVar[str] = "captions"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        temperature: float = 0.07,
        learnable: bool = True,
        min_temperature: float = 0.01,
        known_groups: bool = True,
        **shared: Unpack[Shared],
    ) -> None:
        loss = CLIPLoss(temperature, learnable, min_temperature, **shared)
        super().__init__(encoder, head, text_encoder, text_head, loss, known_groups)


class SogCLRCLIP(ImageText):
    """The global contrastive loss in both directions, with a constant temperature.

    Args:
        encoder, head, text_encoder, text_head, known_groups: see `ImageText`.
        num_samples, temperature, gamma, decay_epochs, detector, action, min_negatives, kin_weight, block_rows: see `BimodalSogCLR`.
    """

    paper: ClassVar[str] = "Yuan et al., ICML 2022"
    needs: ClassVar[str] = "captions; two numbers per sample"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.2,
        decay_epochs: int | None = 18,
        known_groups: bool = True,
        **shared: Unpack[Shared],
    ) -> None:
        loss = BimodalSogCLR(num_samples, temperature, gamma, decay_epochs, **shared)
        super().__init__(encoder, head, text_encoder, text_head, loss, known_groups)


class FastCLIPFramework(ImageText):
    """The robust global contrastive loss in both directions, with a temperature that is learned at a rate of its own.

    Args:
        encoder, head, text_encoder, text_head, known_groups: see `ImageText`.
        temperature_lr: the rate of the temperature, outside the schedule; a third of it below 0.03.
        num_samples, temperature, rho, gamma, decay_epochs, individual_lr, min_temperature, temperature_gradient, detector, action,
            min_negatives, kin_weight, block_rows: see `FastCLIP`.
    """

    paper: ClassVar[str] = "Wei et al., 2024"
    needs: ClassVar[str] = "captions; two numbers per sample"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        text_encoder: nn.Module,
        text_head: nn.Module,
        num_samples: int,
        temperature: float = 0.07,
        temperature_lr: float = 2e-4,
        rho: float = 6.5,
        gamma: float = 0.2,
        decay_epochs: int | None = 18,
        min_temperature: float = 0.01,
        individual_lr: float | None = None,
        known_groups: bool = True,
        temperature_gradient: TemperatureGradient = "released",
        **shared: Unpack[Shared],
    ) -> None:
        if not temperature_lr > 0:
            raise ValueError(f"`temperature_lr` (={temperature_lr}) must be above 0")
        loss = FastCLIP(
            num_samples,
            temperature,
            rho,
            gamma,
            decay_epochs,
            min_temperature=min_temperature,
            individual_lr=individual_lr,
            temperature_gradient=temperature_gradient,
            **shared,
        )
        super().__init__(encoder, head, text_encoder, text_head, loss, known_groups)
        self.temperature_lr = temperature_lr

    @property
    def own_rates(self) -> tuple[OwnRate, ...]:
        parameters = tuple(self.loss.temperature_parameters())
        return (OwnRate(parameters, self.temperature_lr, lambda: self.loss.temperature_lr_factor),) if parameters else ()
