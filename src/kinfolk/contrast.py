"""The engine: similarities in row blocks, one pass, exact gradient, memory linear in the batch.

For every block of anchors it computes the similarities to all candidates, asks the detector who is kin, applies the action, takes the
log-sum-exp over the kept negatives, lets the objective turn a few numbers per row into loss and derivatives, and adds this block's
share of the gradient — three matrix products in all. No A × C matrix outlives its block.

    lse_i = log Σ_j w_ij exp(s_ij / t),   p_ij = w_ij exp(s_ij / t − lse_i),   ∂lse_i/∂s_ij = p_ij / t

w_ij is 1 for a kept negative, 0 for one left out, in between for one reweighted. Written by hand because autograd keeps the whole
matrix several times over. A learned temperature costs a sum per row beside the anchors' gradient, as s is itself a product:

    ∂lse_i/∂t = −s̄_i / t²,   s̄_i = Σ_j p_ij s_ij = a_i · Σ_j p_ij c_j

Dimension key: A anchors, C candidates, D embedding, P own positives, R rows of a block, b samples of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kinfolk import distributed
from kinfolk.across import Across
from kinfolk.actions import Policy, Settled, settle
from kinfolk.detectors.base import Detector
from kinfolk.pairs import CACHED, Block, Pairs, Places, Roles, own_matches
from kinfolk.stats import COUNTED, Stats, count, measure

_PROBED, _DEEPEST = 256, 60.0
_BLOCK_ELEMENTS = {"cpu": 1 << 22, "default": 1 << 26}  # measured: fewer, larger blocks save more calls than they cost in cache


@dataclass(frozen=True)
class Rows:
    """What an objective is told of a block: per row the own positives, the kept negatives as one number, and the attracted kin.

    `temperature` is a number, or (R,) where each row has its own, and then `mean_sim_R`, the s̄ above, is there too.
    `kin_lse_R`, log Σ exp(s / t) over the kin, is there for objectives that pool them inside the logarithm; `degree_RP` where the pairs
    have degrees."""

    own_RP: Tensor
    lse_R: Tensor
    log_weight_R: Tensor
    kin_sum_R: Tensor
    kin_count_R: Tensor
    kin_lse_R: Tensor | None
    ids: Tensor
    num_views: int
    temperature: float | Tensor
    mean_sim_R: Tensor | None = None
    degree_RP: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """What an objective answers: the loss of each row, and its derivative by `lse_R`, `own_RP`, `kin_sum_R` and `kin_lse_R`; where the
    temperature may be learned, also the derivative by it with these four held."""

    loss_R: Tensor
    d_lse_R: Tensor
    d_own_RP: Tensor
    d_kin_R: Tensor
    d_kin_lse_R: Tensor | None = None
    d_temperature_R: Tensor | None = None
    update: Mapping[str, Tensor] = field(default_factory=dict)


class Scratch:
    """Memory for a block of similarities and parts of it, kept from call to call: asking for it anew costs as much as filling it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, cols: int, like: Tensor) -> Tensor:
        """(rows, cols) of `like`'s kind, with whatever was in it."""
        held = self._held.get(name)
        if held is not None and held.is_inference() and not torch.is_inference_mode_enabled():
            held = None  # made in a validation; training may not write to it
        if held is None or held.numel() < rows * cols or held.dtype != like.dtype or held.device != like.device:
            held = self._held[name] = like.new_empty(rows * cols)
        return held[: rows * cols].view(rows, cols)

    def __deepcopy__(self, memo: object) -> Scratch:
        return Scratch()

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()


