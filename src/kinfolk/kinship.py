"""What a detector answers for a block of similarities, and what becomes of it: weights in the denominator, targets in the numerator.

    lse_i = log Σ_j w_ij exp(s_ij / t),     pull_i = Σ_j y_ij s_ij

w_ij is 1 for a negative; for kin it is 0 with `eliminate`, 1 − degree with `reweight`. y_ij is the degree of kin with `attract`, else 0.
All functions are pure and have no shapes or branches that depend on values, so that `torch.compile` fuses them with the softmax.

Dimension key: R rows of a block, C candidates, L levels of keys, K ids listed for a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.actions import Policy

LEFT_OUT = -1e30
"""The similarity of what is left out: its share in a softmax is 0, and a row of nothing else stays finite, where −inf would give NaN."""


@dataclass(frozen=True)
class Interval:
    """The candidates more similar than `lower_R` and less similar than `upper_R`, (R,) each. None: no such bound."""

    lower_R: Tensor | None = None
    upper_R: Tensor | None = None

    def mask(self, sim_RC: Tensor) -> Tensor:
        bounds = [] if self.lower_R is None else [sim_RC > self.lower_R.to(sim_RC.dtype).unsqueeze(1)]
        bounds += [] if self.upper_R is None else [sim_RC < self.upper_R.to(sim_RC.dtype).unsqueeze(1)]
        return bounds[0] if len(bounds) == 1 else bounds[0] & bounds[1]

    @property
    def graded(self) -> bool:
        return False

    def degree(self, sim_RC: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Keys:
    """The candidates that share a key with the anchor.

    Args:
        key_LR, key_LC: of rows and candidates at L levels; a key below 0 is shared with nothing.
        level: the one that decides; None: keys that agree at any of them.
        graded: whether the degree of kinship is the share of the levels at which keys agree; otherwise kin are kin.
        apart: turns it around: the candidates that share no key with the anchor, none where it would be all of them.
    """

    key_LR: Tensor
    key_LC: Tensor
    level: int | None = None
    graded: bool = False
    apart: bool = False

    def mask(self, sim_RC: Tensor) -> Tensor:
        if self.level is None:
            same_RC = self._same(0)
            for level in range(1, len(self.key_LR)):
                same_RC = same_RC | self._same(level)
        else:
            same_RC = self._same(self.level)
        if not self.apart:
            return same_RC
        same_RC = same_RC & (sim_RC > -torch.inf)
        return ~(same_RC | ~same_RC.any(1, keepdim=True))

    def degree(self, sim_RC: Tensor) -> Tensor | None:
        if not self.graded:
            return None
        agree_RC = sum((self._same(level).to(sim_RC.dtype) for level in range(len(self.key_LR))), torch.zeros_like(sim_RC))
        return agree_RC / len(self.key_LR)

    def _same(self, level: int) -> Tensor:
        key_R, key_C = self.key_LR[level], self.key_LC[level]
        return key_R.unsqueeze(1) == torch.where(key_C >= 0, key_C, torch.iinfo(key_C.dtype).min)


@dataclass(frozen=True)
class Places:
    """The candidates whose sample each row lists: (R, K) ids, below 0 for none, and the candidates' (C,) ids.

    Places in the matrix would be as many as there are matches, a number that only the device knows. Instead the ids are ranked among the
    candidates' and marked there, and each candidate looks at its own mark."""

    ids_RK: Tensor
    ids_C: Tensor

    def mask(self, sim_RC: Tensor) -> Tensor:
        sorted_C, order_C = self.ids_C.sort()
        rank_C = torch.empty_like(order_C).scatter_(0, order_C, torch.searchsorted(sorted_C, sorted_C))
        rank_RK = torch.searchsorted(sorted_C, self.ids_RK).clamp(max=len(sorted_C) - 1)
        there_RK = (sorted_C[rank_RK] == self.ids_RK) & (self.ids_RK >= 0)
        marked_RC = torch.zeros(len(sim_RC), len(sorted_C) + 1, dtype=torch.bool, device=sim_RC.device)
        marked_RC.scatter_(1, torch.where(there_RK, rank_RK, len(sorted_C)), True)
        return marked_RC[:, rank_C]

    @property
    def graded(self) -> bool:
        return False

    def degree(self, sim_RC: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Mask:
    """The candidates where `where_RC` is True, with degrees (R, C) where they are known: for what no interval, key or list tells, such as
    a random draw."""

    where_RC: Tensor
    degree_RC: Tensor | None = None

    def mask(self, sim_RC: Tensor) -> Tensor:
        return self.where_RC

    @property
    def graded(self) -> bool:
        return self.degree_RC is not None

    def degree(self, sim_RC: Tensor) -> Tensor | None:
        return None if self.degree_RC is None else self.degree_RC.to(sim_RC.dtype)


Form = Interval | Keys | Places | Mask


@dataclass(frozen=True)
class Roles:
    """What a detector answers for one block. Neither may name what is the anchor's own; it is never counted.

    Args:
        kin: the candidates that are false negatives of the anchor. None: nothing is.
        drop: the candidates that are left out although they are not kin (too easy, not drawn); what is both is dropped. Where an interval
            would drop all negatives of a row, the most similar stays. None: nothing is.
    """

    kin: Form | None = None
    drop: Form | None = None


@dataclass(frozen=True)
class Weighed:
    """A block after selection, action and softmax.

    Args:
        share_RC: p_ij = w_ij exp(s_ij / t − lse_i).
        lse_R: log Σ_j w_ij exp(s_ij / t); −inf without any negative.
        weight_R: Σ_j w_ij.
        flagged_R: how many candidates are kin; whole numbers.
        kin_RC: which they are; None: none can be.
        target_RC, mass_R, pull_R, kin_lse_R: with `attract`: y_ij, and over the kin Σ y, Σ y s and log Σ y exp(s / t); None without.
        cut_R: kin no more similar than this were kept, so that the row is not short of negatives; −inf where it is not.
    """

    share_RC: Tensor
    lse_R: Tensor
    weight_R: Tensor
    flagged_R: Tensor
    kin_RC: Tensor | None = None
    target_RC: Tensor | None = None
    mass_R: Tensor | None = None
    pull_R: Tensor | None = None
    kin_lse_R: Tensor | None = None
    cut_R: Tensor | None = None


def weigh(
    sim_RC: Tensor, own_RC: Tensor, negatives_R: Tensor, roles: Roles, policy: Policy, temperature: float | Tensor, judged: bool = False
) -> Weighed:
    """Similarities → selection → weights and targets → softmax. Overwrites `sim_RC`.

    Args:
        sim_RC: similarities, −inf at the anchor's own.
        own_RC: True at these.
        negatives_R: (R,) how many others there are.
        temperature: t, also without dimensions, or (R,) of each row.
        judged: whether `kin_RC` is wanted.
    """
    t = temperature.unsqueeze(1) if isinstance(temperature, Tensor) and temperature.ndim else temperature
    kin_RC, drop_RC = select(sim_RC, own_RC, roles)
    left_out_RC = own_RC if drop_RC is None else own_RC | drop_RC
    available_R = negatives_R if drop_RC is None else _number(~left_out_RC)
    if kin_RC is None:
        share_RC, lse_R = shares(sim_RC.masked_fill_(left_out_RC, LEFT_OUT).div_(t), available_R)
        weight_R = available_R.to(sim_RC.dtype)
        return Weighed(share_RC, lse_R, weight_R, torch.zeros_like(weight_R))
    removes = policy.removes(roles.kin is not None and roles.kin.graded)
    degree_RC = None if roles.kin is None or policy.action == "eliminate" else roles.kin.degree(sim_RC)
    flagged_R, cut_R = _number(kin_RC), None
    if removes:
        kin_RC, flagged_R, cut_R = spare(sim_RC, kin_RC, flagged_R, available_R, policy.min_negatives)
        left_out_RC = left_out_RC | kin_RC
    flagged_R = flagged_R.to(sim_RC.dtype)
    target_RC = mass_R = pull_R = kin_lse_R = None
    if policy.action == "attract":
        target_RC = kin_RC.to(sim_RC.dtype) if degree_RC is None else torch.where(kin_RC, degree_RC, 0.0)
        mass_R = flagged_R if degree_RC is None else target_RC.sum(1)
        pull_R = torch.where(kin_RC, sim_RC * target_RC, 0.0).sum(1)
        if policy.pools_kin:
            pooled_RC = torch.where(kin_RC, sim_RC / t + target_RC.log(), LEFT_OUT)
            share_RC, kin_lse_R = shares(pooled_RC, flagged_R)
            target_RC = share_RC * (flagged_R > 0).unsqueeze(1)
    weight_R = available_R.to(sim_RC.dtype)
    logit_RC = sim_RC.masked_fill_(left_out_RC, LEFT_OUT).div_(t)
    if removes:
        weight_R = weight_R - flagged_R
    elif policy.action == "reweight":
        factor_RC = policy.kin_weight if degree_RC is None else 1 - degree_RC
        kept_R = (kin_RC.to(sim_RC.dtype) * factor_RC).sum(1)
        logit_RC += torch.where(kin_RC, torch.as_tensor(factor_RC, dtype=sim_RC.dtype, device=sim_RC.device).log().clamp(min=LEFT_OUT), 0.0)
        weight_R = (weight_R - flagged_R) + kept_R  # not n + Σ(w − 1), which cancels
    share_RC, lse_R = shares(logit_RC, weight_R)
    return Weighed(share_RC, lse_R, weight_R, flagged_R, kin_RC if judged else None, target_RC, mass_R, pull_R, kin_lse_R, cut_R)


def select(sim_RC: Tensor, own_RC: Tensor, roles: Roles) -> tuple[Tensor | None, Tensor | None]:
    """(R, C), (R, C) True at kin and at what is dropped; nothing is both, and nothing of either is the anchor's own. None: nothing is."""
    kin_RC = drop_RC = None
    if roles.drop is not None:
        drop = roles.drop
        if isinstance(drop, Interval) and drop.upper_R is not None:  # the most similar stays
            drop = Interval(drop.lower_R, torch.minimum(drop.upper_R.to(sim_RC.dtype), sim_RC.amax(1)))
        drop_RC = drop.mask(sim_RC) & ~own_RC
    if roles.kin is not None:
        out_RC = own_RC if drop_RC is None else own_RC | drop_RC
        kin_RC = roles.kin.mask(sim_RC) & ~out_RC
    return kin_RC, drop_RC


def spare(
    sim_RC: Tensor, kin_RC: Tensor, flagged_R: Tensor, available_R: Tensor, min_negatives: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Kin less the least similar ones of rows that would be left with fewer than `min_negatives`, how many remain, and the similarity up
    to which they were spared; of equals at that similarity, all are."""
    lacking_R = (min_negatives - (available_R - flagged_R)).clamp(max=min_negatives)
    lacking_R = torch.minimum(lacking_R, flagged_R)
    if not min_negatives or (sim_RC.device.type == "cpu" and not torch.compiler.is_compiling() and not bool((lacking_R > 0).any())):
        return kin_RC, flagged_R, None  # on a CPU looking costs nothing, and saves two passes
    kin_sim_RC = torch.where(kin_RC, sim_RC, torch.inf)
    number = min(min_negatives, sim_RC.shape[1])
    if number == 1:
        cut_R = kin_sim_RC.amin(1)
    else:
        least_RK = kin_sim_RC.topk(number, dim=1, largest=False).values
        cut_R = least_RK.gather(1, (lacking_R.long() - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    cut_R = torch.where(lacking_R > 0, cut_R, -torch.inf)
    kin_RC = kin_RC & (sim_RC > cut_R.unsqueeze(1))
    return kin_RC, _number(kin_RC), cut_R


def shares(logit_RC: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of each row, and its log-sum-exp: the largest logit less the logarithm of its share, which is at least 1 / C.

    In eager mode this is a third of the time of `logsumexp` and an exponential. A row whose weight is 0 has equal shares, to be multiplied
    by a derivative of 0, and −inf."""
    share_RC = torch.softmax(logit_RC, 1)
    lse_R = logit_RC.amax(1) - share_RC.amax(1).log()
    return share_RC, torch.where(weight_R > 0, lse_R, -torch.inf)


def _number(mask_RC: Tensor) -> Tensor:
    """(R,) how many are True; in int64, the default, the sum takes four times as long."""
    return mask_RC.sum(1, dtype=torch.int32)
