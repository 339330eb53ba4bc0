"""What is done about kin: eliminate (out of the denominator), attract (also a positive), reweight (a factor in the denominator).

Kin are few among the candidates, so they are handled as a list of places, not as a matrix: finding the places costs one pass over the
mask, and everything after it is proportional to their number.

Dimension key: R rows of a block, C candidates, M places of kin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.pairs import Block, Places, Roles

Action = Literal["eliminate", "attract", "reweight"]
ACTIONS: tuple[Action, ...] = get_args(Action)
_LEFT_OUT = 1e30


@dataclass(frozen=True)
class Policy:
    """What is done about kin.

    `min_negatives` of each anchor (the least similar ones) are kept however many are kin, so that no row loses them all. What a detector
    drops for another reason is its own affair.
    `attracted_stay`: whether attracted kin stay in the denominator (InfoNCE, SupCon) or leave it (SogCLR).
    `pools_kin`: whether attracted kin are summed inside the logarithm (Local Aggregation), so that each one's logit is wanted.
    """

    action: Action
    kin_weight: float
    min_negatives: int
    attracted_stay: bool
    pools_kin: bool = False

    @property
    def removes_kin(self) -> bool:
        return self.action == "eliminate" or (self.action == "attract" and not self.attracted_stay)


@dataclass(frozen=True)
class Settled:
    """The roles of one block after the rules that hold for every detector: nobody is its own kin, no row loses all
    its negatives to kin, nobody is both kin and dropped."""

    kin: Places | None
    flagged_R: Tensor
    weight_R: Tensor
    kin_sum_R: Tensor
    kin_logit_M: Tensor | None = None


def settle(
    block: Block, roles: Roles, own: Places, policy: Policy, sim_RC: Tensor, temperature: float | Tensor, judged: bool = False
) -> Settled:
    """Applies the action to `sim_RC` in place: −inf for a negative that is left out, s + t·log w for one of weight w.

    `temperature`: t, or (R,) of each row. `judged`: whether the places of kin are wanted in any case, to be compared with labels."""
    removes = policy.removes_kin or (policy.action == "reweight" and policy.kin_weight == 0 and roles.degree_RC is None)
    plain = roles.kin is None and roles.kin_RC is None and roles.drop is None and roles.drop_RC is None
    if plain and roles.leveled and not judged and (roles.kin_above_R is None or (removes and policy.action != "attract")):
        return _by_levels(block, roles, policy, sim_RC, temperature)
    if roles.kin_above_R is not None:
        roles = replace(roles, kin_RC=sim_RC > roles.kin_above_R.to(sim_RC.dtype).unsqueeze(1))
    weight_R = (block.num_negatives_R - _dropped(block, roles, own, sim_RC)).to(sim_RC.dtype)
    none_R = torch.zeros_like(weight_R)
    kin = roles.kin if roles.kin_RC is None else _places(roles.kin_RC, own)
    if kin is None:
        return Settled(None, none_R, weight_R, none_R)
    if roles.drops:
        left_M = sim_RC[kin] > -torch.inf
        kin = kin[0][left_M], kin[1][left_M]
    if removes:
        kin = _sparing(kin, sim_RC, weight_R, policy.min_negatives)
    flagged_R = torch.bincount(kin[0], minlength=len(sim_RC)).to(sim_RC.dtype)
    kin_sim_M = sim_RC[kin] if policy.action == "attract" else None
    kin_sum_R = none_R if kin_sim_M is None else none_R.index_add(0, kin[0], kin_sim_M)
    if removes:
        sim_RC[kin] = -torch.inf
        weight_R = weight_R - flagged_R
    elif policy.action == "reweight":
        factor_M = (
            torch.full_like(kin[0], policy.kin_weight, dtype=sim_RC.dtype)
            if roles.degree_RC is None
            else 1 - roles.degree_RC[kin].to(sim_RC.dtype)
        )
        sim_RC[kin] += _of(temperature, kin) * factor_M.log()
        weight_R = (weight_R - flagged_R).index_add(0, kin[0], factor_M)  # not n + Σ(w − 1), which cancels
    pooled_M = kin_sim_M / _of(temperature, kin) if policy.pools_kin and kin_sim_M is not None else None
    return Settled(kin, flagged_R, weight_R, kin_sum_R, pooled_M)


def _of(temperature: float | Tensor, places: Places) -> float | Tensor:
    """The temperature, or (M,) that of each place's row."""
    return temperature[places[0]] if isinstance(temperature, Tensor) else temperature


