"""SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from kinfolk.actions import Action
from kinfolk.detectors.base import Detector
from kinfolk.frameworks.base import BatchFramework
from kinfolk.objectives import SogCLR


class SogCLRFramework(BatchFramework):
    """Two views of a batch under the global contrastive loss: a moving average for each sample makes small batches do.

    Args:
        encoder, head: see `Framework`.
        num_samples, temperature, gamma, detector, action, min_negatives, kin_weight, block_rows: see `SogCLR`.
    """

    paper: ClassVar[str] = "Yuan et al., ICML 2022"
    needs: ClassVar[str] = "one number per sample"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        temperature: float = 0.1,
        gamma: float = 0.9,
        detector: Detector | None = None,
        action: Action = "eliminate",
        min_negatives: int = 1,
        kin_weight: float = 0.5,
        block_rows: int | None = None,
    ) -> None:
        objective = SogCLR(num_samples, temperature, gamma, detector, action, min_negatives, block_rows=block_rows, kin_weight=kin_weight)
        super().__init__(encoder, head, objective)
