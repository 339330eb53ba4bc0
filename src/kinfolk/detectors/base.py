"""The base class of detectors, which return which candidates are false negatives and may keep state per sample.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from kinfolk.actions import Action
from kinfolk.kinship import Roles
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import Exact

Space = Literal["projected", "features"]
"""What is clustered: the unit-norm embeddings that are contrasted, or the encoder's features."""


@dataclass(frozen=True)
class Found:
    """What `find` returns: one `Roles` for each level (most detectors have one), and the state it proposes to write.

    `update` maps a name to a (b, …) tensor, one row for each sample of the block. The engine collects the rows of all blocks and ranks
    and hands them to `observe`; `find` itself writes nothing.
    """

    levels: tuple[Roles, ...]
    update: Mapping[str, Tensor] = field(default_factory=dict)


class Detector(Exact, ABC):
    """Abstract. Returns which candidates are kin (detected false negatives) of each anchor.

    `find` reads, `observe` writes (training only, once per step, without gradient), `refresh` is the once-per-epoch step.
    """

    variants: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Names that stand for arguments in the method grammar: `ring:learned`."""
    space: Space = "projected"
    """Which features `refresh` receives."""
    wanted_metrics: frozenset[str] = frozenset()
    """Which training metrics `on_metric` is called with: "epoch", how many are done, with a fraction, before every step; "loss" after every
    step; "knn" whenever it is measured, never on the test split."""
    collects: bool = False
    """Whether it is handed the anchors of every step, by `collect`."""

    learns_first: bool = False
    """Whether it flags nothing at a sample's first visit, so that it needs two epochs."""
    refreshed_at_end: bool = False
    """Whether `refresh` is also called after the last epoch, with the progress 1, so that the state describes the finished encoder."""

    reads: str | None = None
    """What it needs the framework to hand over as the guide of `Pairs`: "teacher", embeddings of a slow copy of the encoder, or "modality",
    those of the candidates' own modality. None: nothing."""
    soft: bool = False
    """Whether all candidates are kin, by degrees; "eliminate" would then leave no negative."""
    own_weight: float | None = None
    """The share of the pull that the own positives keep with "attract", where the objective is given none."""

    paper: ClassVar[str]
    usual_action: ClassVar[Action] = "eliminate"
    """The action of the method grammar where none is named."""
    needs: ClassVar[str] = ""
    leveled: ClassVar[bool] = False
    """Whether it names nothing but an interval without upper end: candidates above a level of the anchor are kin."""
    addresses: ClassVar[bool] = False
    """Whether it reads or writes by sample id, so that a call without ids would use the wrong samples."""

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
        """Returns which candidates of this block are kin, and the new state of its samples; writes nothing."""

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Writes what the `find`s of this step proposed. Duplicates of an id: the mean of their updates. `sound`: whether the step was, a
        tensor that the stores go by; see `stores.per_sample.kept`. Default: no state."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged at the end of each epoch. Default: none."""
        return {}

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        """Receives the unit-norm anchors (B·V, D), sample-major, of the samples `ids` (B,) of all ranks; only where `collects`."""
        raise NotImplementedError(f"{type(self).__name__} collects no anchors")

    def due(self, epoch: int) -> bool:
        """Whether `refresh` is to be called before this epoch, counted from 0. Default: never."""
        return False

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The once-per-epoch step: (N, F) features of all samples in data-set order, the same on all ranks, None for a detector that
        collects its own; `progress` in [0, 1] of the training."""
        raise NotImplementedError(f"{type(self).__name__} is never due")

    def silent_reason(self) -> str | None:
        """Why this detector can neither flag nor drop anything in a training of `num_epochs` epochs, as `set_progress` set them; None: it
        can. Training warns before the first step. Default: None."""
        return None

    def on_metric(self, name: str, value: float) -> None:
        """Called with a training metric that is among the `wanted_metrics`; the value is the same on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} takes no metrics")

    def set_loss_temperature(self, temperature: float) -> None:
        """Called with the temperature of the loss by the objective that is built with the detector. Default: it does not matter."""

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Sets the epoch for schedules and warm-ups."""
        self.epoch, self.num_epochs = epoch, num_epochs