def _by_levels(block: Block, roles: Roles, policy: Policy, sim_RC: Tensor, temperature: float | Tensor) -> Settled:
    """Kin above one level and dropped below another, both left out, without looking for their places.

    Masks are numbers, not bools, and a few rows are done at a time, so that they stay in the cache: a fifth of the time. What is left out
    becomes so small, not −inf, that its share is 0."""
    num_negatives_R = block.num_negatives_R.to(sim_RC.dtype)
    none_R = torch.full_like(num_negatives_R, torch.inf)
    high_R1 = (none_R if roles.kin_above_R is None else roles.kin_above_R.to(sim_RC.dtype)).unsqueeze(1)
    low_R1 = (-none_R if roles.drop_below_R is None else roles.drop_below_R.to(sim_RC.dtype)).unsqueeze(1)
    own_R = (sim_RC.shape[1] - num_negatives_R) * (low_R1.squeeze(1) > -torch.inf)  # are below any other level
    flagged_R, kept_R, short_R = torch.zeros_like(none_R), num_negatives_R.clone(), torch.zeros_like(none_R, dtype=torch.bool)
    for rows, (far_RC, close_RC) in block.parts(2):
        masks = []
        if roles.drop_below_R is not None:
            masks.append(torch.lt(sim_RC[rows], low_R1[rows], out=far_RC))
            kept_R[rows] -= far_RC.sum(1) - own_R[rows]
        if roles.kin_above_R is not None:
            masks.append(torch.gt(sim_RC[rows], high_R1[rows], out=close_RC))
            flagged_R[rows] = close_RC.sum(1)
            kept_R[rows] -= flagged_R[rows]
        short_R[rows] = (kept_R[rows] < policy.min_negatives) & (num_negatives_R[rows] > kept_R[rows])
        if short_R[rows].any():
            for mask_RC in masks:
                mask_RC[short_R[rows]] = 0.0
        for mask_RC in masks:
            sim_RC[rows].sub_(mask_RC, alpha=_LEFT_OUT)
    if short_R.any():  # rare
        part = Block(sim_RC[short_R], block.ids[:0], block.candidate_ids, 1, block.num_negatives_R[short_R])
        levels = Roles(kin_above_R=high_R1[short_R, 0], drop_below_R=low_R1[short_R, 0])
        part_t = temperature[short_R] if isinstance(temperature, Tensor) else temperature
        mended = settle(part, levels, (block.ids[:0], block.ids[:0]), policy, part.sim_RC, part_t, judged=True)
        sim_RC[short_R], flagged_R[short_R], kept_R[short_R] = part.sim_RC, mended.flagged_R, mended.weight_R
    return Settled(None, flagged_R, kept_R, torch.zeros_like(kept_R))


def _dropped(block: Block, roles: Roles, own: Places, sim_RC: Tensor) -> Tensor:
    """Takes what is dropped out of `sim_RC`; (R,) how many of each row's negatives that are."""
    dropped_R = torch.zeros_like(block.num_negatives_R)
    if roles.drop_below_R is not None:
        dropped_R = _drop_below(block, roles.drop_below_R, sim_RC)
    if roles.drop is not None:
        left_M = sim_RC[roles.drop] > -torch.inf
        dropped_R = dropped_R + torch.bincount(roles.drop[0][left_M], minlength=len(sim_RC))
        sim_RC[roles.drop] = -torch.inf
    if roles.drop_RC is not None:
        roles.drop_RC[own] = False
        if roles.drop_below_R is not None or roles.drop is not None:
            roles.drop_RC.logical_and_(sim_RC > -torch.inf)
        sim_RC.masked_fill_(roles.drop_RC, -torch.inf)
        dropped_R = dropped_R + roles.drop_RC.sum(1, dtype=torch.int32)  # the sum in int64 is thirty times slower
    return dropped_R


def _drop_below(block: Block, level_R: Tensor, sim_RC: Tensor) -> Tensor:
    """(R,) how many negatives lie below the level and are taken out."""
    kept_RC = torch.ge(sim_RC, level_R.to(sim_RC.dtype).unsqueeze(1), out=torch.empty_like(sim_RC))
    kept_R = torch.minimum(kept_RC.sum(1).long(), block.num_negatives_R)  # a level of −inf keeps the own ones too
    bare_R = (kept_R == 0) & (block.num_negatives_R > 0)
    if bare_R.any():
        kept_RC[bare_R] = (sim_RC[bare_R] >= sim_RC[bare_R].amax(1, keepdim=True)).to(sim_RC.dtype)
        kept_R[bare_R] = kept_RC[bare_R].sum(1).long()
    torch.minimum(sim_RC, torch.threshold_(kept_RC, 0.5, -torch.inf), out=sim_RC)
    return block.num_negatives_R - kept_R


def _places(kin_RC: Tensor, own: Places) -> Places:
    kin_RC[own] = False
    row_M, col_M = kin_RC.nonzero(as_tuple=True)
    return row_M, col_M


def _sparing(kin: Places, sim_RC: Tensor, available_R: Tensor, min_negatives: int) -> Places:
    """`kin` less the least similar ones of rows that would be left with fewer than `min_negatives`.

    Rare, so rows are looked at one by one."""
    kept_R = available_R - torch.bincount(kin[0], minlength=len(sim_RC))
    short_R = (kept_R < min_negatives) & (kept_R < available_R)
    if not short_R.any():
        return kin
    spared_M = torch.zeros_like(kin[0], dtype=torch.bool)
    for row in short_R.nonzero().flatten().tolist():
        places = (kin[0] == row).nonzero().flatten()
        number = min(min_negatives - int(kept_R[row]), len(places))
        spared_M[places[sim_RC[row, kin[1][places]].topk(number, largest=False).indices]] = True
    return kin[0][~spared_M], kin[1][~spared_M]
