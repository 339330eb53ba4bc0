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
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kinfolk.pairs import OUT, Block

Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)


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
    """What a loss does about kin.

    Args:
        action: "eliminate" (out of the denominator), "attract" (also a positive) or "reweight".
        kin_weight: weight of kin without degrees with "reweight".
        min_negatives: this many negatives of each anchor, the least similar, are never removed.
        attracted_stay: attracted kin stay in the denominator (InfoNCE) or leave it (SogCLR).
    """

    action: Action = "eliminate"
    kin_weight: float = 0.5
    min_negatives: int = 1
    attracted_stay: bool = True


class Weighed(NamedTuple):
    """(R, C) log w_ij; y_ij, None: nothing is attracted; bool, the candidates that are kin after
    `min_negatives`, None: none."""

    log_w_RC: Tensor
    y_RC: Tensor | None
    kin_RC: Tensor | None


def above(block: Block, level: Tensor, degrees_from_R: Tensor | None = None) -> Tensor:
    """(R, C) the candidates more similar than `level`, (R,) or (b,).

    With `block.degrees`: to the degree (s − level) / (1 − level); `degrees_from_R` is that
    level."""
    sim_lC, level_l1 = block.sim_RC.view(len(level), -1), level.to(block.sim_RC.dtype).unsqueeze(1)
    kin_RC = (sim_lC > level_l1.clamp(min=-2)).view_as(block.sim_RC)
    if not block.degrees:
        return kin_RC
    from_R1 = block.per_row(level) if len(level) < len(block.sim_RC) else level
    from_R1 = (
        (from_R1 if degrees_from_R is None else degrees_from_R).to(block.sim_RC.dtype).unsqueeze(1)
    )
    from_R1 = from_R1.nan_to_num(nan=1.0).clamp(-1, 1)
    width_R1 = (1 - from_R1).clamp(min=torch.finfo(block.sim_RC.dtype).eps)
    return ((block.sim_RC - from_R1) / width_R1).clamp(0, 1) * kin_RC


def same_key(key_R: Tensor, key_C: Tensor) -> Tensor:
    """(R, C) bool: candidates with the anchor's key. A key below 0 equals no other."""
    return (key_R.unsqueeze(1) == key_C) & (key_C >= 0)


def check_answer(answer: object, block: Block) -> tuple[Kin, ...]:
    """The levels of a detector's answer. Refuses wrong types and shapes."""
    levels, right = answer if isinstance(answer, tuple) else (answer,), tuple(block.sim_RC.shape)
    for kin in levels or (answer,):
        if not isinstance(kin, Kin):
            raise TypeError(f"`find` must return a `Kin`, or a tuple of them; received {kin!r:.80}")
        for name, value, floats in (
            ("degree", kin.degree, " or float"),
            ("ignore", kin.ignore, ""),
        ):
            dtype, shape = (
                (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (None, ())
            )
            fits = (
                shape == right
                and dtype is not None
                and (dtype == torch.bool or (floats and dtype.is_floating_point))
            )
            if value is not None and not fits:
                raise ValueError(
                    f"`{name}` of `Kin` (={dtype or type(value)} {shape}) must be bool{floats} of"
                    f" the shape {right}"
                )
        for name, value in kin.update.items():
            if not isinstance(value, Tensor) or value.shape[:1] != block.ids.shape:
                raise ValueError(
                    f"the update {name!r} (={getattr(value, 'shape', value)}) must have"
                    f" {len(block.ids)} rows, one per sample"
                )
    return levels


@torch.no_grad()
def weigh(sim_RC: Tensor, own_RC: Tensor, kin: Kin, policy: Policy) -> Weighed:
    """Weights and targets of a block. `own_RC`: candidates that are the anchor's sample or
    group."""
    zero, near_one = sim_RC.new_zeros(()), 1 - 8 * torch.finfo(sim_RC.dtype).eps
    out_RC = own_RC if kin.ignore is None else own_RC | kin.ignore
    if kin.degree is None:
        return Weighed(torch.where(out_RC, OUT, zero), None, None)
    graded = kin.degree.is_floating_point()
    degree_RC = (
        torch.where(out_RC, 0.0, kin.degree.to(sim_RC.dtype)) if graded else kin.degree & ~out_RC
    )
    kin_RC = degree_RC > 0 if graded else degree_RC
    removed_RC: Tensor | None = None  # (R, C) bool, or the share removed
    if policy.action == "eliminate":
        removed_RC = kin_RC
    elif policy.action == "reweight":
        whole = graded or policy.kin_weight == 0
        removed_RC = degree_RC if whole else degree_RC.to(sim_RC.dtype) * (1 - policy.kin_weight)
    elif not policy.attracted_stay:
        removed_RC = degree_RC
    if removed_RC is None:
        return Weighed(torch.where(out_RC, OUT, zero), degree_RC.to(sim_RC.dtype), kin_RC)
    gone_RC = removed_RC > near_one if removed_RC.is_floating_point() else removed_RC
    spared_RC = spare(sim_RC, out_RC, gone_RC, policy.min_negatives)
    kin_RC = kin_RC & ~spared_RC
    y_RC = (
        torch.where(spared_RC, 0.0, degree_RC.to(sim_RC.dtype))
        if policy.action == "attract"
        else None
    )
    if not removed_RC.is_floating_point():
        return Weighed(torch.where(out_RC | (removed_RC & ~spared_RC), OUT, zero), y_RC, kin_RC)
    left_RC = torch.log1p(-torch.where(spared_RC, 0.0, removed_RC)).clamp(min=OUT)
    return Weighed(torch.where(out_RC, OUT, left_RC), y_RC, kin_RC)


def spare(sim_RC: Tensor, out_RC: Tensor, gone_RC: Tensor, min_negatives: int) -> Tensor:
    """(R, C) bool: kin that stay negatives, because their row would have fewer than
    `min_negatives`.

    They are the least similar ones. Ties, up to rounding, are treated alike, so that the order of
    the candidates does not matter."""
    number = min(min_negatives, sim_RC.shape[1])
    if number == 0:
        return torch.zeros_like(gone_RC)
    gone_sim_RC = torch.where(gone_RC, sim_RC, torch.inf)
    missing_R1 = number - (~(out_RC | gone_RC)).sum(1, keepdim=True, dtype=torch.int32)
    if number == 1:
        cut_R1 = gone_sim_RC.amin(1, keepdim=True)
    else:
        least_RK = gone_sim_RC.topk(number, 1, largest=False).values
        cut_R1 = least_RK.gather(1, (missing_R1 - 1).clamp(0, number - 1).long())
    cut_R1 = torch.where(missing_R1 > 0, cut_R1 + 8 * torch.finfo(sim_RC.dtype).eps, OUT)
    return gone_RC & (sim_RC <= cut_R1)
