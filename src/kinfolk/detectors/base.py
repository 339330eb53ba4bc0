"""The base class of detectors, their registry, and wrappers of detectors.

Dimension key: R rows of a block, C candidates, b samples of a block, N data set.
"""

from __future__ import annotations

import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from kinfolk.errors import require, require_at_least
from kinfolk.pairs import OUT, Action, Block, Kin, check_answer
from kinfolk.stores.per_sample import Exact, check_num_samples

Space = Literal["projected", "features"]
"""What is clustered: the unit-norm embeddings that are contrasted, or the encoder's features."""
Answer = Kin | tuple[Kin, ...]  # of several levels, over which the loss is the mean


@dataclass(frozen=True)
class Bound:
    """A bound on the similarity: the share of an anchor's negatives `above` it, and (M,) `learned`
    values."""

    name: str
    above: float
    learned: Tensor | None = None


class Detector(Exact, ABC):
    """Abstract. Returns which candidates are kin (detected false negatives) of each anchor.

    `find` is required. It reads state; `observe` writes it, once per training step. Neither may
    make the host wait for an accelerator (no `.item()`, `bool(tensor)`).
    """

    paper: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    default_action: ClassVar[Action] = "eliminate"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments by their name in a method, such as `positive_margin:absolute`."""

    num_samples: int | None = None
    """N, if calls need ids because anything is looked up by them."""
    guide: str | None = None
    """What the framework must pass as `Pairs.guide`: embeddings of a "teacher" or of the other
    "modality"."""
    soft: bool = False
    """Whether all candidates are kin to some degree; "eliminate" is then refused."""
    __signature__: ClassVar[inspect.Signature]
    own_weight: float | None = None
    """The `own_weight` of a loss that does not set it."""
    space: Space = "projected"
    """Which features `refresh` receives."""
    collects: bool = False
    """Whether `collect` is called in every step; `refresh` then receives None."""
    refreshed_at_end: bool = False
    """Whether `refresh` is also called after the last epoch."""
    needed_metrics: frozenset[str] = frozenset()
    """For `on_metric`: "epoch" (with a fraction, before every step), "loss" (after every step),
    "knn" (when measured, never on the test split)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
        cls.__signature__ = inspect.Signature(arguments)  # and not that of `__new__`

    def __new__(cls, *args: Any, **given: Any) -> Self:
        if given.get("num_samples") is not None:
            check_num_samples(given["num_samples"])
        self, named = super().__new__(cls), [f"{k}={_text(value)}" for k, value in given.items()]
        self.__dict__["_arguments"] = ", ".join([*map(_text, args), *named])
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments})"

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.num_epochs, self.loss_temperature = 0, 1, 0.2

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Arguments that a training adds to those `given` by the user."""
        return {}

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Any:
        """`Block.prepared`, computed once per step."""
        return None

    @abstractmethod
    def find(self, block: Block) -> Answer:
        """Returns which candidates are kin, and the new state of the block's samples."""

    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        """Writes the state that `find` proposed, of all blocks and ranks, if the loss `is_finite`
        (stores check it)."""

    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch, counted from 0."""
        return False

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The step before some epochs, such as a clustering, with (N, F) features of all samples in
        data-set order, the same on all ranks. `progress` of the training: in [0, 1]."""

    def collect(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        """Called in every step with the (B·V, D) unit-norm anchors, sample-major, of all ranks."""

    def on_metric(self, name: str, value: float) -> None:
        """Called with one of the `needed_metrics`, the same on all ranks."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged at the end of each epoch."""
        return {}

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        """Why nothing can be flagged or dropped in a training that it joins in `first_epoch`; None:
        something can."""
        return None

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Called before each epoch."""
        self.epoch, self.num_epochs = epoch, num_epochs

    def set_loss_temperature(self, temperature: float) -> None:
        """Called by the loss."""
        self.loss_temperature = temperature

    def swap_towers(self) -> None:
        """Called on the copy for the second direction of a loss of two towers."""

    def bounds(self, ids: Tensor) -> list[Bound]:
        """Bounds of the samples `ids` (M,) for the report: "threshold", or "lower" and "upper"."""
        return []

    @property
    def inner(self) -> Detector:
        """The detector inside any wrappers."""
        return self


def require_detector(detector: object) -> None:
    if not isinstance(detector, Detector):
        must = "must be a detector object, such as kf.FNC(top_k=3)"
        raise TypeError(f"`detector` (={detector!r}) {must}")


def _text(value: object) -> str:
    """The shape of a tensor or array, the beginning of a long list."""
    shape = getattr(value, "shape", None)
    return _SHORT.repr(value) if shape is None else f"<{type(value).__name__} {tuple(shape)}>"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 500

DETECTORS: dict[str, type[Detector]] = {}  # by their name in a method
Kind = TypeVar("Kind", bound=type[Detector])


def register(
    name: str,
    paper: str,
    needs: str,
    action: Action = "eliminate",
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Kind], Kind]:
    """Registers a detector under `name` (`--method simclr+NAME`), with what tables say about it."""

    def register_class(kind: Kind) -> Kind:
        kind.paper, kind.needs, kind.default_action = paper, needs, action
        kind.variants = variants or {}
        DETECTORS[name] = kind
        return kind

    return register_class


_DELEGATED = (
    *("num_samples", "guide", "soft", "own_weight", "space", "collects", "refreshed_at_end"),
    *("needed_metrics", "metrics", "prepare", "observe", "due", "refresh", "collect", "on_metric"),
    *("silent_reason", "set_loss_temperature", "inner"),
)


class Wrapped(Detector, ABC):
    """Abstract. Changes only the answer of another detector."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        require_detector(detector)
        self.detector = detector

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.detector.set_progress(epoch, num_epochs)


def _delegate(name: str) -> property:
    def read(self: Wrapped) -> Any:
        return getattr(self.detector, name)

    return property(read)


for _name in _DELEGATED:
    setattr(Wrapped, _name, _delegate(_name))


def guide_similarities(block: Block) -> Tensor:
    """(R, C) similarities of the guide, if there is one."""
    if block.guide_bG is None or block.guide_CG is None:
        return block.sim_RC
    sim = block.guide_bG.to(block.sim_RC.dtype) @ block.guide_CG.to(block.sim_RC.dtype).T
    sim_RC = sim.repeat_interleave(len(block.sim_RC) // len(sim), 0)
    return sim_RC.masked_fill(block.sim_RC < -2, OUT)


class InGuideSpace(Wrapped):
    """Its detector sees the similarities of `Pairs.guide`, such as the first of two heads (Zheng et
    al., ICCV 2021)."""

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Any:
        return self.detector.prepare(ids_C, candidates_CD if guide_CG is None else guide_CG, None)

    @torch.no_grad()
    def find(self, block: Block) -> Answer:
        sim_RC = guide_similarities(block)
        return self.detector.find(replace(block, sim_RC=sim_RC, guide_bG=None, guide_CG=None))


class StartAt(Wrapped):
    """Wraps a detector: nothing is flagged before `epoch`, and its state does not change before
    `update_from` (GloFND, section 4.3).

    Args:
        epoch: the first, counted from 0, in which kin are flagged; annealing begins there.
        update_from: the first epoch in which the state changes; None: `epoch`.
    """

    def __init__(self, detector: Detector, *, epoch: int, update_from: int | None = None) -> None:
        super().__init__(detector)
        require_at_least(0, epoch=epoch)
        before = f"in [0, {epoch}]: the state starts to move before kin are flagged"
        in_time = update_from is None or 0 <= update_from <= epoch
        require(in_time, "update_from", update_from, before)
        self.start, self.update_from = epoch, epoch if update_from is None else update_from
        self.flags, self.learns = epoch <= 0, self.update_from <= 0

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end and self.learns

    def prepare(
        self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None
    ) -> Tensor | None:
        return super().prepare(ids_C, candidates_CD, guide_CG) if self.learns else None

    def find(self, block: Block) -> Answer:
        if not self.learns:
            return Kin()
        found = self.detector.find(block)
        if self.flags:
            return found
        levels = check_answer(found, block)
        return Kin(update={name: rows for kin in levels for name, rows in kin.update.items()})

    def due(self, epoch: int) -> bool:
        """What was due before `update_from` is due then."""
        first = range(epoch + 1) if epoch == self.update_from else (epoch,)
        return epoch >= self.update_from and any(map(self.detector.due, first))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        if self.start >= self.num_epochs:
            return (
                f"the detector starts in epoch {self.start}, counted from 0, of {self.num_epochs};"
                " start it earlier"
            )
        return self.detector.silent_reason(self.update_from)

    def on_metric(self, name: str, value: float) -> None:
        if self.flags:
            super().on_metric(name, value - self.start if name == "epoch" else value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.flags, self.learns = epoch >= self.start, epoch >= self.update_from


class StopAt(Wrapped):
    """Wraps a detector: from `epoch` on, counted from 0, nothing is flagged and its state no longer
    changes.

    Example:
        >>> import kinfolk as kf
        >>> kf.StopAt(kf.StartAt(kf.FNC(top_k=2), epoch=5), epoch=50)
        StopAt(StartAt(FNC(top_k=2), epoch=5), epoch=50)
    """

    def __init__(self, detector: Detector, *, epoch: int) -> None:
        super().__init__(detector)
        first = detector.start if isinstance(detector, StartAt) else 0
        require(epoch > first, "epoch", epoch, f"above {first}, the first epoch that flags")
        self.stop, self.stopped = epoch, False

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return self.detector.refreshed_at_end and not self.stopped

    def find(self, block: Block) -> Answer:
        return Kin() if self.stopped else self.detector.find(block)

    def due(self, epoch: int) -> bool:
        return epoch < self.stop and self.detector.due(epoch)

    def collect(self, ids: Tensor, anchors: Tensor, is_finite: Tensor | None = None) -> None:
        if not self.stopped:
            self.detector.collect(ids, anchors, is_finite)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.stopped = epoch >= self.stop
