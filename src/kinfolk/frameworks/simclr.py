"""SimCLR: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import Unpack

from kinfolk.frameworks.taught import TaughtBatch
from kinfolk.objectives import NTXent
from kinfolk.objectives.debiased import Estimate


class SimCLR(TaughtBatch):
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
        positive_in_denominator: bool = True,
        rescale_kept: bool = False,
        **shared: Unpack[Estimate],
    ) -> None:
        objective = NTXent(temperature, positive_in_denominator, rescale_kept, **shared)
        super().__init__(encoder, head, objective)