@dataclass
class Contrast:
    """One evaluation of an objective over `Pairs`: run by `loss`, after which `stats` and the updates are there.

    `temperature`: a number; a tensor without dimensions, which receives its gradient; or (A,) of each anchor, which does not.
    `gives`, `takes`: where the candidates are anchors of another contrast with these anchors, what they add to its gradient, or to this."""

    pairs: Pairs
    temperature: float | Tensor
    terms: Callable[[Rows], Terms]
    policy: Policy
    detector: Detector | None = None
    labels: Tensor | None = None
    block_rows: int | None = None
    sizes: list[int] | None = None
    scratch: Scratch = field(default_factory=Scratch)
    gives: Across | None = None
    takes: Across | None = None
    with_gradient: bool = field(init=False, default=False)
    stats: Stats = field(init=False)
    found: list[Mapping[str, Tensor]] = field(init=False, default_factory=list)
    updates: list[list[Mapping[str, Tensor]]] = field(init=False, default_factory=list)

    def loss(self) -> Tensor:
        """Mean over the anchors of all ranks."""
        pairs = self.pairs
        learned = self.temperature if isinstance(self.temperature, Tensor) and self.temperature.ndim == 0 else None
        with torch.autocast(pairs.anchors.device.type, enabled=False):
            own = (pairs.anchors.unsqueeze(1) * pairs.positives).sum(2)  # einsum would multiply A tiny matrices
            inputs = (pairs.anchors, pairs.candidates, own, learned)
            self.with_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
            total: Tensor = _Function.apply(*inputs, self)  # type: ignore[no-untyped-call]
        return total if self.sizes is None else distributed.sum_over_ranks(total)

    def run(self, anchors_AD: Tensor, candidates_CD: Tensor, own_AP: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss summed over this rank's anchors and divided by all ranks', and its gradient by the three inputs and the temperature."""
        num_anchors = len(anchors_AD) if self.sizes is None else sum(self.sizes) * self.pairs.num_views
        total, counts = anchors_AD.new_zeros(()), torch.zeros(COUNTED, dtype=torch.int64, device=anchors_AD.device)
        moving = self.with_gradient and self.pairs.candidates.requires_grad  # a queue or a bank is not
        wanted = ((anchors_AD, self.with_gradient), (candidates_CD, moving), (own_AP, self.with_gradient))
        grad_a, grad_c, grad_own = (torch.zeros_like(x) if needed else x.new_empty(0) for x, needed in wanted)
        grad_t = total.new_zeros(())
        takes = self.takes if self.with_gradient else None
        if takes is not None:
            grad_own += torch.cat(takes.d_own)
            grad_t += takes.d_temperature
        one = float(self.temperature) if not isinstance(self.temperature, Tensor) or self.temperature.ndim == 0 else None
        learned = self.with_gradient and one is not None and isinstance(self.temperature, Tensor)
        for rows, block, own in self._blocks(anchors_AD, candidates_CD):
            temperature = torch.as_tensor(self.temperature)[rows] if one is None else one
            found = None if self.detector is None else self.detector.find(block)
            levels = (Roles(),) if found is None else found.levels
            if found is not None:
                self.found.append(found.update)
            if takes is not None:
                push_RC = self.scratch("push", len(block.sim_RC), len(candidates_CD), anchors_AD)
                takes.push(block, rows, push_RC)
            share, proposed = 1.0 / (num_anchors * len(levels)), list[Mapping[str, Tensor]]()
            for level, roles in enumerate(levels):
                sim_RC = block.sim_RC if level == len(levels) - 1 else block.sim_RC.clone()
                settled = settle(block, roles, own, self.policy, sim_RC, temperature, self.labels is not None)
                counts += count(block, settled.kin, own, self.labels, settled.flagged_R)
                lse_R, p_RC = _softmax(sim_RC, temperature, settled.weight_R), sim_RC
                mean_RD = p_RC @ candidates_CD if one is None else None
                pooled = _pooled(settled) if self.policy.pools_kin else None
                told = Rows(
                    own_AP[rows],
                    lse_R,
                    settled.weight_R.log(),
                    settled.kin_sum_R,
                    settled.flagged_R,
                    None if pooled is None else pooled[0],
                    block.ids,
                    block.num_views,
                    temperature,
                    None if mean_RD is None else (mean_RD * anchors_AD[rows]).sum(1),
                    None if self.pairs.degree is None else self.pairs.degree[rows],
                )
                terms = self.terms(told)
                total += terms.loss_R.sum() * share
                proposed.append(terms.update)
                if self.gives is not None:
                    self.gives.note(roles, settled, lse_R, p_RC, terms.d_lse_R * share)
                    self.gives.d_own.append(terms.d_own_RP * share)
                    self.gives.d_temperature += 0.0 if terms.d_temperature_R is None else terms.d_temperature_R.sum() * share
                if not self.with_gradient:
                    continue
                grad_own[rows] += terms.d_own_RP * share
                scale_R1 = (terms.d_lse_R * (share / temperature)).unsqueeze(1)
                outside_R1 = None
                if takes is not None:
                    torch.addcmul(push_RC, p_RC, scale_R1, out=p_RC)
                elif self.policy.action == "attract" and settled.kin is not None:
                    p_RC *= scale_R1
                    pull_M = (terms.d_kin_R * share)[settled.kin[0]]
                    if pooled is not None and terms.d_kin_lse_R is not None:
                        pull_M = pull_M + pooled[1] * (terms.d_kin_lse_R * (share / temperature))[settled.kin[0]]
                    p_RC[settled.kin] += pull_M
                else:  # the row's factor is taken out of the matrix
                    outside_R1 = scale_R1
                block_RD = p_RC @ candidates_CD if mean_RD is None or outside_R1 is None else mean_RD
                if outside_R1 is not None:
                    block_RD *= outside_R1
                if moving:
                    grad_c.addmm_(p_RC.T, anchors_AD[rows] if outside_R1 is None else anchors_AD[rows] * outside_R1)
                grad_a[rows] += block_RD
                if learned:  # Σ s·∂loss/∂s, less what kin have of it, is −t·∂loss/∂t by way of lse
                    assert terms.d_temperature_R is not None, f"{self.terms} gives no derivative by the temperature"
                    by_lse = (block_RD * anchors_AD[rows]).sum() - share * (terms.d_kin_R * settled.kin_sum_R).sum()
                    grad_t += share * terms.d_temperature_R.sum() - by_lse / temperature
            self.updates.append(proposed)
        similar = measure(anchors_AD, candidates_CD, own_AP, self.pairs, self.labels)
        self.stats = Stats.from_counts(torch.cat((counts, similar)))
        return total, (grad_a, grad_c, grad_own, grad_t)

    def _blocks(self, anchors_AD: Tensor, candidates_CD: Tensor) -> Iterator[tuple[slice, Block, Places]]:
        """Row blocks that never part the views of a sample, with the places where the candidate is the anchor's own. A block is
        overwritten by the next."""
        pairs = self.pairs
        keys_B, keys_C = (pairs.ids, pairs.candidate_ids) if pairs.candidate_groups is None else (pairs.groups, pairs.candidate_groups)
        assert keys_B is not None
        sorted_C, order_C = keys_C.sort()
        views, num_candidates = pairs.num_views, len(candidates_CD)
        limit = _BLOCK_ELEMENTS.get(anchors_AD.device.type, _BLOCK_ELEMENTS["default"])
        step = max(1, (self.block_rows or limit // max(1, num_candidates)) // views)
        for first in range(0, len(pairs.ids), step):
            samples = slice(first, first + step)
            rows = slice(first * views, min((first + step) * views, len(anchors_AD)))
            held_RC = self.scratch("sim", rows.stop - rows.start, num_candidates, anchors_AD)
            sim_RC = torch.mm(anchors_AD[rows], candidates_CD.T, out=held_RC)
            own = own_matches(keys_B[samples].repeat_interleave(views), sorted_C, order_C)
            sim_RC[own] = -torch.inf
            negatives_R = num_candidates - torch.bincount(own[0], minlength=len(sim_RC))
            spare = self.scratch("spare", 2, min(sim_RC.numel(), CACHED), anchors_AD)
            yield rows, Block(sim_RC, pairs.ids[samples], pairs.candidate_ids, views, negatives_R, spare), own


class _Function(torch.autograd.Function):
    """Takes the gradient in the forward pass, where the similarities are at hand, and only scales it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, candidates: Tensor, own: Tensor, temperature: Tensor | None, contrast: Contrast) -> Tensor:
        total, gradients = contrast.run(anchors, candidates, own)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * x if needed else None for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)), None


