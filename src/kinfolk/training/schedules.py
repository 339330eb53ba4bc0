"""The learning rate as a pure function of the step: warm-up, then cosine, steps or constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["cosine", "steps", "constant"]


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    kind: Schedule = "cosine",
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
    final: float = 0.0,
) -> float:
    """What the learning rate is multiplied by at `step` (from 0).

    Warm-up rises as (step + 1) / warmup_steps, so that the first step moves and the last one of the warm-up is whole. Then, with
    p = (step − warmup_steps) / (total_steps − warmup_steps), at most 1:

        cosine    final + (1 − final) · (1 + cos(π p)) / 2
        steps     gamma to the number of `milestones` ≤ step
        constant  1

    Args:
        step: optimiser steps done so far.
        total_steps: of the whole training; beyond them the value stays.
        warmup_steps: length of the warm-up.
        kind: "cosine", "steps" or "constant".
        milestones: steps at which "steps" multiplies by `gamma`.
        gamma: that factor.
        final: where "cosine" ends, as a share of the full rate.
    """
    check(total_steps, warmup_steps, kind, final)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "steps":
        return float(gamma ** sum(milestone <= step for milestone in milestones))
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def build_scheduler(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    kind: Schedule = "cosine",
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
    final: float = 0.0,
    others: Sequence[Callable[[], float]] = (),
) -> LambdaLR:
    """A scheduler to be stepped after every optimiser step; its only state is the number of steps, so that resuming is exact.

    The last groups of the optimiser, one for each of `others`, go by these factors instead, whatever the step.
    """
    check(total_steps, warmup_steps, kind, final)
    marks = tuple(milestones)

    def factor(step: int) -> float:
        return lr_factor(step, total_steps, warmup_steps, kind, marks, gamma, final)

    own: list[Callable[[int], float]] = [_whatever_the_step(other) for other in others]
    return LambdaLR(optimizer, [*[factor] * (len(optimizer.param_groups) - len(own)), *own])


def _whatever_the_step(factor: Callable[[], float]) -> Callable[[int], float]:
    return lambda _: factor()


def check(total_steps: int, warmup_steps: int, kind: str, final: float) -> None:
    """Refuses a schedule that can't be meant."""
    if kind not in get_args(Schedule):
        raise ValueError(f"`kind` (={kind!r}) must be one of {', '.join(get_args(Schedule))}")
    if total_steps < 1:
        raise ValueError(f"`total_steps` (={total_steps}) must be at least 1")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"`warmup_steps` (={warmup_steps}) must be in [0, total_steps={total_steps}]")
    if not 0 <= final <= 1:
        raise ValueError(f"`final` (={final}) must be in [0, 1]")
