"""The base class of detectors, which return the false negatives among the candidates, and the wrappers that change a detector's answer.

A new detector needs `find`, and `observe` if it keeps state. Everything else has a default. What only some detectors need is in classes
that they inherit as well: `Refreshed` (a step once per epoch, such as a clustering of all samples), `Guided` (embeddings of another model,
or degrees for all candidates) and `TakesMetrics` (metrics of the training).

Dimension key: R rows of a block, C candidates, b samples of the block, N data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kinfolk.kinship import Form, Mask, Roles
from kinfolk.pairs import LEFT_OUT, Action, Block
from kinfolk.stores.per_sample import Exact

Space = Literal["projected", "features"]
"""What is clustered: the unit-norm embeddings that are contrasted, or the features of the encoder."""


@dataclass(frozen=True)
class Found:
    """What `find` returns: one `Roles` for each level (most detectors have one), and the state that it proposes to write.

    `update` maps a name to a (b, …) tensor, one row for each sample of the block. The engine collects the rows of all blocks and ranks
    and passes them to `observe`. `find` itself writes nothing.
    """

    levels: tuple[Roles, ...]
    update: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Guidance:
    """What distinguishes a detector that uses embeddings of another model, or degrees for all candidates.

    Args:
        reads: what the framework must pass as the guide of `Pairs`: "teacher", embeddings of a slow copy of the encoder, or "modality",
            those of the candidates' own modality. None: nothing.
        soft: whether all candidates are kin to some degree, so that "eliminate" would leave no negative.
        own_weight: with "attract", the share of the pull of the own positives if the objective has none. None: the usual one.
    """

    reads: str | None = None
    soft: bool = False
    own_weight: float | None = None


class Detector(Exact, ABC):
    """Abstract. Returns which candidates are kin (detected false negatives) of each anchor.

    `find` reads, `observe` writes (training only, once per step, without gradient).
    """

    paper: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    usual_action: ClassVar[Action] = "eliminate"
    """The action of the method grammar if none is given."""
    leveled: ClassVar[bool] = False
    """Whether kin are always the candidates above one similarity of each anchor: an `Interval` without upper bound."""

    num_samples: int | None = None
    """N, if it reads or writes by sample id: a call without ids is then an error. None: it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.num_epochs = 0, 1  # see `set_progress`

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for mixin in (Refreshed, Guided):
            for name in vars(mixin):
                if not name.startswith("_") and hasattr(cls, name) and not issubclass(cls, mixin):
                    raise TypeError(_lacks(cls, name, mixin))

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Values that a training uses for required arguments that the user has not `given`. Default: none."""
        return {}

    @abstractmethod
    def find(self, block: Block) -> Found:
        """Returns which candidates of this block are kin, and the new state of its samples. Writes nothing."""

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Writes what `find` proposed in this step. Several rows of one id are stored as their mean. `sound`: whether the loss is finite,
        as a tensor that is passed on to the stores; see `stores.per_sample.kept`. Default: no state."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics logged at the end of each epoch. Default: none."""
        return {}

    def silent_reason(self) -> str | None:
        """The reason why it cannot flag or drop anything in a training of `num_epochs` epochs, or None. Training warns before the first
        step. Default: None."""
        return None

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        """Sets the epoch for schedules and warm-ups."""
        self.epoch, self.num_epochs = epoch, num_epochs


