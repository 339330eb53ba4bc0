"""The engine: similarities in row blocks, one pass, exact gradient, memory linear in the batch.

For every block of anchors: similarities to all candidates → the detector's selection → weights and targets → row terms (`kinship.weigh`)
→ the objective's loss and its derivatives by the row terms → the gradient: three matrix products in all. No A × C matrix outlives its
block, unless it is small.

    lse_i = log Σ_j w_ij exp(s_ij / t),   p_ij = w_ij exp(s_ij / t − lse_i),   ∂lse_i/∂s_ij = p_ij / t

Written by hand because autograd keeps the whole matrix several times over. A learned temperature costs a sum per row beside the anchors'
gradient, as s is itself a product:

    ∂lse_i/∂t = −s̄_i / t²,   s̄_i = Σ_j p_ij s_ij = a_i · Σ_j p_ij c_j

Two directions: what one direction of a two-way contrast adds to the gradient of the other: four matrix products for both, instead of six;
three where the batch is so small that one keeps its similarities for the other.

Images i and texts j have one matrix of similarities, and the two directions their losses of it:

    loss = Σ_i f_i(lse_i) + Σ_j f'_j(lse'_j),     lse'_j = log Σ_i v_ij exp(s_ij / t)
    ∂loss/∂s_ij = f_i' p_ij / t + f'_j' q_ij / t,     q_ij = v_ij exp(s_ij / t − lse'_j)

The texts' direction is evaluated first and without gradient: one product, after which a text is known by lse'_j, its derivative, and the
similarities above and up to which v_ij is 0. With these the images' direction, where a block of s is at hand, has the second term as well,
and takes the two products of the gradient from the sum. Under a process group only these numbers cross ranks.

Dimension key: A anchors, C candidates, D embedding, P own positives, R rows of a block, b samples of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.detectors.base import Detector, Found
from kinfolk.kinship import Interval, Roles, Softmax, Weights, greater, parts, scaled_plus, weigh
from kinfolk.pairs import LEFT_OUT, Block, Pairs, Policy, own_columns
from kinfolk.stats import Labels, Stats, count, summed


class Across:
    """Collects from the blocks of one direction (`note`), and answers for blocks of the other (`push`), in which its anchors are the
    candidates. Kin may only be an interval without upper end, and be left out.

    Args:
        temperature: t, one for all.
    """

    def __init__(self, temperature: float | Tensor) -> None:
        self.temperature = temperature
        self.d_temperature: Tensor | None = None  # with these and lse held
        self.sims: list[Tensor] = []  # (R, C) the similarities of all blocks, where they are few enough to be kept
        self._noted: list[tuple[Tensor, ...]] = []
        self._d_own: list[Tensor] = []  # (R, P) by the similarities of the own pairs, which are one for both directions
        self._memory: Tensor | None = None  # of `push`, one for all blocks

    def note(
        self, roles: Roles, lse_R: Tensor, cut_R: Tensor | None, d_lse_R: Tensor, d_own_RP: Tensor, d_temperature: Tensor | None
    ) -> None:
        """What the gradient of the other direction needs of a block: the derivatives of the loss by its row terms."""
        scale_R, above_R = d_lse_R / self.temperature, torch.full_like(lse_R, torch.inf)
        if roles.kin is not None:  # the other direction's product may round the same similarity to another side of a bound
            assert isinstance(roles.kin, Interval)
            assert roles.kin.lower_R is not None
            slack = 4 * torch.finfo(lse_R.dtype).eps
            above_R = roles.kin.lower_R.to(lse_R.dtype) + slack  # one row for each sample
        cut_R = torch.full_like(lse_R, -torch.inf) if cut_R is None else cut_R
        log_factor_R = torch.where(scale_R == 0, LEFT_OUT, torch.sub(scale_R.log2(), lse_R, alpha=1 / math.log(2)))  # of base 2
        self._noted.append((log_factor_R, above_R, cut_R))
        self._d_own.append(d_own_RP)
        if d_temperature is not None:
            self.d_temperature = d_temperature if self.d_temperature is None else self.d_temperature + d_temperature

    def settle(self, sizes: list[int] | None) -> None:
        """Joins what was noted of all blocks and ranks; between the two directions."""
        columns = [torch.cat(each) for each in zip(*self._noted, strict=True)]
        if sizes is not None:
            columns = distributed.gather_together(columns, sizes)
        self._columns, self._d_own_AP = columns, joined(self._d_own)

    def keep(self, sim_RC: Tensor) -> None:
        """Keeps the similarities of a block for the other direction."""
        self.sims.append(padded(sim_RC).copy_(sim_RC))

    def read(self, sim_RC: Tensor, rows: slice) -> None:
        """Writes the similarities of these rows, which are columns of what was kept, into `sim_RC`."""
        for kept_RC, columns_RC in zip(self.sims, sim_RC.split([len(kept_RC) for kept_RC in self.sims], 1), strict=True):  # type: ignore[no-untyped-call]
            columns_RC.copy_(kept_RC[:, rows].T)

    def own(self, rows: slice) -> Tensor:
        """(R, P) the other direction's derivative by the similarities of the own pairs, of these rows."""
        return self._d_own_AP[rows]

    def push(self, sim_RC: Tensor) -> Tensor:
        """(R, C) the other direction's part of ∂loss/∂s; valid until the next call."""
        log_factor_C, above_C, cut_C = self._columns
        bound_C, scale = torch.maximum(above_C, cut_C), 1 / (math.log(2) * self.temperature)
        if self._memory is None:
            self._memory = torch.empty_like(sim_RC)
        push_RC = self._memory[: len(sim_RC)]
        for rows in parts(sim_RC):
            logit_RC = scaled_plus(sim_RC[rows], scale, log_factor_C, out=push_RC[rows])
            logit_RC.add_(greater(sim_RC[rows], bound_C), alpha=LEFT_OUT).exp2_()
        return push_RC