def _pooled(settled: Settled) -> tuple[Tensor, Tensor]:
    """(R,) log Σ exp(s / t) over each row's kin, −inf without any, and (M,) the share of each place in it."""
    lse_R = torch.full_like(settled.weight_R, -torch.inf)
    if settled.kin is None or settled.kin_logit_M is None or not len(settled.kin_logit_M):
        return lse_R, lse_R[:0]
    row_M, logit_M = settled.kin[0], settled.kin_logit_M
    top_R = lse_R.scatter_reduce(0, row_M, logit_M, "amax")
    sum_R = torch.zeros_like(lse_R).index_add_(0, row_M, (logit_M - top_R[row_M]).exp())
    lse_R = top_R + sum_R.log()
    return lse_R, (logit_M - lse_R[row_M]).exp()


def _softmax(sim_RC: Tensor, temperature: float | Tensor, weight_R: Tensor) -> Tensor:
    """Makes the shares of the kept negatives of `sim_RC`; (R,) their log-sum-exp at this temperature. 0 and −inf for a row without any."""
    logits_RC = sim_RC.div_(temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature)
    # lse = logit − log share at any candidate whose share is not too small to be exact: the largest of the first few, unless it is so far
    # below 1 / t, above which there is nobody.
    logit_R, place_R = logits_RC[:, :_PROBED].max(1)
    if not (logit_R > 1 / temperature + math.log(logits_RC.shape[1]) - _DEEPEST).all():
        logit_R, place_R = logits_RC.max(1)
    torch.softmax(logits_RC, 1, out=sim_RC)
    lse_R = logit_R - sim_RC.gather(1, place_R.unsqueeze(1)).squeeze(1).log()
    bare_R = weight_R == 0
    if bare_R.any():
        sim_RC[bare_R], lse_R[bare_R] = 0.0, -torch.inf
    return lse_R