class Refreshed(ABC):
    """Abstract. What a detector adds that uses all samples at once, such as one that clusters them: a step before some of the epochs."""

    space: Space = "projected"
    """Which features `refresh` receives."""
    collects: bool = False
    """Whether `collect` is called in every step. `refresh` then needs no features."""
    refreshed_at_end: bool = False
    """Whether `refresh` is also called after the last epoch, with the progress 1, so that the state describes the final encoder."""

    @abstractmethod
    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch, counted from 0."""

    @abstractmethod
    def refresh(self, features: Tensor | None, progress: float) -> None:
        """The once-per-epoch step. `features`: (N, F) of all samples in data-set order, the same on all ranks; None if it collects its own.
        `progress`: in [0, 1] of the training."""

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        """Called in every step with the unit-norm anchors (B·V, D), sample-major, of the samples `ids` (B,) of all ranks, if `collects`."""
        raise NotImplementedError(f"{type(self).__name__} collects no anchors")


class Guided(ABC):
    """Abstract. What a detector adds that uses embeddings of another model, or gives degrees to all candidates."""

    @property
    @abstractmethod
    def guidance(self) -> Guidance:
        """What distinguishes it from other detectors."""


class TakesMetrics(ABC):
    """Abstract. What a detector adds that follows metrics of the training."""

    wanted_metrics: frozenset[str] = frozenset()
    """Which metrics `on_metric` is called with: "epoch", the number of epochs done, with a fraction, before every step; "loss" after every
    step; "knn" whenever it is measured, never on the test split."""

    @abstractmethod
    def on_metric(self, name: str, value: float) -> None:
        """Called with one of the `wanted_metrics`; the value is the same on all ranks."""


def wants(detector: Detector | None, metric: str) -> TakesMetrics | None:
    """The detector, if it wants this metric."""
    return detector if isinstance(detector, TakesMetrics) and metric in detector.wanted_metrics else None


class Wrapped(Detector, Refreshed, TakesMetrics, ABC):
    """Abstract. A detector that changes the answer of another one. Everything else is that of the wrapped detector.

    Args:
        detector: the wrapped detector.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    @property
    def num_samples(self) -> int | None:  # type: ignore[override]
        return self.detector.num_samples

    @property
    def space(self) -> Space:  # type: ignore[override]
        return self.detector.space if isinstance(self.detector, Refreshed) else "projected"

    @property
    def collects(self) -> bool:  # type: ignore[override]
        return isinstance(self.detector, Refreshed) and self.detector.collects

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return isinstance(self.detector, Refreshed) and self.detector.refreshed_at_end

    @property
    def wanted_metrics(self) -> frozenset[str]:  # type: ignore[override]
        return self.detector.wanted_metrics if isinstance(self.detector, TakesMetrics) else frozenset()

    @property
    def metrics(self) -> dict[str, float]:
        return self.detector.metrics

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.detector.observe(ids, update, sound)

    def collect(self, ids: Tensor, anchors: Tensor, sound: Tensor | None = None) -> None:
        assert isinstance(self.detector, Refreshed)
        self.detector.collect(ids, anchors, sound)

    def due(self, epoch: int) -> bool:
        return isinstance(self.detector, Refreshed) and self.detector.due(epoch)

    def silent_reason(self) -> str | None:
        return self.detector.silent_reason()

    def refresh(self, features: Tensor | None, progress: float) -> None:
        if isinstance(self.detector, Refreshed):
            self.detector.refresh(features, progress)

    def on_metric(self, name: str, value: float) -> None:
        assert isinstance(self.detector, TakesMetrics)
        self.detector.on_metric(name, value)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.detector.set_progress(epoch, num_epochs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.detector!r})"


def unwrapped(detector: Detector | None) -> Detector | None:
    """The detector inside any number of wrappers."""
    while isinstance(detector, Wrapped):
        detector = detector.detector
    return detector


def guidance_of(detector: Detector | None) -> Guidance:
    """The guidance of the detector inside any number of wrappers; the usual one if it has none of its own."""
    inner = unwrapped(detector)
    if isinstance(inner, Guided):
        return inner.guidance
    if hasattr(inner, "guidance"):
        raise TypeError(_lacks(type(inner), "guidance", Guided))
    return Guidance()


def _lacks(cls: type, name: str, mixin: type) -> str:
    return (
        f"`{cls.__name__}` has `{name}` but does not inherit `{mixin.__name__}`: write `class {cls.__name__}(Detector, {mixin.__name__})`; "
        "both are in kinfolk.detectors.base"
    )


def set_loss_temperature(detector: Detector, temperature: float) -> None:
    """Sets the temperature of the loss, for a detector that uses it."""
    _set_inside(detector, "loss_temperature", temperature)


def _set_inside(detector: Detector, name: str, value: float) -> None:
    """Sets an attribute of the detector inside any number of wrappers, if it has it."""
    inner = unwrapped(detector)
    if hasattr(inner, name):
        setattr(inner, name, value)


class Elsewhere(Wrapped):
    """The wrapped detector uses the embeddings that are the guide of `Pairs`, one for each anchor, instead of those that are contrasted.

    For a second head, which attracts what is similar in the embedding of the first head."""

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
        _set_inside(detector, "first_epoch", self.update_from)

    @property
    def leveled(self) -> bool:  # type: ignore[override]
        return self.detector.leveled

    @property
    def refreshed_at_end(self) -> bool:  # type: ignore[override]
        return super().refreshed_at_end and self.epoch >= self.update_from

    def find(self, block: Block) -> Found:
        if self.epoch < self.update_from:
            return Found((Roles(),))
        found = self.detector.find(block)
        return found if self.epoch >= self.start else Found((Roles(),), found.update)

    def due(self, epoch: int) -> bool:
        """If a refresh was due before `update_from`, it is due at `update_from`."""
        first = range(epoch + 1) if epoch == self.update_from else (epoch,)
        return epoch >= self.update_from and any(map(super().due, first))

    def silent_reason(self) -> str | None:
        if self.start >= self.num_epochs:
            return f"the detector starts in epoch {self.start}, counted from 0, of {self.num_epochs}; start it earlier"
        return self.detector.silent_reason()

    def on_metric(self, name: str, value: float) -> None:
        if self.epoch >= self.start:
            super().on_metric(name, value - self.start if name == "epoch" else value)

    def __repr__(self) -> str:
        return f"StartAt({self.detector!r}, epoch={self.start}, update_from={self.update_from})"
