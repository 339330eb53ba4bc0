"""SimCLR: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.detectors.wrapped import Elsewhere
from kinfolk.frameworks.taught import TaughtBatch
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import unit
from kinfolk.objectives.debiased import Estimate
from kinfolk.pairs import integer_ids, two_views


class SimCLR(TaughtBatch):
    """NT-Xent on two views of a batch, where all views of other samples are negatives. With `Oracle` and "attract" it is SupCon.

    Args:
        encoder, head: see `Framework`.
        temperature, detector, action, min_negatives, kin_weight, own_weight, block_rows: see `NTXent`.
        positive_in_denominator, rescale_kept, prior, hardness, decoupled: see `NTXent`.
        second_head: (B, F) → (B, D), on which kin are attracted, as in WCL (Zheng et al., ICCV 2021): the loss is the sum of the plain one
            on the first head, which the detector goes by, and of the one with attraction on the second, so that wrong kin do not spoil the
            embedding they are found by. None: there is one head for both.
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
        second_head: nn.Module | None = None,
        **shared: Unpack[Estimate],
    ) -> None:
        objective = NTXent(temperature, positive_in_denominator, rescale_kept, **seen_by_first(shared, second_head))
        super().__init__(encoder, head, objective)
        self.second_head, self.first_objective = second_head, None
        if second_head is not None:
            alone: Estimate = {**shared, "detector": None, "own_weight": None}
            self.first_objective = NTXent(temperature, positive_in_denominator, rescale_kept, **alone)

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        if self.second_head is None or self.first_objective is None:
            return super().forward(views, ids)
        ids, features = integer_ids(ids, views.device), self.encoder(views.flatten(0, 1))
        z, w = (head(features).chunk(2) for head in (self.head, self.second_head))
        first, second = (two_views(one, other, ids, unit) for one, other in (z, w))
        seen = first.anchors.detach()
        second = replace(second, guide=seen, candidate_guide=seen, collected=seen)
        return self.first_objective.on(first) + self.objective.on(second)

    def set_groups(self, groups: Tensor | None) -> None:
        super().set_groups(groups)
        if self.first_objective is not None:
            self.first_objective.set_groups(groups)


def seen_by_first(shared: Estimate, second_head: nn.Module | None) -> Estimate:
    """The arguments of the loss on the second head: its detector goes by the embeddings of the first. As they are where there is none."""
    if second_head is None:
        return shared
    detector, action = shared.get("detector"), shared.get("action", "eliminate")
    if detector is None or action != "attract":
        raise ValueError(
            "`head.second` (=true) needs a detector with the action 'attract', such as +components: it is what kin are attracted on"
        )
    if detector.reads is not None:
        raise ValueError(f"`head.second` (=true) must be false with {detector!r}: a second head follows the similarities of the first")
    return {**shared, "detector": Elsewhere(detector)}
