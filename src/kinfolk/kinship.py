"""What a detector answers for a block of similarities, and what becomes of it: weights in the denominator, targets in the numerator.

    lse_i = log Σ_j w_ij exp(s_ij / t),     pull_i = Σ_j y_ij s_ij

w_ij is 1 for a negative; for kin it is 0 with `eliminate`, 1 − degree with `reweight`. y_ij is the degree of kin with `attract`, else 0.
No shape or branch depends on values, so that `torch.compile` fuses the functions; on a CPU the softmax follows outside of the graph, and
the host may look at values. The similarities of a block are overwritten. Masks are numbers, 1 and 0, as weights are: without a compiler, a
CPU sums and multiplies numbers several times faster than it handles bools.

Dimension key: R rows of a block, C candidates, L levels of keys, K ids listed for a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.compiling import compiled
from kinfolk.pairs import LEFT_OUT, Policy

EMPTY = LEFT_OUT / 1e10
"""A log-sum-exp below this is that of a row without any negative."""
_CACHED = 1 << 19
"""Entries that `parts` takes at a time: 2 MB, which stay in the cache of a core while a few passes go over them."""


@dataclass(frozen=True)
class Interval:
    """The candidates more similar than `lower_R` and less similar than `upper_R`. None: no such bound.

    A bound is (R,), or (b,) for b samples whose rows follow one another.

    `degrees_from`: given where `lower_R` is the similarity of the last kin itself. Degrees (`Graded`) then begin at the highest similarity
    below it, at least at this number. None: they begin at `lower_R`.
    `gradable`: False where no degrees are to be made of it."""

    lower_R: Tensor | None = None
    upper_R: Tensor | None = None
    degrees_from: float | None = None
    gradable: bool = True
    graded = False

    def of_rows(self, rows: slice, number: int) -> Interval:
        """The bounds of some of `number` rows, expanded from samples if needed."""
        lower_R, upper_R = (None if bound is None else _of_rows(bound, number)[rows] for bound in (self.lower_R, self.upper_R))
        return replace(self, lower_R=lower_R, upper_R=upper_R)

    def mask(self, sim_RC: Tensor) -> Tensor:
        above_RC = None if self.lower_R is None else above(sim_RC, self.lower_R.clamp(min=-2))  # never what is the anchor's own
        if self.upper_R is None:
            assert above_RC is not None, "an interval has a bound"
            return above_RC
        upper_R1 = self.upper_R.to(sim_RC.dtype).unsqueeze(1)
        below_RC = greater(upper_R1, sim_RC.reshape(len(upper_R1), -1)).view_as(sim_RC)
        return below_RC if above_RC is None else above_RC * below_RC

    def degree(self, sim_RC: Tensor) -> Tensor:
        raise NotImplementedError("it has no degrees")


@dataclass(frozen=True)
class Confidence:
    """How sure the keys of one level are, looked up only where degrees are computed.

    Args:
        value_N: of every sample of the data set, at least 0.
        highest: the value that counts as 1, without dimensions.
        ids_R, ids_C: the samples of rows and candidates.
    """

    value_N: Tensor
    highest: Tensor
    ids_R: Tensor
    ids_C: Tensor

    def of_pairs(self, dtype: torch.dtype) -> Tensor:
        """(R, C) the lower confidence of anchor and candidate, in [0, 1]."""
        row_R, column_C = ((self.value_N[ids] / self.highest).clamp(0, 1).to(dtype) for ids in (self.ids_R, self.ids_C))
        return torch.minimum(row_R.unsqueeze(1), column_C)


@dataclass(frozen=True)
class Keys:
    """The candidates that share a key with the anchor.

    Args:
        key_LR, key_LC: of rows and candidates at L levels; a key below 0 is shared with nothing.
        level: the one that decides; None: keys that agree at any of them.
        graded: whether the degree of kinship is the share of the levels at which keys agree; otherwise kin are kin.
        apart: turns it around: the candidates that share no key with the anchor, none where it would be all of them.
        confidence: of the keys of each level. A level that agrees then counts by the lower confidence of the two, instead of 1.
    """

    key_LR: Tensor
    key_LC: Tensor
    level: int | None = None
    graded: bool = False
    apart: bool = False
    confidence: tuple[Confidence, ...] = ()

    def mask(self, sim_RC: Tensor) -> Tensor:
        levels = range(len(self.key_LR)) if self.level is None else [self.level]
        same_RC = self._same(levels[0])
        for level in levels[1:]:
            same_RC = same_RC | self._same(level)
        same_RC = same_RC.to(sim_RC.dtype)
        if not self.apart:
            return same_RC
        alone_R1 = (same_RC * others(sim_RC)).sum(1, keepdim=True) == 0
        return (1 - same_RC).masked_fill(alone_R1, 0.0)

    def degree(self, sim_RC: Tensor) -> Tensor:
        agree_RC = self._agreement(0, sim_RC.dtype)
        for level in range(1, len(self.key_LR)):
            agree_RC = agree_RC + self._agreement(level, sim_RC.dtype)
        return agree_RC / len(self.key_LR)

    def _agreement(self, level: int, dtype: torch.dtype) -> Tensor:
        same_RC = self._same(level).to(dtype)
        return same_RC * self.confidence[level].of_pairs(dtype) if self.confidence else same_RC

    def _same(self, level: int) -> Tensor:
        key_R, key_C = self.key_LR[level], self.key_LC[level]
        return key_R.unsqueeze(1) == torch.where(key_C >= 0, key_C, torch.iinfo(key_C.dtype).min)


@dataclass(frozen=True)
class Places:
    """The candidates whose sample each row lists: (R, K) ids, below 0 for none, and the candidates' (C,) ids.

    Places in the matrix would be as many as there are matches, a number that only the device knows. Instead the ids are ranked among the
    candidates' and marked there, and each candidate looks at its own mark.

    `degree_P` and `place_RK`: degrees of all listed pairs, and where those of each row are; used where it is `graded`."""

    ids_RK: Tensor
    ids_C: Tensor
    degree_P: Tensor | None = None
    place_RK: Tensor | None = None
    graded: bool = False

    def mask(self, sim_RC: Tensor) -> Tensor:
        return self._marked(sim_RC, 1.0)

    def degree(self, sim_RC: Tensor) -> Tensor:
        assert self.degree_P is not None, "it has no degrees"
        assert self.place_RK is not None
        return self._marked(sim_RC, self.degree_P[self.place_RK].to(sim_RC.dtype))

    def _marked(self, sim_RC: Tensor, value: Tensor | float) -> Tensor:
        """(R, C) the value, one for all or (R, K), of each listed candidate, 0 elsewhere."""
        sorted_C, order_C = self.ids_C.sort()
        rank_C = torch.empty_like(order_C).scatter_(0, order_C, torch.searchsorted(sorted_C, sorted_C))
        rank_RK = torch.searchsorted(sorted_C, self.ids_RK).clamp(max=len(sorted_C) - 1)
        there_RK = (sorted_C[rank_RK] == self.ids_RK) & (self.ids_RK >= 0)
        marked_RC = sim_RC.new_zeros(len(sim_RC), len(sorted_C) + 1)
        marked_RC.scatter_(1, torch.where(there_RK, rank_RK, len(sorted_C)), value)
        return marked_RC[:, rank_C]


@dataclass(frozen=True)
class Mask:
    """The candidates where `where_RC` is True or 1, with degrees (R, C) where they are known: for what no interval, key or list tells,
    such as a random draw."""

    where_RC: Tensor
    degree_RC: Tensor | None = None

    @property
    def graded(self) -> bool:
        return self.degree_RC is not None

    def mask(self, sim_RC: Tensor) -> Tensor:
        return self.where_RC.to(sim_RC.dtype)

    def degree(self, sim_RC: Tensor) -> Tensor:
        assert self.degree_RC is not None, "it has no degrees"
        return self.degree_RC.to(sim_RC.dtype)


Form = Interval | Keys | Places | Mask


@dataclass(frozen=True)
class Roles:
    """What a detector answers for one block. What is the anchor's own is neither, whatever they say.

    Args:
        kin: the candidates that are false negatives of the anchor. None: nothing is.
        drop: the candidates that are left out although they are not kin (too easy, not drawn); what is both is dropped. Where an interval
            would drop all negatives of a row, the most similar stays. None: nothing is.
    """

    kin: Form | None = None
    drop: Form | None = None


@dataclass(frozen=True)
class Weights:
    """What else there is to know of w_ij and y_ij: sums over a row, and matrices where they are needed.

    Args:
        flagged_R: how many candidates are kin; None: none can be.
        weight_R: Σ_j w_ij, where the number of negatives was given.
        kin_RC: which candidates are kin, where asked for; None: none can be.
        target_RC, mass_R, pull_R, kin_lse_R: with `attract`: y_ij, and over the kin Σ y, Σ y s and, where they are pooled inside the
            logarithm, log Σ y exp(s / t), whose shares are then the targets; None without.
        cut_R: candidates up to this similarity are negatives, so that the row is not short of them. None: no row would be.
    """

    flagged_R: Tensor | None = None
    weight_R: Tensor | None = None
    kin_RC: Tensor | None = None
    target_RC: Tensor | None = None
    mass_R: Tensor | None = None
    pull_R: Tensor | None = None
    kin_lse_R: Tensor | None = None
    cut_R: Tensor | None = None


class Logits(NamedTuple):
    """s_ij + t log w_ij, and s_ij / t where negatives weigh more the more similar they are, else None."""

    logit_RC: Tensor
    scaled_RC: Tensor | None


class Softmax(NamedTuple):
    """p_ij = w_ij exp(s_ij / t − lse_i) up to a factor of each row, that factor, and lse_i, below `EMPTY` without any negative.

    It is cheaper to multiply numbers of the row by the factor than the matrix. None: the rows already sum to 1."""

    share_RC: Tensor
    norm_R: Tensor | None
    lse_R: Tensor


def weigh(
    sim_RC: Tensor,
    negatives_b: Tensor | None,
    roles: Roles,
    policy: Policy,
    temperature: float | Tensor,
    judged: bool = False,
    weighted: bool = True,
    compiles: bool = False,
) -> tuple[Softmax, Weights]:
    """Similarities → selection → weights and targets → softmax. May overwrite `sim_RC`.

    Args:
        sim_RC: similarities, `LEFT_OUT` at the anchor's own.
        negatives_b: how many others each row has, (R,) or (b,); needed where there are kin, or where `weight_R` is wanted.
        temperature: t, also without dimensions, or (R,) of each row.
        judged: whether `kin_RC` is wanted.
        weighted: whether `weight_R` is wanted.
        compiles: whether it goes through `torch.compile`.
    """
    on_cpu, t = sim_RC.device.type == "cpu", temperature
    if isinstance(t, Tensor):
        t = t.unsqueeze(1) if t.ndim else float(t) if on_cpu else t
    if not on_cpu or policy.hardness:
        return compiled(_weighed, compiles)(sim_RC, negatives_b, roles, policy, t, judged, weighted)
    forms = [form for form in (roles.kin, roles.drop) if form is not None]
    of_rows = not (judged or isinstance(t, Tensor)) and policy.action != "attract"  # no matrix beside the logits
    by_parts = forms and all(isinstance(form, Interval) for form in forms) and of_rows and not compiles
    if by_parts and sim_RC.numel() > _CACHED:
        logits, weights = _in_parts(sim_RC, negatives_b, roles, policy, t, weighted)
    else:
        logits, weights = compiled(_weights, compiles)(sim_RC, negatives_b, roles, policy, t, judged, weighted)
    return exponentials(logits.logit_RC, t), weights


def _weighed(
    sim_RC: Tensor, negatives_b: Tensor | None, roles: Roles, policy: Policy, t: float | Tensor, judged: bool, weighted: bool
) -> tuple[Softmax, Weights]:
    """`weigh` as one function to compile. `t`: a number, or (), or (R, 1)."""
    logits, weights = _weights(sim_RC, negatives_b, roles, policy, t, judged, weighted)
    return hardened(logits, t, weights.weight_R, policy.hardness), weights


def _weights(
    sim_RC: Tensor, negatives_b: Tensor | None, roles: Roles, policy: Policy, t: float | Tensor, judged: bool, weighted: bool
) -> tuple[Logits, Weights]:
    """`weigh` without the softmax."""
    kin_RC, degree_RC, flagged_R, weight_R, cut_R = _chosen(sim_RC, negatives_b, roles, policy, weighted)
    scaled_RC = sim_RC / t if policy.hardness else None
    if kin_RC is None or flagged_R is None:
        return Logits(sim_RC, scaled_RC), Weights(weight_R=weight_R)
    target_RC = mass_R = pull_R = kin_lse_R = None
    if policy.action == "attract":
        target_RC = kin_RC if degree_RC is None else kin_RC * degree_RC
        mass_R = flagged_R if degree_RC is None else target_RC.sum(1)
        pull_R = (sim_RC * target_RC).sum(1)
        if policy.pools_kin:
            share_RC, _, kin_lse_R = shares(torch.where(target_RC > 0, sim_RC / t + target_RC.log(), LEFT_OUT))
            target_RC = share_RC * (mass_R > 0).unsqueeze(1)
    kept_R = None if weight_R is None else weight_R - flagged_R
    if policy.removes(degree_RC is not None):
        weight_R, logit_RC = kept_R, sim_RC.add_(kin_RC, alpha=LEFT_OUT)
    elif policy.action == "attract" and policy.attracted_stay:
        logit_RC = sim_RC
    elif degree_RC is not None:
        factor_RC = 1 - degree_RC
        weight_R = None if kept_R is None else kept_R + (kin_RC * factor_RC).sum(1)  # not n + Σ(w − 1), which cancels
        logit_RC = sim_RC.add_(kin_RC * (t * factor_RC.log().clamp(min=LEFT_OUT)))
    else:
        weight_R = None if kept_R is None else kept_R + flagged_R * policy.kin_weight
        logit_RC = sim_RC.add_(kin_RC * (t * math.log(policy.kin_weight)))
    return Logits(logit_RC, scaled_RC), Weights(
        flagged_R, weight_R, kin_RC if judged else None, target_RC, mass_R, pull_R, kin_lse_R, cut_R
    )


class _Chosen(NamedTuple):
    """Kin, their degrees and their number; how many candidates are neither the anchor's own nor dropped; and `Weights.cut_R`. None: nothing
    is kin, or it was not asked for."""

    kin_RC: Tensor | None
    degree_RC: Tensor | None
    flagged_R: Tensor | None
    weight_R: Tensor | None
    cut_R: Tensor | None


def _chosen(sim_RC: Tensor, negatives_b: Tensor | None, roles: Roles, policy: Policy, weighted: bool) -> _Chosen:
    """Who is kin, after what is dropped and what is spared. What is dropped is left out of `sim_RC`."""
    kin = roles.kin
    removes = kin is not None and policy.removes(kin.graded)
    by_level = removes and roles.drop is None and isinstance(kin, Interval) and kin.upper_R is None and not looks(sim_RC)
    short = not by_level and kin is not None and (removes or policy.removes_by_degrees(kin.graded))
    weight_R = _of_rows(negatives_b.to(sim_RC.dtype), len(sim_RC)) if negatives_b is not None and (weighted or short) else None
    if roles.drop is not None:
        sim_RC.add_(_dropped(sim_RC, roles.drop), alpha=LEFT_OUT)
        weight_R = None if weight_R is None else others(sim_RC).sum(1)
    if kin is None:
        return _Chosen(None, None, None, weight_R, None)
    if by_level:
        assert isinstance(kin, Interval)
        lowest_R = _lowest(kin, sim_RC, policy.min_negatives)  # the least similar negatives are never kin
        kin_RC = above(sim_RC, lowest_R)
        return _Chosen(kin_RC, None, kin_RC.sum(1), weight_R, lowest_R)
    kin_RC, degree_RC = _kin(sim_RC, kin), kin.degree(sim_RC) if kin.graded else None
    flagged_R, cut_R = kin_RC.sum(1), None
    if short:
        assert weight_R is not None, "the number of negatives is needed where kin are removed"
        if removes or degree_RC is None:
            kin_RC, flagged_R, cut_R = spare(sim_RC, kin_RC, flagged_R, weight_R, policy.min_negatives)
        else:  # only kin with the degree 1 leave the denominator
            gone_RC = kin_RC * greater(degree_RC, 1 - 8 * torch.finfo(sim_RC.dtype).eps)
            gone_R = gone_RC.sum(1)
            left_RC, left_R, _ = spare(sim_RC, gone_RC, gone_R, weight_R, policy.min_negatives)
            kin_RC, flagged_R = kin_RC - (gone_RC - left_RC), flagged_R - (gone_R - left_R)
    return _Chosen(kin_RC, degree_RC, flagged_R, weight_R, cut_R)


def _in_parts(
    sim_RC: Tensor, negatives_b: Tensor | None, roles: Roles, policy: Policy, t: float | Tensor, weighted: bool
) -> tuple[Logits, Weights]:
    """`_weights` of a few rows at a time, for intervals of kin that are not attracted: what is asked for are numbers of each row."""
    number, found = len(sim_RC), list[Weights]()
    negatives_R = None if negatives_b is None else _of_rows(negatives_b, number)
    for rows in parts(sim_RC):
        some = Roles(*(form.of_rows(rows, number) if isinstance(form, Interval) else None for form in (roles.kin, roles.drop)))
        found.append(_weights(sim_RC[rows], None if negatives_R is None else negatives_R[rows], some, policy, t, False, weighted)[1])
    flagged, weight = ([each.flagged_R for each in found], [each.weight_R for each in found])
    flagged_R, weight_R = (None if each[0] is None else torch.cat(each) for each in (flagged, weight))  # type: ignore[arg-type]
    cut_R = None
    if any(each.cut_R is not None for each in found):
        whole = [torch.full_like(sim_RC[rows, 0], -torch.inf) for rows in parts(sim_RC)]
        cut_R = torch.cat([none_R if each.cut_R is None else each.cut_R for each, none_R in zip(found, whole, strict=True)])
    return Logits(sim_RC, None), Weights(flagged_R, weight_R, cut_R=cut_R)


def parts(sim_RC: Tensor, entries: int | None = None) -> Iterator[slice]:
    """A few rows of a block at a time, so that on a CPU what is computed beside them stays in the cache: 440 instead of 480 ms for `NTXent`
    with `GloFND` at batch 4,096. All rows at once where it is compiled, and on other devices. `entries`: of a part; None: `_CACHED`."""
    entries = _CACHED if entries is None else entries
    if not looks(sim_RC) or sim_RC.numel() <= entries:
        return iter((slice(None),))
    step = max(1, entries // sim_RC.shape[1])
    return (slice(first, first + step) for first in range(0, len(sim_RC), step))


def looks(sim_RC: Tensor) -> bool:
    """Whether the host may look at values: on a CPU that costs nothing, and saves passes; on an accelerator it would stop the step."""
    return sim_RC.device.type == "cpu" and not torch.compiler.is_compiling()


def _of_rows(values: Tensor, num_rows: int) -> Tensor:
    """(R,) from (R,), or from (b,) of samples whose rows follow one another."""
    return values if len(values) == num_rows else values.repeat_interleave(num_rows // max(len(values), 1))


def _lowest(kin: Interval, sim_RC: Tensor, number: int) -> Tensor:
    """(R,) the bound above which candidates are kin, at least the similarity of the `number` least similar negatives, with the room for
    rounding that `spare` has too."""
    assert kin.lower_R is not None
    negative_RC = F.threshold(sim_RC, -2.0, 4.0)
    lowest_R = negative_RC.amin(1) if number == 1 else negative_RC.kthvalue(min(number, sim_RC.shape[1]), 1).values
    lowest_R = lowest_R + 8 * torch.finfo(sim_RC.dtype).eps
    return torch.maximum(kin.lower_R.to(sim_RC.dtype).unsqueeze(1), lowest_R.view(len(kin.lower_R), -1)).view(-1)


def select(sim_RC: Tensor, roles: Roles, drops: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """(R, C), (R, C) 1 at kin and at what is dropped; nothing is both, and nothing of either is the anchor's own. None: nothing is.

    `drops`: False leaves what is dropped among the candidates."""
    drop_RC = None
    if roles.drop is not None and drops:
        drop_RC = _dropped(sim_RC, roles.drop) * others(sim_RC)
        sim_RC = torch.add(sim_RC, drop_RC, alpha=LEFT_OUT)
    return None if roles.kin is None else _kin(sim_RC, roles.kin), drop_RC


def _dropped(sim_RC: Tensor, drop: Form) -> Tensor:
    """(R, C) 1 at what is dropped; what is the anchor's own may be among it."""
    if isinstance(drop, Interval) and drop.upper_R is not None:  # the most similar stays
        drop = replace(drop, upper_R=torch.minimum(_of_rows(drop.upper_R.to(sim_RC.dtype), len(sim_RC)), sim_RC.amax(1)))
    return drop.mask(sim_RC)


