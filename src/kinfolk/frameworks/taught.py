"""What batch frameworks with a teacher share: a slow copy of encoder and head that sees a weak view of each sample.

Dimension key: V views, B batch, D embedding.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from kinfolk.frameworks.base import BatchFramework
from kinfolk.frameworks.moco import MomentumCopy, teacher_of
from kinfolk.objectives import Objective
from kinfolk.objectives.base import unit
from kinfolk.pairs import integer_ids, two_views

MOMENTUM = 0.99


class TaughtBatch(BatchFramework, ABC):
    """Abstract. Two views of the batch, and with the detector `Teacher` a third, weak one, which a `MomentumCopy` embeds.

    State: with a teacher its parameters and buffers.
    """

    guides: ClassVar[frozenset[str]] = frozenset({"teacher"})

    def __init__(self, encoder: nn.Module, head: nn.Module, objective: Objective) -> None:
        super().__init__(encoder, head, objective)
        taught = teacher_of(objective.detector)
        self.teacher = None if taught is None else MomentumCopy(encoder, head, MOMENTUM if taught.momentum is None else taught.momentum)
        if taught is not None:
            self.num_views, self.weak_views = 3, (2,)  # type: ignore[misc]

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        if self.teacher is None:
            return super().forward(views, ids)
        ids = integer_ids(ids, views.device)
        z1, z2 = self.head(self.encoder(views[:2].flatten(0, 1))).chunk(2)
        taught = unit(self.teacher(views[2]))
        pairs = replace(two_views(z1, z2, ids, unit), guide=taught, candidate_guide=taught.repeat_interleave(2, 0))
        return self.objective.on(pairs)

    def after_step(self) -> None:
        super().after_step()
        if self.teacher is not None:
            self.teacher.follow(self.encoder, self.head)
