"""SimCLR: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import Unpack

from kinfolk.frameworks.base import BatchFramework
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import Shared


class SimCLR(BatchFramework):
    """NT-Xent on two views of a batch, where all views of other samples are negatives. With `Oracle` and "attract" it is SupCon.

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
        **shared: Unpack[Shared],
    ) -> None:
        objective = NTXent(temperature, positive_in_denominator, rescale_kept, **shared)
        super().__init__(encoder, head, objective)
