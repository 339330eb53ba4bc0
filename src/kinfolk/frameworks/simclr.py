"""SimCLR: Chen et al., ICML 2020. SogCLR: Yuan et al., ICML 2022.

Dimension key: V views, B batch, D embedding.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from kinfolk.detectors.base import InGuideSpace
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.moco import MomentumCopy, teacher_of
from kinfolk.objectives import NTXentLoss, Objective, SogCLRLoss
from kinfolk.pairs import integer_ids, two_views, unit

MOMENTUM = 0.99


class TwoViews(Framework, ABC):
    """Abstract. Contrasts two views of the batch. With the detector `Teacher` a `MomentumCopy`
    embeds a third, weak view."""

    guides: ClassVar[frozenset[str]] = frozenset({"teacher"})

    def __init__(self, encoder: nn.Module, head: nn.Module, objective: Objective) -> None:
        super().__init__(encoder, head, objective)
        taught, self.teacher = teacher_of(objective.detector), None
        if taught is not None:
            momentum = MOMENTUM if taught.momentum is None else taught.momentum
            self.teacher = MomentumCopy(encoder, head, momentum)
            self.num_views, self.weak_views = 3, (2,)  # type: ignore[misc]

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        # one pass, so BatchNorm sees both views together
        z1, z2 = self.head(self.encoder(views[:2].flatten(0, 1))).chunk(2)
        pairs = two_views(z1, z2, integer_ids(ids, views.device))
        if self.teacher is not None:
            guide = unit(self.teacher(views[2]))
            both = guide.repeat_interleave(2, 0)
            pairs = replace(pairs, guide=guide, candidate_guide=both)
        return self.objective.on(pairs)

    def after_step(self) -> None:
        if self.teacher is not None:
            self.teacher.follow(self.encoder, self.head)


class SimCLR(TwoViews):
    """NT-Xent on two views of a batch, where all views of other samples are negatives.

    Args:
        second_head: (B, F) → (B, D), on which kin are attracted, as in WCL (Zheng et al., ICCV
            2021): the loss is the sum of the plain one on the first head and of that on the second.
        temperature, …: see `NTXentLoss`.
    """

    paper: ClassVar[str] = "Chen et al., ICML 2020"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "large batches"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        temperature: float = 0.2,
        second_head: nn.Module | None = None,
        **given: Any,
    ) -> None:
        objective = NTXentLoss(
            temperature=temperature, **arguments_of_second_head(given, second_head)
        )
        super().__init__(encoder, head, objective)
        self.second_head, self.first_objective = second_head, None
        if second_head is not None:
            alone = {**given, "detector": None, "own_weight": None}
            self.first_objective = NTXentLoss(temperature=temperature, **alone)

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        if self.second_head is None or self.first_objective is None:
            return super().forward(views, ids)
        ids, features = integer_ids(ids, views.device), self.encoder(views.flatten(0, 1))
        z, w = (head(features).chunk(2) for head in (self.head, self.second_head))
        first, second = (two_views(one, other, ids) for one, other in (z, w))
        seen = first.anchors.detach()
        second = replace(second, guide=seen, candidate_guide=seen, collected=seen)
        return self.first_objective.on(first) + self.objective.on(second)

    def set_groups(self, groups: Tensor | None) -> None:
        super().set_groups(groups)
        if self.first_objective is not None:
            self.first_objective.set_groups(groups)


def arguments_of_second_head(
    given: dict[str, Any], second_head: nn.Module | None
) -> dict[str, Any]:
    if second_head is None:
        return given
    detector, action = given.get("detector"), given.get("action", "eliminate")
    if detector is None or action != "attract":
        raise ValueError(
            "`head.second` (=true) needs a detector with the action 'attract', such as +components"
        )
    if detector.guide is not None:
        must = f"must be false with {detector!r}, which does not read the first head"
        raise ValueError(f"`head.second` (=true) {must}")
    return {**given, "detector": InGuideSpace(detector)}


class SogCLRFramework(TwoViews):
    """The global contrastive loss on two views of a batch. A moving average per sample allows small
    batches. Arguments: `SogCLRLoss`."""

    paper: ClassVar[str] = "Yuan et al., ICML 2022"
    loss_kind = SogCLRLoss
    needs: ClassVar[str] = "one number per sample"
    refused: ClassVar[Mapping[str, str]] = SogCLRLoss.refused

    def __init__(self, encoder: nn.Module, head: nn.Module, num_samples: int, **given: Any) -> None:
        super().__init__(encoder, head, SogCLRLoss(num_samples=num_samples, **given))
