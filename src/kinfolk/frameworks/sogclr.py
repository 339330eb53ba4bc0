"""SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from typing_extensions import Unpack

from kinfolk.frameworks.taught import TaughtBatch
from kinfolk.objectives import SogCLR
from kinfolk.objectives.base import Shared


class SogCLRFramework(TaughtBatch):
    """The global contrastive loss on two views of a batch. A moving average per sample allows small batches.

    Args:
        encoder, head: see `Framework`.
        num_samples, temperature, gamma, detector, action, min_negatives, kin_weight, block_rows: see `SogCLR`.
    """

    paper: ClassVar[str] = "Yuan et al., ICML 2022"
    needs: ClassVar[str] = "one number per sample"
    refused: ClassVar[Mapping[str, str]] = SogCLR.refused

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        temperature: float = 0.1,
        gamma: float = 0.9,
        **shared: Unpack[Shared],
    ) -> None:
        objective = SogCLR(num_samples, temperature, gamma, **shared)
        super().__init__(encoder, head, objective)
