"""What a detector is: it says who among the candidates is kin, and may keep state per sample.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from kinfolk.pairs import Block, Roles


@dataclass(frozen=True)
class Found:
    """What `find` returns: one `Roles` for each level (most detectors have one), and the state it proposes to write.

    `update` maps a name to a (b, …) tensor, one row for each sample of the block. The engine collects the rows of all blocks and ranks
    and hands them to `observe`; `find` itself writes nothing.
    """

    levels: tuple[Roles, ...]
    update: Mapping[str, Tensor] = field(default_factory=dict)


class Detector(nn.Module, ABC):
    """Abstract. Says which candidates are kin of each anchor.

    `find` reads, `observe` writes (training only, once per step, without gradient), `refresh` is the once-per-epoch step.
    """

    paper: ClassVar[str]
    needs: ClassVar[str] = ""
    addresses: ClassVar[bool] = False
    """Whether it reads or writes by sample id, so that a call without ids would speak of the wrong samples."""
    surveys: ClassVar[bool] = False
    """True where `find` needs a statistic of the whole batch first: the engine then calls `survey` on every block before any `find`."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.num_epochs = 1

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """What a training sets for arguments that the class requires and the user has not `given`. Default: nothing."""
        return {}

    @abstractmethod
    def find(self, block: Block) -> Found:
        """Says who is kin in this block, with the state this step leads to; writes nothing."""

    def survey(self, block: Block) -> Tensor:
        """(b, …) what the first pass measures for each sample of the block; only where `surveys`."""
        raise NotImplementedError(f"{type(self).__name__} takes no survey")

    def settle(self, measured: Tensor) -> None:
        """Receives the survey of all samples of all ranks, before the first `find` of the step; only where `surveys`."""
        raise NotImplementedError(f"{type(self).__name__} takes no survey")

    def observe(self, ids: Tensor, update: Mapping[str, Tensor]) -> None:
        """Writes what the `find`s of this step proposed. Duplicates of an id: the mean of their updates. Default: no state."""

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Tells the schedules and warm-ups where the training is."""
        self.epoch, self.num_epochs = epoch, num_epochs
