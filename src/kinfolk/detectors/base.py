"""The base class of detectors, which return which candidates are false negatives and may keep state per sample.

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.

Detectors that wrap another one: everything but the answer of `find` is that of the wrapped detector.

Dimension key: R rows of a block, C candidates.

A warm-up for any detector: nothing is flagged until the embedding has some meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kinfolk.kinship import Form, Mask, Roles
from kinfolk.pairs import LEFT_OUT, Action, Block
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


class Wrapped(Detector, ABC):
    """Abstract. A detector that changes the answer of another one.

    Args:
        detector: the wrapped detector.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    @property
    def addresses(self) -> bool:  # type: ignore[override]
        return self.detector.addresses

    @property
    def space(self) -> Space:  # type: ignore[override]
        return self.detector.space

    @property
    def wanted_metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.detector.wanted_metrics

    @property
    def collects(self) -> bool:  # type: ignore[override]
        return self.detector.collects

    @property
    def learns_first(self) -> bool:  # type: ignore[override]
        return self.detector.learns_first

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end

    @property
    def reads(self) -> str | None:  # type: ignore[override]
        return self.detector.reads

    @property
    def soft(self) -> bool:  # type: ignore[override]
        return self.detector.soft

    @property
    def own_weight(self) -> float | None:  # type: ignore[override]
        return self.detector.own_weight

    @property
    def metrics(self) -> dict[str, float]:
        return self.detector.metrics

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.detector.observe(ids, update, sound)

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        self.detector.collect(ids, anchors, sound)

    def due(self, epoch: int) -> bool:
        return self.detector.due(epoch)

    def silent_reason(self) -> str | None:
        return self.detector.silent_reason()

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self.detector.refresh(features, progress)

    def on_metric(self, name: str, value: float) -> None:
        self.detector.on_metric(name, value)

    def set_loss_temperature(self, temperature: float) -> None:
        self.detector.set_loss_temperature(temperature)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.detector.set_progress(epoch, num_epochs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.detector!r})"


def unwrapped(detector: Detector | None) -> Detector | None:
    """The detector inside of any number of wrappers."""
    while isinstance(detector, Wrapped):
        detector = detector.detector
    return detector


class Elsewhere(Wrapped):
    """The wrapped detector goes by the embeddings that `Pairs` has as its guide, one for each anchor, instead of those that are contrasted.

    For a second head: its attraction follows what the first one finds similar."""

    paper: ClassVar[str] = "Zheng et al., ICCV 2021"

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        if block.guide_bG is None or block.guide_CG is None:  # the embeddings of the first head are contrasted themselves
            return self.detector.find(block)
        sim_RC = (block.guide_bG @ block.guide_CG.T).masked_fill_(block.sim_RC < -2, LEFT_OUT)
        there = replace(block, sim_RC=sim_RC, guide_bG=None, guide_CG=None, candidates_CD=block.guide_CG)
        found = self.detector.find(there)
        moved = tuple(Roles(_moved(roles.kin, sim_RC), _moved(roles.drop, sim_RC)) for roles in found.levels)
        return Found(moved, found.update)


def _moved(form: Form | None, sim_RC: Tensor) -> Form | None:
    """The same candidates and degrees, whatever the similarities they are applied to."""
    if form is None:
        return None
    return Mask(form.mask(sim_RC), form.degree(sim_RC) if form.graded else None)


class StartAt(Wrapped):
    """Wraps a detector: nothing is flagged before `epoch`, and its state does not change before `update_from`.

    Args:
        detector: the wrapped detector.
        epoch: first epoch, counted from 0, in which kin are flagged. The annealing of the wrapped detector begins with it.
        update_from: first epoch in which the state changes; None means `epoch`.
    """

    paper: ClassVar[str] = "Balmaseda et al., ICML 2025, section 4.3"

    def __init__(self, detector: Detector, epoch: int, update_from: int | None = None) -> None:
        super().__init__(detector)
        if epoch < 0:
            raise ValueError(f"`epoch` (={epoch}) must be at least 0")
        if update_from is not None and not 0 <= update_from <= epoch:
            raise ValueError(f"`update_from` (={update_from}) must be in [0, {epoch}]: the state starts to move before kin are flagged")
        self.start, self.update_from = epoch, epoch if update_from is None else update_from

    @property
    def leveled(self) -> bool:  # type: ignore[override]
        return self.detector.leveled

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end and self.epoch >= self.update_from

    def find(self, block: Block) -> Found:
        if self.epoch < self.update_from:
            return Found((Roles(),))
        found = self.detector.find(block)
        return found if self.epoch >= self.start else Found((Roles(),), found.update)

    def due(self, epoch: int) -> bool:
        """A refresh that was due before `update_from` is made up for at `update_from`."""
        first = range(epoch + 1) if epoch == self.update_from else (epoch,)
        return epoch >= self.update_from and any(self.detector.due(each) for each in first)

    def silent_reason(self) -> str | None:
        if self.start >= self.num_epochs:
            return f"the detector starts in epoch {self.start}, counted from 0, of {self.num_epochs}; start it earlier"
        if self.detector.learns_first and self.update_from >= self.num_epochs - 1:
            return f"it learns only in the last of {self.num_epochs} epochs, and a first visit flags nothing; set an earlier `update_from`"
        return self.detector.silent_reason()

    def on_metric(self, name: str, value: float) -> None:
        if self.epoch >= self.start:
            self.detector.on_metric(name, value - self.start if name == "epoch" else value)

    def __repr__(self) -> str:
        return f"StartAt({self.detector!r}, epoch={self.start}, update_from={self.update_from})"
