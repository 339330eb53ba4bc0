"""The base class of losses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.contrast import (
    BlockLoss,
    Contrast,
    Outcome,
    Policy,
    Rows,
    State,
    block_loss,
    compile_block_loss,
    contrast,
)
from kinfolk.detectors.base import Detector, require_detector
from kinfolk.errors import require, require_choice
from kinfolk.pairs import ACTIONS, Action, Pairs, integer_ids, to_unit, two_views
from kinfolk.stats import Stats
from kinfolk.stores.per_sample import (
    check_ids,
    check_num_samples,
    finite,
    is_broken,
    refuse_recomputation,
)

READ_EVERY = 32


def may_read(calls: int, *tensors: Tensor) -> bool:
    """Whether the host may read tensors: on an accelerator, where it waits, only now and then."""
    return all(x.device.type == "cpu" for x in tensors) or calls % READ_EVERY == 0


@dataclass(kw_only=True, eq=False, repr=False)
class Settings(nn.Module):
    """Abstract. The keyword-only arguments that all losses share.

    Args:
        temperature: t > 0; the default is that of each loss's paper.
        detector: finds false negatives (kin) among the candidates.
        action: "eliminate" takes kin out of the denominator, "attract" makes them positives,
            "reweight" gives them a weight in the denominator.
        min_negatives: how many negatives of each anchor, the least similar, are always kept.
        kin_weight: the weight of kin with "reweight", for detectors without degrees.
        own_weight: with "attract", the share of the attraction that positives keep, in [0, 1]; kin
            share the rest by their degrees. None: a positive counts as much as kin of degree 1.
        block_rows: rows of similarities held at a time; None: some megabytes.
        gather: whether to use the candidates of all ranks; None: under a process group.
        compile: whether to use `torch.compile`, which is meant for GPUs.
    """

    temperature: float = 0.1
    detector: Detector | None = None
    action: Action = "eliminate"
    min_negatives: int = 1
    kin_weight: float = 0.5
    own_weight: float | None = None
    block_rows: int | None = None
    gather: bool | None = None
    compile: InitVar[bool] = False  # not an attribute: modules have a method `compile`

    shares_pull: ClassVar[bool] = True  # positives and attracted kin, by `own_weight`
    refused: ClassVar[Mapping[str, str]] = {}  # settings of other losses, with the reason

    def __new__(cls, *args: Any, **given: Any) -> Settings:
        for name in given.keys() & cls.refused:
            why = f"left out with {cls.__name__}: {cls.refused[name]}"
            require(not given[name], name, given[name], why)
        if "num_samples" in given:
            check_num_samples(given["num_samples"])
        self = super().__new__(cls)
        nn.Module.__init__(self)  # before a dataclass sets attributes
        return self

    def __post_init__(self, compile: bool) -> None:
        self.compiles, found, action = compile, self.detector, self.action
        if found is not None:
            require_detector(found)
        t, rows, least = self.temperature, self.block_rows, self.min_negatives
        require(0 < t < math.inf, "temperature", t, "above 0")
        require_choice("action", action, ACTIONS)
        some = "an integer, at least 1: an anchor without negatives has no gradient"
        require(isinstance(least, int) and least >= 1, "min_negatives", least, some)
        require(0 <= self.kin_weight <= 1, "kin_weight", self.kin_weight, "in [0, 1]")
        several = rows is None or (isinstance(rows, int) and rows >= 1)
        require(several, "block_rows", rows, "an integer, at least 1")
        every = f"'attract' or 'reweight' with {found!r}: every candidate is kin to some degree"
        require(action != "eliminate" or found is None or not found.soft, "action", action, every)
        divides = action == "attract" and self.shares_pull
        if self.own_weight is None and found is not None and divides:
            self.own_weight = found.own_weight
        if (share := self.own_weight) is not None:
            require(0 <= share <= 1, "own_weight", share, "in [0, 1]")
            what = type(self).__name__ if action == "attract" else f"`action` (={action!r})"
            must = f"None with {what}, which has no attraction to share"
            require(divides, "own_weight", share, must)

    def __repr__(self) -> str:
        given = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        shown = [
            f"{name}={value!r}" for name, (value, default) in given.items() if value != default
        ]
        shown += ["compile=True"] if self.compiles else []
        return f"{type(self).__name__}({', '.join(shown)})"


# class attributes would hide the module's; the defaults stay
del Settings.detector, Settings.compile


class Objective(Settings, ABC):
    """Abstract. A contrastive loss over two views, or over any `Pairs`."""

    attracted_stay: ClassVar[bool] = True  # in the denominator (InfoNCE) or leave it (SogCLR)
    keeps_negatives: ClassVar[bool] = True  # `min_negatives` applies
    uses_degrees: ClassVar[bool] = False  # of `Pairs.degree`
    labels: Tensor | None
    groups: Tensor | None
    _compiled: BlockLoss | None = None

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        if self.detector is not None:
            self.detector.set_loss_temperature(self.temperature)
        self._stats, self._losses = Stats.empty(), list[Tensor]()
        self.register_buffer("labels", None, persistent=False)
        self.register_buffer("groups", None, persistent=False)

    @abstractmethod
    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        """The (R,) loss of a block's rows, and (b,) state to write. Reads state only."""

    def state_of(self, proposed: State) -> State:
        """(B,) the state to write, from (B, L) that `row_loss` proposed."""
        return {}

    def observe(self, ids: Tensor, update: State, is_finite: Tensor | None = None) -> None:
        """Writes state; see `Detector.observe`."""

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor | None = None) -> Tensor:
        """Scalar: the mean over the 2B anchors of all ranks. `z1`, `z2`: (B, D) two views, of any
        norm; `ids`: (B,) sample ids."""
        return self.on(two_views(z1, z2, self.number(z1) if ids is None else ids))

    def on(
        self,
        pairs: Pairs,
        temperature: Tensor | None = None,
        parameters: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Scalar: the same over any `Pairs`. Candidates that are the anchors (one tensor) or
        `local_candidates` are gathered from all ranks. `temperature`, `parameters`: learned
        scalars."""
        if torch.compiler.is_compiling():  # in a user's graph: it breaks here
            outside: Tensor = torch.compiler.disable(self.on)(pairs, temperature, parameters)  # type: ignore[no-untyped-call]
            return outside
        if pairs.degree is not None and not self.uses_degrees:
            name = type(self).__name__
            raise ValueError(f"`degree` must be None: {name} counts every positive fully")
        self.check_ids(pairs.ids, pairs.candidate_ids)
        find, prepared, sizes, device = None, None, None, pairs.ids.device
        with torch.autocast(pairs.anchors.device.type, enabled=False):
            pairs = to_unit(pairs)
            if self.groups is not None and pairs.groups is None:
                pairs = _with_groups(pairs, self.groups.to(device))
            if distributed.world_size() > 1 and self.gather is not False:
                pairs, sizes = _gather(pairs)
            if self.detector is not None:
                seen = pairs.candidate_ids, pairs.candidates.detach(), pairs.candidate_guide
                find, prepared = self.detector.find, self.detector.prepare(*seen)
            least = self.min_negatives if self.keeps_negatives else 0
            how = Contrast(
                self.row_loss,
                Policy(self.action, self.kin_weight, least, self.attracted_stay),
                find,
                prepared,
                labels_N=None if self.labels is None else self.labels.to(device),
                block_rows=self.block_rows,
                num_anchors=None if sizes is None else sum(sizes) * pairs.num_views,
            )
            if self.compiles and self._compiled is None:
                self._compiled = compile_block_loss()
            t = pairs.anchors.new_full((), self.temperature) if temperature is None else temperature
            scalars = (x.to(pairs.anchors.dtype) for x in (t, *parameters))
            outcome = contrast(how, pairs, *scalars, run=self._compiled or block_loss)
        loss = outcome.loss if sizes is None else distributed.sum_over_ranks(outcome.loss)
        self._stats = outcome.stats
        if self.training and (self.detector is not None or outcome.proposed):
            with torch.no_grad():
                self._write_state(pairs, outcome, loss, sizes)
        return loss

    @property
    def stats(self) -> Stats:
        """The counts of the last call."""
        return self._stats

    def set_eval_labels(self, labels: Tensor | None) -> None:
        """Sets (N,) labels for precision and recall in `stats`, not for the loss; below 0:
        unknown."""
        self.labels = _table(labels, "labels")

    def set_groups(self, groups: Tensor | None) -> None:
        """Sets (N,) groups: candidates of the anchor's group are never its negatives. Below 0: no
        group. `Pairs` with groups keep theirs."""
        self.groups = _table(groups, "groups")

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        """Sets the epoch, from 0; before every step, `epoch + step / num_steps`, if a schedule
        moves with every step."""
        if self.detector is not None:
            if int(epoch) != self.detector.epoch:
                self._flush_losses()
            self.detector.set_progress(int(epoch), num_epochs)
            if "epoch" in self.detector.needed_metrics:
                self.detector.on_metric("epoch", epoch)

    def number(self, z: Tensor) -> Tensor:
        """Ids where none are given: positions in the batch of all ranks."""
        if self.looks_up:
            raise ValueError("`ids` must be given: state or labels are looked up by sample id")
        first = 0
        if distributed.world_size() > 1 and self.gather is not False:
            first = sum(distributed.batch_sizes(len(z), z.device)[: torch.distributed.get_rank()])
        return torch.arange(first, first + len(z), device=z.device)

    @property
    def looks_up(self) -> bool:
        """Whether calls need ids."""
        return bool(self._sizes())

    def _sizes(self) -> dict[str, int]:
        """The number of samples that each part knows."""
        found = {
            "set_eval_labels": None if self.labels is None else len(self.labels),
            "set_groups": None if self.groups is None else len(self.groups),
            "loss": getattr(self, "num_samples", None),
            "detector": None if self.detector is None else self.detector.num_samples,
        }
        return {name: size for name, size in found.items() if size is not None}

    def check_ids(self, *ids: Tensor) -> None:
        if sizes := self._sizes():
            name, size = min(sizes.items(), key=lambda item: item[1])
            for each in ids:
                check_ids(each, size, f"the number of samples of `{name}`")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy compiles its own

    def _write_state(
        self, pairs: Pairs, outcome: Outcome, loss: Tensor, sizes: list[int] | None
    ) -> None:
        """The state of detector and loss, of all ranks, unless the loss is not finite."""
        is_finite, detector = finite(loss), self.detector
        parts = [(detector, outcome.found), (self, self.state_of(outcome.proposed))]
        parts = [(part, update) for part, update in parts if part is not None and update]
        wants_loss = detector is not None and "loss" in detector.needed_metrics
        collects = detector is not None and detector.collects
        if parts or wants_loss or collects:
            refuse_recomputation(type(self).__name__)
        mean = loss.detach().to(torch.float64, copy=True)
        if distributed.world_size() > 1 and sizes is None:  # gathered losses are equal on all ranks
            torch.distributed.all_reduce(mean)  # not finite where one of them is not
            mean, is_finite = mean / distributed.world_size(), finite(mean)
        if is_broken(is_finite):
            return
        if parts:
            rows = [x for _, update in parts for x in update.values()]
            ids, *rows = distributed.gather_all(pairs.ids, *rows, sizes=sizes)
            for part, update in parts:
                part.observe(ids, {name: rows.pop(0) for name in update}, is_finite)  # type: ignore[union-attr]
        if wants_loss:
            self._losses.append(mean)
            if may_read(len(self._losses), mean):
                self._flush_losses()
        if detector is not None and collects:
            collected = pairs.anchors if pairs.collected is None else pairs.collected
            by_sample = collected.reshape(len(pairs.ids), -1, collected.shape[-1])
            ids, by_sample = distributed.gather_all(pairs.ids, by_sample, sizes=sizes)
            detector.collect(ids, by_sample.flatten(0, 1), is_finite)

    def _flush_losses(self) -> None:
        """Passes collected losses to the detector; waits for an accelerator."""
        losses, self._losses = self._losses, []
        for value in torch.stack(losses).tolist() if losses and self.detector is not None else ():
            self.detector.on_metric("loss", value)  # type: ignore[union-attr]


class HasObjectives(ABC):
    """Abstract. Several losses, which are set alike."""

    @property
    @abstractmethod
    def objectives(self) -> tuple[Objective, ...]: ...

    @property
    def stats(self) -> Stats:
        """Counts of the last step."""
        first, *others = (each.stats for each in self.objectives)
        return sum(others, first)

    def set_eval_labels(self, labels: Tensor | None) -> None:
        for objective in self.objectives:
            objective.set_eval_labels(labels)

    def set_groups(self, groups: Tensor | None) -> None:
        for objective in self.objectives:
            objective.set_groups(groups)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        """Called before each epoch, counted from 0."""
        for objective in self.objectives:
            objective.set_progress(epoch, num_epochs)


def _with_groups(pairs: Pairs, groups_N: Tensor) -> Pairs:
    keys, others = (group_keys(ids, groups_N[ids]) for ids in (pairs.ids, pairs.candidate_ids))
    return pairs.with_changes(groups=keys, candidate_groups=others)


def _gather(pairs: Pairs) -> tuple[Pairs, list[int]]:
    """The pairs with the candidates of all ranks, and the batch sizes."""
    sizes = distributed.batch_sizes(len(pairs.ids), pairs.ids.device)
    if 0 in sizes:
        raise ValueError(f"the batches of the ranks (={sizes}) must each have a sample")
    if pairs.candidates is not pairs.anchors and not pairs.local_candidates:
        return pairs, sizes
    names = ("candidate_ids", "candidate_groups", "candidate_owners", "candidate_guide")
    others = {name: x for name in names if (x := getattr(pairs, name)) is not None}
    found = distributed.gather_with_gradient(pairs.candidates, sizes, *others.values())
    return pairs.with_changes(**dict(zip(("candidates", *others), found, strict=True))), sizes


def _table(values: Tensor | None, name: str) -> Tensor | None:
    if values is not None:
        values = integer_ids(values, name=name)
        require(values.ndim == 1, name, tuple(values.shape), "of the shape (samples,)")
    return values


def group_keys(ids: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) keys that agree for samples of one group.

    Example:
        >>> group_keys(torch.tensor([5, 6, 7, 5]), torch.tensor([0, 0, -1, -1]))
        tensor([ 0,  0, -8, -6])
    """
    return torch.where(group_ids >= 0, group_ids, -1 - ids)
