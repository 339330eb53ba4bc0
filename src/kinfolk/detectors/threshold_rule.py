"""One visit of a learned threshold: where it starts, what is measured, how it moves. The formulae are in `quantile.py`.

Dimension key: R rows of a block, C candidates, b samples of the block, V views, M = V·C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.detectors import quantile
from kinfolk.detectors.peaks import moments, peaks
from kinfolk.detectors.quantile import Seen, State, Visit
from kinfolk.pairs import Block

Name = Literal["tracking", "adam", "sgd"]
Init = Literal["one", "quantile"]


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold per sample is learned. Holds no state: it maps state to state. `alpha` is (b,) everywhere.

    Args: as `GloFND`.
    """

    name: Name
    lr: float
    betas: tuple[float, ...]
    init: Init

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise ValueError(f"`rule` (={self.name!r}) must be one of {', '.join(get_args(Name))}")
        if self.init not in get_args(Init):
            raise ValueError(f"`init` (={self.init!r}) must be one of {', '.join(get_args(Init))}")
        if not self.lr > 0:
            raise ValueError(f"`lr` (={self.lr}) must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` (={self.betas}) must be two numbers in [0, 1)")

    def fields(self) -> dict[str, float]:
        """The state of a sample before its first visit."""
        tracked = {"tail": 0.0, "mean": 0.0, "spread": 0.0}
        own: dict[Name, dict[str, float]] = {"sgd": {}, "adam": {"m": 0.0, "v": 0.0}, "tracking": tracked}
        return {"threshold": 1.0, "visits": 0, **own[self.name]}

    def measure(self, block: Block, level_b: Tensor) -> Visit:
        """What this block counts at the levels."""
        level_R = level_b.repeat_interleave(block.num_views)
        n_R = block.num_negatives_R.to(level_R.dtype)
        per_R = 1 / n_R.clamp(min=1)
        number_R, excess_R = (rows.to(per_R.dtype) for rows in peaks(block, level_R))
        return Visit(*(block.over_views(rows) for rows in (number_R * per_R, excess_R * per_R, n_R)))

    def step(self, block: Block, state: State, alpha: Tensor) -> State:
        """A visit under "adam" or "sgd": the new state."""
        new = self.descend(state, self.measure(block, state["threshold"]), alpha)
        if self.init == "one":
            return new
        fresh = state["visits"] == 0
        first = self.started(state, own_quantile(block, alpha, fresh))
        return {name: first[name].where(fresh, rows) for name, rows in new.items()}

    def descend(self, state: State, visit: Visit, alpha: Tensor) -> State:
        """One step of "adam" or "sgd" from what was counted at the thresholds."""
        visits = state["visits"] + 1
        if self.name == "sgd":
            return {**quantile.sgd_step(state, visit, alpha, self.lr), "visits": visits}
        updates = (visits - int(self.init == "quantile")).clamp(min=1)
        return {**quantile.adam_step(state, visit, alpha, self.lr, self.betas, updates), "visits": visits}

    def started(self, state: State, own: Tensor) -> State:
        """The state after a first visit that sets the threshold to `own`, the quantile of that visit."""
        return {**state, "threshold": own.to(state["threshold"].dtype), "visits": state["visits"] + 1}


def track(rule: ThresholdRule, block: Block, state: State, alpha: Tensor, drift: Tensor) -> tuple[State, Tensor, State]:
    """A visit under "tracking": the new state, the thresholds of this visit, and for the drift how many were expected and found."""
    before, jump = quantile.moved(state, look(block, state["threshold"].dtype), alpha)
    n_b = block.over_views(block.num_negatives_R.to(alpha.dtype))
    level_b = quantile.level_of(before, drift)
    visit = rule.measure(block, level_b)
    new, known = quantile.tracking_step(before, visit, alpha, drift), ~jump & (n_b > 0)
    level_b = quantile.in_use(new, drift).where(state["visits"] == 0, level_b)  # a start is a guess, its count is not
    return new, level_b, {"expected": (alpha * n_b).where(known, 0.0), "found": (visit.share * n_b).where(known, 0.0)}


def look(block: Block, dtype: torch.dtype) -> Seen:
    """What this block shows of its samples before any level is set: means over their views."""
    values = (*moments(block.sim_RC), block.num_negatives_R)
    return Seen(*(block.over_views(rows.to(dtype)) for rows in values))


def own_quantile(block: Block, alpha: Tensor, wanted_b: Tensor) -> Tensor:
    """(b,) the quantile over each wanted sample's views and negatives of this block; 1 elsewhere."""
    if wanted_b.device.type == "cpu" and not bool(wanted_b.any()):  # on a CPU looking costs nothing, and saves a selection
        return torch.ones(len(block.ids), dtype=torch.float64)
    n_b = block.num_negatives_R.view(-1, block.num_views).sum(1)
    own_b = quantile.batch_quantile(block.sim_RC.reshape(len(block.ids), -1), n_b, alpha.double())
    return own_b.where(wanted_b, 1.0)