_BLOCK_ELEMENTS = {"cpu": 1 << 22, "default": 1 << 26}
"""Similarities at a time. On a CPU 16 MB, which a last-level cache may hold: with 512 rows at batch 4,096 a loss takes 440 ms, with 256 or
1,024 rows 460. And a batch of 1,024 pairs is one block, whose gradient takes two products instead of three."""
_KEPT_ELEMENTS = {"cpu": 1 << 24, "default": 1 << 26}
"""Similarities that one direction keeps for the other at most, 64 MB on a CPU: three matrix products for both directions instead of four.
Images and texts of a batch of 4,096 with 512 numbers each take 430 instead of 510 ms, of 1,024 they take 27 instead of 34."""
_NOTHING = Found((Roles(),))


@dataclass(frozen=True)
class Rows:
    """What an objective is given of a block: per row the own positives, the kept negatives as one number, and the attracted kin.

    `temperature` is a number or a tensor without dimensions, or (R,) where each row has its own, and then `mean_sim_R`, the s̄ above, is
    there too. `flagged_R` is the number of kin, None where none can be; `weight_R` is Σ w, for objectives with `reads_weight`. Of attracted
    kin: Σ y, Σ y s and, for objectives that pool them inside the logarithm, log Σ y exp(s / t); None where none are attracted. `degree_RP`
    is there where the pairs have degrees. `learned`: whether the derivative by the temperature is wanted."""

    own_RP: Tensor
    lse_R: Tensor
    ids: Tensor
    num_views: int
    temperature: float | Tensor
    flagged_R: Tensor | None = None
    weight_R: Tensor | None = None
    kin_mass_R: Tensor | None = None
    kin_sum_R: Tensor | None = None
    kin_lse_R: Tensor | None = None
    mean_sim_R: Tensor | None = None
    degree_RP: Tensor | None = None
    learned: bool = False

    def per_row(self, values_b: Tensor) -> Tensor:
        """(R,) a quantity of each sample, for each of its rows."""
        return values_b if self.num_views == 1 else values_b.repeat_interleave(self.num_views)