def _kin(sim_RC: Tensor, kin: Form) -> Tensor:
    """(R, C) 1 at kin, of what is neither the anchor's own nor left out."""
    kin_RC = kin.mask(sim_RC)
    return kin_RC if isinstance(kin, Interval) and kin.lower_R is not None else kin_RC * others(sim_RC)


def spare(sim_RC: Tensor, kin_RC: Tensor, flagged_R: Tensor, weight_R: Tensor, min_negatives: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Kin less the least similar ones of rows that would be left with fewer than `min_negatives`, how many remain, and the similarity up
    to which they were spared; of equals at that similarity, up to rounding, all are."""
    left_R = weight_R - flagged_R
    if not min_negatives or (looks(sim_RC) and len(left_R) and float(left_R.min()) >= min_negatives):
        return kin_RC, flagged_R, None  # on a CPU looking costs nothing, and saves two passes
    lacking_R = torch.minimum(min_negatives - left_R, flagged_R)
    kin_sim_RC = torch.where(kin_RC > 0, sim_RC, torch.inf)
    number = min(min_negatives, sim_RC.shape[1])
    if number == 1:
        cut_R = kin_sim_RC.amin(1)
    else:
        least_RK = kin_sim_RC.topk(number, dim=1, largest=False).values
        cut_R = least_RK.gather(1, (lacking_R.long() - 1).clamp(0, number - 1).unsqueeze(1)).squeeze(1)
    cut_R = torch.where(lacking_R > 0, cut_R + 8 * torch.finfo(sim_RC.dtype).eps, -torch.inf)
    kin_RC = kin_RC * greater(sim_RC, cut_R.unsqueeze(1))
    return kin_RC, kin_RC.sum(1), cut_R


def exponentials(x_RC: Tensor, t: float | Tensor) -> Softmax:
    """The softmax of x / t of each row, and its log-sum-exp, on a CPU. Overwrites `x_RC`.

    Not by `torch.softmax`: 2 ** x takes a third of the time of exp(x), and the division by the sum needs no pass of its own. Nor is it
    compiled, which takes twice as long. 0.9 instead of 1.7 ms for 512 × 8,192 with two threads. A row without any negative has a
    log-sum-exp below `EMPTY` and shares of 0."""
    scale, top_R1 = 1 / (math.log(2) * t), x_RC.amax(1, keepdim=True).clamp_(min=EMPTY)
    shift_R1 = top_R1 * -scale
    exp_RC = scaled_plus(x_RC, scale, shift_R1, out=x_RC).exp2_()
    sum_R = exp_RC.sum(1)
    lse_R = sum_R.log2().sub_(shift_R1.squeeze(1)).mul_(math.log(2)).clamp_(min=LEFT_OUT)
    return Softmax(exp_RC, 1 / sum_R.clamp_(min=torch.finfo(sum_R.dtype).tiny), lse_R)


def scaled_plus(x_RC: Tensor, scale: float | Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """scale · x + shift, in one pass where the scale is a number."""
    if isinstance(scale, Tensor):
        return torch.mul(x_RC, scale, out=out).add_(shift)
    return torch.add(shift, x_RC, alpha=scale, out=out)


def shares(logit_RC: Tensor) -> Softmax:
    """The softmax of logits, and its log-sum-exp: the largest logit less the logarithm of its share, which is at least 1 / C.

    A compiler has it in one pass less the other way. A row without any negative has equal shares, to be multiplied by a derivative of 0."""
    top_R = logit_RC.amax(1)
    if torch.compiler.is_compiling():
        exp_RC = (logit_RC - top_R.unsqueeze(1)).exp()
        sum_R = exp_RC.sum(1)
        return Softmax(exp_RC / sum_R.unsqueeze(1), None, top_R + sum_R.log())
    share_RC = torch.softmax(logit_RC, 1)
    return Softmax(share_RC, None, top_R - share_RC.amax(1).log())


def hardened(logits: Logits, t: float | Tensor, weight_R: Tensor | None, hardness: float) -> Softmax:
    """The shares and log-sum-exp of negatives that weigh more the more similar they are: Robinson et al., Contrastive Learning with Hard
    Negative Samples, ICLR 2021, equation 4. With a hardness β of 0 they are those of `shares`.

        lse_i = log( Σ_j w_ij h_ij exp(s_ij / t) ),   h_ij = exp(β s_ij / t) / mean_j exp(β s_ij / t),   the mean weighted by w
        share_ij = t · ∂lse_i/∂s_ij = (1 + β) p_ij − β q_ij,   p, q: the softmaxes of (1 + β) s / t + log w and of β s / t + log w

    As in the published code, h is part of the gradient."""
    logit_RC, scaled_RC = divided(logits.logit_RC, t), logits.scaled_RC
    if scaled_RC is None:
        return shares(logit_RC)
    assert weight_R is not None, "the mean over negatives needs their number"
    hard_RC, _, hard_R = shares(logit_RC + hardness * scaled_RC)
    soft_RC, _, soft_R = shares(logit_RC - (1 - hardness) * scaled_RC)
    lse_R = torch.where(weight_R > 0, hard_R - soft_R + weight_R.log(), LEFT_OUT)
    return Softmax((1 + hardness) * hard_RC - hardness * soft_RC, None, lse_R)


def divided(x_RC: Tensor, by: float | Tensor) -> Tensor:
    """x / by: in place, unless it is compiled. A CPU multiplies twice as fast as it divides."""
    return x_RC / by if torch.compiler.is_compiling() else x_RC.mul_(1 / by)


def others(sim_RC: Tensor) -> Tensor:
    """(R, C) 0 where the candidate is the anchor's own, else 1."""
    return greater(sim_RC, -2.0)


def above(sim_RC: Tensor, bound_R: Tensor) -> Tensor:
    """(R, C) 1 where a similarity is greater than the bound of its row; bounds as in `Interval`."""
    bound_R1 = bound_R.to(sim_RC.dtype).unsqueeze(1)
    return greater(sim_RC.reshape(len(bound_R1), -1), bound_R1).view_as(sim_RC)


def greater(one: Tensor, other: Tensor | float) -> Tensor:
    """1 where `one` is greater, else 0, as a number. One of the two has the shape of the result."""
    if torch.compiler.is_compiling():
        return (one > other).to(one.dtype)
    larger = other if isinstance(other, Tensor) and other.numel() > one.numel() else one
    return torch.gt(one, other, out=torch.empty_like(larger, dtype=one.dtype))
