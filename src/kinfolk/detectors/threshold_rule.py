"""One visit of a learned threshold: where it starts, what is measured, how it moves. The formulae are in `quantile.py`.

Dimension key: R rows of a block, C candidates, b samples of the block, V views, M = V·C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.detectors import quantile
from kinfolk.detectors.peaks import peaks
from kinfolk.detectors.quantile import State, Visit
from kinfolk.pairs import Block

Name = Literal["tracking", "adam", "sgd"]
Init = Literal["one", "quantile"]


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold per sample is learned. Holds no state: it maps state to state.

    Args: as `GloFND`.
    """

    name: Name
    alpha: float
    lr: float
    betas: tuple[float, ...]
    init: Init

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"`alpha` (={self.alpha}) must be in [0, 1]")
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
        own: dict[Name, dict[str, float]] = {"sgd": {}, "adam": {"m": 0.0, "v": 0.0}, "tracking": {"scale": self.lr, "evidence": 0.0}}
        return {"threshold": 1.0, "visits": 0, **own[self.name]}

    def fresh(self, state: State) -> Tensor:
        """(b,) whose first visit this is, where the first visit only sets the threshold."""
        return (state["visits"] == 0) & (self.init == "quantile")

    def measure(self, block: Block, state: State) -> Visit:
        """What this block says of the thresholds in `state`."""
        level_R = state["threshold"].repeat_interleave(block.num_views)
        n_R = block.num_negatives_R.to(level_R.dtype)
        per_R = 1 / n_R.clamp(min=1)
        scale_R = state["scale"].repeat_interleave(block.num_views) if self.name == "tracking" else torch.ones_like(level_R)
        number_R, height_R = (rows.to(per_R.dtype) for rows in peaks(block, level_R, scale_R))
        return Visit(*(block.over_views(rows) for rows in (number_R * per_R, height_R * per_R, n_R)))

    def own_quantile(self, block: Block, wanted_b: Tensor) -> Tensor:
        """(b,) the quantile over each wanted sample's views and negatives of this block; 1 elsewhere."""
        sim_bM = block.sim_RC.reshape(len(block.ids), -1)[wanted_b]
        n_b = block.num_negatives_R.view(-1, block.num_views).sum(1)[wanted_b]
        own_b = torch.ones(len(block.ids), dtype=torch.float64, device=wanted_b.device)
        own_b[wanted_b] = quantile.batch_quantile(sim_bM, n_b, self.alpha)
        return own_b

    def step(self, state: State, visit: Visit) -> State:
        """The state after a visit that is not a first one to set the threshold."""
        visits = state["visits"] + 1
        if self.name == "sgd":
            new = quantile.sgd_step(state, visit, self.alpha, self.lr)
        elif self.name == "adam":
            updates = (visits - int(self.init == "quantile")).clamp(min=1)
            new = quantile.adam_step(state, visit, self.alpha, self.lr, self.betas, updates)
        else:
            new = quantile.tracking_step(state, visit, self.alpha, self.lr)
        return {**new, "visits": visits}

    def start(self, state: State, visit: Visit, own: Tensor) -> State:
        """The state after a first visit that sets the threshold to `own`, the quantile of that visit."""
        new = {**state, "threshold": own.to(state["threshold"].dtype), "visits": state["visits"] + 1}
        if self.name == "tracking":
            new["evidence"] = (self.alpha * visit.n).clamp(max=quantile.EVIDENCE)
        return new