@dataclass(frozen=True)
class Terms:
    """What an objective returns: the loss of each row, and its derivative by `lse_R`, `own_RP`, `kin_sum_R` and `kin_lse_R`; where the
    temperature is learned, also the derivative by it with these four held."""

    loss_R: Tensor
    d_lse_R: Tensor
    d_own_RP: Tensor
    d_kin_R: Tensor | None = None
    d_kin_lse_R: Tensor | None = None
    d_temperature_R: Tensor | None = None
    update: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Contrast:
    """One evaluation of an objective over `Pairs`: run by `loss`, after which `stats` and the updates are there.

    `temperature`: a number; a tensor without dimensions, which receives its gradient; or (A,) of each anchor, which does not.
    `all_ids`: the sample ids of all ranks, where they were gathered with the candidates.
    `gives`, `takes`: where the candidates are anchors of another contrast with these anchors, what they add to its gradient, or to this.
    `reads_weight`: whether the objective needs Σ w of each row."""

    pairs: Pairs
    temperature: float | Tensor
    terms: Callable[[Rows], Terms]
    policy: Policy
    detector: Detector | None = None
    labels: Labels | None = None
    block_rows: int | None = None
    sizes: list[int] | None = None
    compile: bool = False
    reads_weight: bool = True
    gives: Across | None = None
    takes: Across | None = None
    all_ids: Tensor | None = field(init=False, default=None)
    with_gradient: bool = field(init=False, default=False)
    stats: Callable[[], Stats] = field(init=False)
    found: list[Mapping[str, Tensor]] = field(init=False, default_factory=list)
    updates: list[list[Mapping[str, Tensor]]] = field(init=False, default_factory=list)

    def loss(self) -> Tensor:
        """Mean over the anchors of all ranks."""
        pairs = self.pairs
        learned = self.temperature if isinstance(self.temperature, Tensor) and self.temperature.ndim == 0 else None
        others = None if pairs.candidates is pairs.anchors else pairs.candidates  # None: the gradient of both in one
        inputs = (pairs.anchors, others, pairs.positives, learned)
        self.with_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        with torch.autocast(pairs.anchors.device.type, enabled=False):
            total: Tensor = _Function.apply(*inputs, self)  # type: ignore[no-untyped-call]
        return total if self.sizes is None else distributed.sum_over_ranks(total)

    def run(self, anchors_AD: Tensor, candidates_CD: Tensor, positives_APD: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss summed over this rank's anchors and divided by all ranks', and its gradient by the three inputs and the temperature."""
        _keep_freed_memory()
        own_AP = (anchors_AD.unsqueeze(1) * positives_APD).sum(2)  # einsum would multiply A tiny matrices
        gradient = _Gradient(self, anchors_AD, candidates_CD, positives_APD)
        num_anchors = len(anchors_AD) if self.sizes is None else sum(self.sizes) * self.pairs.num_views
        total, counts = list[Tensor](), list[Callable[[], Tensor]]()
        for rows, block, negatives in self._blocks(anchors_AD, candidates_CD):
            found = _NOTHING if self.detector is None else self.detector.find(block)
            temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) and self.temperature.ndim else self.temperature
            share, proposed = 1.0 / (num_anchors * len(found.levels)), list[Mapping[str, Tensor]]()
            push_RC = None if gradient.takes is None else gradient.takes.push(block.sim_RC)
            for level, roles in enumerate(found.levels):
                sim_RC = block.sim_RC if level == len(found.levels) - 1 else block.sim_RC.clone()
                alike = None if self.labels is None else self.labels.alike(block)
                negatives_b = block.num_negatives_b if len(block.num_negatives_b) else None
                softmax, weights = weigh(
                    sim_RC, negatives_b, roles, self.policy, temperature, self.labels is not None, self.reads_weight, self.compile
                )
                if alike is None:
                    counts.append(partial(_counted, negatives, weights.flagged_R))
                else:
                    counts.append(partial(torch.Tensor.detach, count(negatives(), weights.flagged_R, weights.kin_RC, alike)))
                mean_RD = softmax.share_RC @ candidates_CD if isinstance(temperature, Tensor) and temperature.ndim else None
                terms = self.terms(self._told(rows, block, own_AP, softmax, weights, temperature, mean_RD, anchors_AD))
                whole = len(terms.loss_R) == num_anchors and len(found.levels) == 1
                total.append(terms.loss_R.mean() if whole else terms.loss_R.sum() * share)
                proposed.append(terms.update)
                if self.gives is not None:
                    by_temperature = None if terms.d_temperature_R is None else terms.d_temperature_R.sum() * share
                    self.gives.note(roles, softmax.lse_R, weights.cut_R, terms.d_lse_R * share, terms.d_own_RP * share, by_temperature)
                if self.with_gradient:
                    gradient.add(rows, softmax, weights, terms, share, temperature, push_RC, mean_RD)
            self.found.append(found.update)
            self.updates.append(proposed)
        views_AP = own_AP if self.pairs.degree is None else own_AP[:, :1]  # with degrees the first is the other view, the rest are keys
        self.stats = partial(summed, counts, views_AP)
        return total[0] if len(total) == 1 else torch.stack(total).sum(), gradient.parts()

    def _told(
        self,
        rows: slice,
        block: Block,
        own_AP: Tensor,
        softmax: Softmax,
        weights: Weights,
        temperature: float | Tensor,
        mean_RD: Tensor | None,
        anchors_AD: Tensor,
    ) -> Rows:
        return Rows(
            own_RP=own_AP[rows],
            lse_R=softmax.lse_R,
            ids=block.ids,
            num_views=block.num_views,
            temperature=temperature,
            flagged_R=weights.flagged_R,
            weight_R=weights.weight_R,
            kin_mass_R=weights.mass_R,
            kin_sum_R=weights.pull_R,
            kin_lse_R=weights.kin_lse_R,
            mean_sim_R=None if mean_RD is None else normed((mean_RD * anchors_AD[rows]).sum(1), softmax),
            degree_RP=None if self.pairs.degree is None else self.pairs.degree[rows],
            learned=isinstance(temperature, Tensor),
        )

    def _blocks(self, anchors_AD: Tensor, candidates_CD: Tensor) -> Iterator[tuple[slice, Block, Callable[[], Tensor]]]:
        """Row blocks that never part the views of a sample, and what computes (b,) the number of negatives over all views of a sample."""
        pairs, views, num_candidates = self.pairs, self.pairs.num_views, len(candidates_CD)
        limit, kept_limit = (of.get(anchors_AD.device.type, of["default"]) for of in (_BLOCK_ELEMENTS, _KEPT_ELEMENTS))
        step = max(1, (self.block_rows or limit // max(1, num_candidates)) // views)
        memory_RC = anchors_AD.new_empty(min(step * views, len(anchors_AD)), num_candidates)  # one for all blocks
        own, counted = _Own(pairs), self.reads_weight or self.detector is not None or self.labels is not None
        keeper = self.gives if self.sizes is None and len(anchors_AD) * num_candidates <= kept_limit else None
        for first in range(0, len(pairs.ids), step):
            samples, rows = slice(first, first + step), slice(first * views, min((first + step) * views, len(anchors_AD)))
            sim_RC = memory_RC[: rows.stop - rows.start]
            if self.takes is None or not self.takes.sims:
                torch.mm(anchors_AD[rows], candidates_CD.T, out=sim_RC)
            else:
                self.takes.read(sim_RC, rows)
            number_b, negatives = own.leave_out(sim_RC, samples, counted)
            if keeper is not None:
                keeper.keep(sim_RC)
            guide = None if pairs.guide is None else pairs.guide[samples if len(pairs.guide) == len(pairs.ids) else rows]
            seen = self.compile, guide, pairs.candidate_guide, candidates_CD
            yield rows, Block(sim_RC, pairs.ids[samples], pairs.candidate_ids, views, number_b, *seen), negatives


class _Own:
    """The candidates that are an anchor's own: those with its id, or with its group where there are groups."""

    def __init__(self, pairs: Pairs) -> None:
        self.keys_B, self.keys_C = pairs.ids, pairs.candidate_ids
        if pairs.groups is not None and pairs.candidate_groups is not None:
            self.keys_B, self.keys_C = pairs.groups, pairs.candidate_groups
        self.views, self.on_cpu = pairs.num_views, self.keys_B.device.type == "cpu"
        if self.on_cpu:  # as places, whose number a CPU may know: a tenth of a whole block's time less
            self.column_BK, self.number_B = own_columns(self.keys_B, self.keys_C)
            self.everywhere = bool((self.number_B > 0).all())

    def leave_out(self, sim_RC: Tensor, samples: slice, counted: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        """Leaves them out of the rows of these samples. Returns (b,) how many others each row has, and what computes (b,) how many all
        views of a sample have. `counted`: whether the first is wanted; an accelerator leaves it empty otherwise."""
        key_b, num_candidates = self.keys_B[samples], sim_RC.shape[1]
        sim_bVC = sim_RC.view(len(key_b), self.views, num_candidates)
        if self.on_cpu:
            places, own_b = (torch.arange(len(key_b)).unsqueeze(1), slice(None), self.column_BK[samples]), self.number_B[samples]
            some_b11 = (own_b > 0).view(-1, 1, 1)
            sim_bVC[places] = LEFT_OUT if self.everywhere else sim_bVC[places].masked_fill_(some_b11, LEFT_OUT)
            number_b = (num_candidates - own_b).to(sim_RC.dtype)
        else:
            own_bC = key_b.unsqueeze(1) == self.keys_C
            sim_bVC.masked_fill_(own_bC.unsqueeze(1), LEFT_OUT)
            if not counted:
                return sim_RC.new_empty(0), partial(_negatives, key_b, self.keys_C, self.views)
            number_b = num_candidates - own_bC.sum(1, dtype=sim_RC.dtype)
        return number_b, partial(torch.mul, number_b, self.views)


class _Gradient:
    """The gradient of a contrast by its anchors, candidates, own positives and temperature, block by block."""

    def __init__(self, contrast: Contrast, anchors_AD: Tensor, candidates_CD: Tensor, positives_APD: Tensor) -> None:
        pairs = contrast.pairs
        self.anchors_AD, self.candidates_CD, self.positives_APD, self.views = anchors_AD, candidates_CD, positives_APD, pairs.num_views
        self.wanted, self.twins = contrast.with_gradient, pairs.twins
        self.takes = contrast.takes if self.wanted else None
        self.learned = self.wanted and isinstance(contrast.temperature, Tensor) and contrast.temperature.ndim == 0
        self.together = pairs.candidates is pairs.anchors  # the gradient of both is one
        self.moving = self.wanted and pairs.candidates.requires_grad  # a queue or a bank is not
        self.pulls = self.wanted and pairs.positives.requires_grad
        self.by_anchor, self.by_own = list[Tensor](), list[Tensor]()
        self.by_candidate: Tensor | None = None
        self.by_temperature = None if self.takes is None else self.takes.d_temperature
        self.rows: slice | None = None

    def add(
        self,
        rows: slice,
        softmax: Softmax,
        weights: Weights,
        terms: Terms,
        share: float,
        temperature: float | Tensor,
        push_RC: Tensor | None,
        mean_RD: Tensor | None,
    ) -> None:
        """∂loss/∂s_ij = f_i p_ij / t + g_i y_ij, with f and g the derivatives by lse and by the sum over kin, and its two products."""
        anchors_RD = self.anchors_AD[rows]
        scale_R1 = normed(terms.d_lse_R * (share / temperature), softmax).unsqueeze(1)
        square = self.together and self.moving and mean_RD is None and len(anchors_RD) == len(self.candidates_CD)
        outside = push_RC is None and weights.target_RC is None and not square  # the row's factor is taken out of the matrix
        d_sim_RC = softmax.share_RC
        if push_RC is not None:
            d_sim_RC = push_RC.addcmul_(d_sim_RC, scale_R1)
        elif weights.target_RC is not None:
            by_kin_R = terms.d_kin_lse_R / temperature if terms.d_kin_lse_R is not None else terms.d_kin_R
            assert by_kin_R is not None
            d_sim_RC = d_sim_RC.mul_(scale_R1).addcmul_(weights.target_RC, (by_kin_R * share).unsqueeze(1))
        if square:  # of one block with itself: the gradient by anchors and that by candidates in one product
            d_sim_RC = plus_transposed(d_sim_RC, scale_R1 if weights.target_RC is None else 1.0)
        by_anchor_RD = d_sim_RC @ self.candidates_CD if mean_RD is None or not outside else mean_RD
        if outside:
            by_anchor_RD = by_anchor_RD * scale_R1
        if self.learned:  # Σ s·∂loss/∂s, less what kin have of it, is −t·∂loss/∂t by way of lse
            of_both = (by_anchor_RD * anchors_RD).sum()
            self._by_temperature(terms, weights, of_both / 2 if square else of_both, share, temperature)
        d_own_RP, factor = terms.d_own_RP, share
        if self.takes is not None or self.pulls:
            d_own_RP, factor = d_own_RP * share, 1.0
        if self.takes is not None:
            d_own_RP = d_own_RP + self.takes.own(rows)
        by_anchor_RD = self._pulled(by_anchor_RD, rows, d_own_RP, factor)
        if self.moving and not square:
            scaled_RD = anchors_RD * scale_R1 if outside else anchors_RD
            if self.by_candidate is None:
                self.by_candidate = d_sim_RC.T @ scaled_RD
            else:
                self.by_candidate.addmm_(d_sim_RC.T, scaled_RD)
        if self.rows == rows:  # another level of the same block
            self.by_anchor[-1] += by_anchor_RD
            self.by_own[-1] += d_own_RP
        else:
            self.by_anchor.append(by_anchor_RD)
            self.by_own.append(d_own_RP)
        self.rows = rows

    def _pulled(self, by_anchor_RD: Tensor, rows: slice, d_own_RP: Tensor, factor: float) -> Tensor:
        """With what the own positives add: ∂s/∂a = p. Of two views each is the positive of the other, so both derivatives count."""
        positives_RPD = self.positives_APD[rows]
        if self.twins:
            d_own_b11 = d_own_RP.view(-1, self.views, 1).sum(1, keepdim=True)
            by_view = (-1, self.views, by_anchor_RD.shape[1])
            return torch.addcmul(by_anchor_RD.view(by_view), positives_RPD.view(by_view), d_own_b11, value=factor).view_as(by_anchor_RD)
        if d_own_RP.shape[1] == 1:
            return torch.addcmul(by_anchor_RD, positives_RPD[:, 0], d_own_RP, value=factor)
        return torch.add(by_anchor_RD, (d_own_RP.unsqueeze(2) * positives_RPD).sum(1), alpha=factor)

    def _by_temperature(self, terms: Terms, weights: Weights, by_lse: Tensor, share: float, temperature: float | Tensor) -> None:
        assert terms.d_temperature_R is not None, "the objective gives no derivative by the temperature"
        if weights.pull_R is not None and terms.d_kin_R is not None:
            by_lse = by_lse - share * (terms.d_kin_R * weights.pull_R).sum()
        direct = share * terms.d_temperature_R.sum() - by_lse / temperature
        self.by_temperature = direct if self.by_temperature is None else self.by_temperature + direct

    def parts(self) -> tuple[Tensor | None, ...]:
        """By anchors, candidates, own positives and temperature; None where not wanted."""
        if not self.wanted:
            return None, None, None, None
        by_anchor, by_candidate = joined(self.by_anchor), self.by_candidate
        if self.together and by_candidate is not None:
            by_anchor, by_candidate = by_anchor + by_candidate, None
        by_positive = joined(self.by_own).unsqueeze(2) * self.anchors_AD.unsqueeze(1) if self.pulls else None
        return by_anchor, by_candidate, by_positive, self.by_temperature


class _Function(torch.autograd.Function):
    """Takes the gradient in the forward pass, where the similarities are at hand, and only scales it in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, candidates: Tensor | None, positives: Tensor, temperature: Tensor | None, contrast: Contrast
    ) -> Tensor:
        total, gradients = contrast.run(anchors, anchors if candidates is None else candidates, positives)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(grad * x if needed and x is not None else None for x, needed in wanted), None


def refuse_second_derivative() -> None:
    """For a backward pass whose gradient was taken by hand, so that it would count as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a contrastive loss cannot be differentiated again; leave `create_graph` out")


@functools.cache
def _keep_freed_memory() -> None:
    """Frees one large piece of memory, after which glibc keeps what is freed up to twice its size, where it would give every block back to
    the system and fault it in anew. Measured at batch 1,024 with one thread: 1.3 instead of 1.6 times the matrix products."""
    torch.empty(31 << 20, dtype=torch.uint8)


def plus_transposed(x_RR: Tensor, factor_R1: Tensor | float) -> Tensor:
    """y + yᵀ, with y the product of x and a factor of each row. May overwrite x.

    A CPU copies the transposed faster than it adds it: with the matrix product that follows it takes 10.5 ms for 2,048 rows, where two
    products take 13.5."""
    if x_RR.device.type != "cpu":
        y_RR = x_RR if isinstance(factor_R1, float) else x_RR.mul_(factor_R1)
        return y_RR + y_RR.T
    y_RR = torch.mul(x_RR, factor_R1, out=padded(x_RR))
    return y_RR.add_(x_RR.copy_(y_RR.T))


def padded(x_RC: Tensor) -> Tensor:
    """Memory for a matrix of the same shape that will be transposed. Its rows do not all start at the same place of a CPU's cache: 2.7
    instead of 11.7 ms to transpose 1,024 columns of 4,096 × 4,096."""
    return x_RC.new_empty(len(x_RC), x_RC.shape[1] + 16)[:, : x_RC.shape[1]]


def _negatives(key_b: Tensor, keys_C: Tensor, num_views: int) -> Tensor:
    """(b,) how many candidates are not the sample's own, over all its views."""
    sorted_C = keys_C.sort().values
    own_b = torch.searchsorted(sorted_C, key_b, right=True) - torch.searchsorted(sorted_C, key_b)
    return (len(keys_C) - own_b) * num_views


def _counted(negatives: Callable[[], Tensor], flagged_R: Tensor | None) -> Tensor:
    return count(negatives(), flagged_R)


def normed(values_R: Tensor, softmax: Softmax) -> Tensor:
    """(R,) `values_R`, each multiplied by what makes its row of `share_RC` sum to 1."""
    return values_R if softmax.norm_R is None else values_R * softmax.norm_R


def joined(parts: list[Tensor]) -> Tensor:
    """The rows of all blocks."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
