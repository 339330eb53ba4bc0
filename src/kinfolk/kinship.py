"""A detector's answer, and what a loss makes of it: weights in the denominator, targets in the
numerator.

    lse_i = log Σ_j w_ij exp(s_ij / t),     pull_i = Σ_j y_ij s_ij

w_ij is 1 for a negative. For kin it is 0 with "eliminate" and 1 − degree with "reweight"; y_ij is
the degree of kin with "attract", otherwise 0.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.pairs import OUT, Block

Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Kin:
    """What a detector returns for a block: which candidates are kin, that is, false negatives.

    Args:
        degree: (R, C) bool, or degrees in [0, 1] where 0 means not kin. None: nothing is kin.
        ignore: (R, C) bool, candidates to leave out although they are not kin. None: none.
        update: name → (b, …) state to write after the step, one row for each sample of the block.
    """

    degree: Tensor | None = None
    ignore: Tensor | None = None
    update: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """What a loss does about kin."""

    action: Action = "eliminate"
    kin_weight: float = 0.5  # of kin without degrees with "reweight"
    min_negatives: int = 1  # of each anchor, the least similar, are never removed
    attracted_stay: bool = True  # in the denominator (InfoNCE) or leave it (SogCLR)


def above(block: Block, level: Tensor, degrees_from_R: Tensor | None = None) -> Tensor:
    """(R, C) the candidates more similar than `level`, (R,) or (b,).

    With `block.degrees`: to the degree (s − level) / (1 − level); `degrees_from_R` is that
    level."""
    sim_RC, rows = block.sim_RC, len(block.sim_RC) // len(level)
    level_R = level.to(sim_RC.dtype).repeat_interleave(rows) if rows > 1 else level
    kin_RC = sim_RC > level_R.to(sim_RC.dtype).clamp(min=-2).unsqueeze(1)
    if not block.degrees:
        return kin_RC
    from_R = level_R if degrees_from_R is None else degrees_from_R
    from_R1 = from_R.to(sim_RC.dtype).nan_to_num(nan=1.0).clamp(-1, 1).unsqueeze(1)
    width_R1 = (1 - from_R1).clamp(min=torch.finfo(sim_RC.dtype).eps)
    return ((sim_RC - from_R1) / width_R1).clamp(0, 1) * kin_RC


def same_key(key_R: Tensor, key_C: Tensor) -> Tensor:
    """(R, C) bool: candidates with the anchor's key. A key below 0 equals no other."""
    return (key_R.unsqueeze(1) == key_C) & (key_C >= 0)


def check_answer(answer: object, block: Block) -> tuple[Kin, ...]:
    """The levels of a detector's answer. Refuses wrong types and shapes."""
    levels, right = answer if isinstance(answer, tuple) else (answer,), tuple(block.sim_RC.shape)
    for kin in levels or (answer,):
        if not isinstance(kin, Kin):
            raise TypeError(f"`find` must return a `Kin`, or a tuple of them; received {kin!r:.80}")
        masks = ("degree", kin.degree, FLOATS), ("ignore", kin.ignore, ())
        for name, value, floats in masks:
            dtype, shape = getattr(value, "dtype", type(value)), getattr(value, "shape", ())
            if value is not None and (shape != right or dtype not in (torch.bool, *floats)):
                kind = f"{'bool or float' if floats else 'bool'} of the shape {right}"
                raise ValueError(f"`{name}` of `Kin` (={dtype} {tuple(shape)}) must be {kind}")
        for name, value in kin.update.items():
            if not isinstance(value, Tensor) or value.shape[:1] != block.ids.shape:
                raise ValueError(
                    f"the update {name!r} (={getattr(value, 'shape', value)}) must have"
                    f" {len(block.ids)} rows, one per sample"
                )
    return levels


@torch.no_grad()
def weigh(
    sim_RC: Tensor, out_RC: Tensor, kin: Kin, policy: Policy
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(R, C) log w_ij; y_ij, None: nothing is attracted; bool, the candidates that are kin after
    `min_negatives`, None: none. `out_RC`: candidates that are never negatives."""
    zero = sim_RC.new_zeros(())
    out_RC = out_RC if kin.ignore is None else out_RC | kin.ignore
    if kin.degree is None:
        return torch.where(out_RC, OUT, zero), None, None
    graded = kin.degree.is_floating_point()
    kin_RC = (kin.degree > 0 if graded else kin.degree) & ~out_RC
    degree = kin.degree.to(sim_RC.dtype) if graded else zero + 1  # of those that are kin
    attracts = policy.action == "attract"
    if attracts and policy.attracted_stay:
        return torch.where(out_RC, OUT, zero), kin_RC * degree, kin_RC
    removed: Tensor | None = None  # the share of their weight that kin lose; None: all of it
    if policy.action == "reweight" and not graded:
        removed = zero + (1 - policy.kin_weight)
    elif policy.action != "eliminate" and graded:
        removed = degree
    near_one = 1 - 8 * torch.finfo(sim_RC.dtype).eps
    gone_RC = kin_RC if removed is None else kin_RC & (removed > near_one)
    kin_RC = kin_RC & ~spare(sim_RC, out_RC, gone_RC, policy.min_negatives)
    y_RC = kin_RC * degree if attracts else None
    if removed is None:
        return torch.where(out_RC | kin_RC, OUT, zero), y_RC, kin_RC
    log_w_RC = torch.where(kin_RC, torch.log1p(-removed).clamp(min=OUT), zero)
    return torch.where(out_RC, OUT, log_w_RC), y_RC, kin_RC


def spare(sim_RC: Tensor, out_RC: Tensor, gone_RC: Tensor, min_negatives: int) -> Tensor:
    """(R, C) bool: kin that stay negatives, because their row would have fewer than
    `min_negatives`.

    They are the least similar ones. Ties, up to rounding, are treated alike, so that the order of
    the candidates does not matter."""
    number = min(min_negatives, sim_RC.shape[1])
    if number == 0:
        return torch.zeros_like(gone_RC)
    gone_sim_RC = torch.where(gone_RC, sim_RC, torch.inf)
    if number == 1:  # the default, and much faster
        few_R1, cut_R1 = (out_RC | gone_RC).all(1, keepdim=True), gone_sim_RC.amin(1, keepdim=True)
    else:
        missing_R1 = number - (~(out_RC | gone_RC)).sum(1, keepdim=True)
        least_RK = gone_sim_RC.topk(number, 1, largest=False).values
        few_R1, cut_R1 = missing_R1 > 0, least_RK.gather(1, (missing_R1 - 1).clamp(0, number - 1))
    cut_R1 = torch.where(few_R1, cut_R1 + 8 * torch.finfo(sim_RC.dtype).eps, OUT)
    return gone_RC & (sim_RC <= cut_R1)
