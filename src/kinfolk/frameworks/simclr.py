"""SimCLR: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from kinfolk.actions import Action
from kinfolk.detectors.base import Detector
from kinfolk.frameworks.base import BatchFramework
from kinfolk.objectives import NTXent


class SimCLR(BatchFramework):
    """Two views of a batch, every other view a negative, NT-Xent. With the labels' kin attracted it is SupCon.

    Args:
        encoder, head: see `Framework`.
        temperature, detector, action, min_negatives, kin_weight, block_rows, positive_in_denominator, rescale_kept: see `NTXent`.
    """

    paper: ClassVar[str] = "Chen et al., ICML 2020"
    needs: ClassVar[str] = "large batches"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        temperature: float = 0.2,
        detector: Detector | None = None,
        action: Action = "eliminate",
        min_negatives: int = 1,
        kin_weight: float = 0.5,
        block_rows: int | None = None,
        positive_in_denominator: bool = True,
        rescale_kept: bool = False,
    ) -> None:
        objective = NTXent(
            temperature,
            detector,
            action,
            min_negatives,
            block_rows=block_rows,
            kin_weight=kin_weight,
            positive_in_denominator=positive_in_denominator,
            rescale_kept=rescale_kept,
        )
        super().__init__(encoder, head, objective)
