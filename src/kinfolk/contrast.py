"""The engine: a contrastive loss in row blocks, exact gradient, memory linear in the batch.

A block of anchors is one differentiable function: similarities → kin → weights and targets → the
loss of each row. Autograd differentiates it while the block is alive, and only the gradients of the
inputs outlive it. No derivative is written by hand, except that of the log-sum-exp, which would
otherwise keep a block several times over.

    lse_i = log Σ_j w_ij exp(s_ij / t),     pull_i = Σ_j y_ij s_ij

w_ij is 1 for a negative. For kin it is 0 with "eliminate" and 1 − degree with "reweight"; y_ij is
the degree of kin with "attract", otherwise 0.

Dimension key: A anchors, B samples (A = B·V), C candidates, D embedding, P positives per anchor,
R rows of a block, b samples of a block (R = b·V), L levels of a detector.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.pairs import OUT, Action, Block, Kin, Pairs, check_answer
from kinfolk.stats import Stats, count

BLOCK_ENTRIES, MANY_ENTRIES = {"cpu": 1 << 21}, 1 << 26
"""Similarities of a block: 8 MB on a CPU, about its cache; 256 MB on other devices."""
EMPTY = OUT / 1e10
"""A log-sum-exp below this is that of a row without negatives."""
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Policy:
    action: Action = "eliminate"
    kin_weight: float = 0.5  # of kin without degrees with "reweight"
    min_negatives: int = 1  # of each anchor, the least similar, are never removed
    attracted_stay: bool = True  # in the denominator (InfoNCE) or leave it (SogCLR)


@torch.no_grad()
def weigh(
    sim_RC: Tensor, out_RC: Tensor, kin: Kin, policy: Policy
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(R, C) log w_ij; y_ij, None: nothing is attracted; bool, the candidates that are kin after
    `min_negatives`, None: none. `out_RC`: candidates that are never negatives."""
    none = sim_RC.new_zeros(())
    if kin.ignore is not None:
        out_RC = out_RC | kin.ignore
        sim_RC = torch.where(kin.ignore, OUT, sim_RC)
    if kin.degree is None:
        return torch.where(out_RC, OUT, none), None, None
    graded, attracts = kin.degree.is_floating_point(), policy.action == "attract"
    kin_RC = (kin.degree > 0 if graded else kin.degree) & ~out_RC
    degree = kin.degree.to(sim_RC.dtype) if graded else torch.ones_like(none)
    if attracts and policy.attracted_stay:
        return torch.where(out_RC, OUT, none), kin_RC * degree, kin_RC
    removed: Tensor | None = None  # the share of their weight that kin lose; None: all of it
    if policy.action == "reweight" and not graded:
        removed = torch.full_like(none, 1 - policy.kin_weight)
    elif policy.action != "eliminate" and graded:
        removed = degree
    near_one = 1 - 8 * torch.finfo(sim_RC.dtype).eps
    gone_RC = kin_RC if removed is None else kin_RC & (removed > near_one)
    if policy.min_negatives:
        kin_RC = kin_RC ^ spare(sim_RC, out_RC, gone_RC, policy.min_negatives)
    y_RC = kin_RC * degree if attracts else None
    if removed is None:
        return torch.where(out_RC | kin_RC, OUT, none), y_RC, kin_RC
    left_RC = torch.where(kin_RC, torch.log1p(-removed).clamp(min=OUT), none)
    return torch.where(out_RC, OUT, left_RC), y_RC, kin_RC


def spare(sim_RC: Tensor, out_RC: Tensor, gone_RC: Tensor, min_negatives: int) -> Tensor:
    """(R, C) bool: the least similar kin, which stay negatives because their row would have fewer
    than `min_negatives`. `sim_RC`: `OUT` where `out_RC`. Ties, up to rounding, are treated alike,
    so that the order of the candidates does not matter."""
    columns = sim_RC.shape[1]
    number = min(min_negatives, columns)
    missing_R1 = number - columns + (out_RC | gone_RC).sum(1, dtype=torch.int32, keepdim=True)
    if number == 1:  # the default; where one is missing, all candidates are gone
        cut_R1 = F.threshold(sim_RC, -2.0, math.inf).amin(1, keepdim=True)
    else:
        gone_sim_RC = torch.where(gone_RC, sim_RC, torch.inf)
        least_RK = gone_sim_RC.topk(number, 1, largest=False).values
        cut_R1 = least_RK.gather(1, (missing_R1 - 1).clamp(0, number - 1).long())
    cut_R1 = torch.where(missing_R1 > 0, cut_R1 + 8 * torch.finfo(sim_RC.dtype).eps, OUT)
    return gone_RC & (sim_RC <= cut_R1)


@dataclass(frozen=True)
class Rows:
    ids: Tensor  # (b,) sample ids, `num_views` rows for each
    num_views: int
    t: Tensor  # (R,) temperature
    pos: Tensor  # (R, P) similarities of the positives
    sim: Tensor  # (R, C) similarities of the candidates
    log_w: Tensor  # (R, C) log-weights in the denominator; `OUT`: not in it
    y: Tensor | None  # (R, C) targets of attracted kin; None: nothing is attracted
    kin: Tensor | None  # (R, C) bool, the flagged candidates; None: none
    own: Tensor  # (R, C) bool, candidates of the anchor's sample or group
    degree: Tensor | None  # (R, P), see `Pairs.degree`
    parameters: tuple[Tensor, ...]  # learned scalars besides the temperature, such as a bias

    def log_sum(self, log_w: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """(R,) log Σ_j w_ij exp(scale · s_ij / t)."""
        log_w = self.log_w if log_w is None else log_w
        found: Tensor = LogSumExp.apply(log_w, self.sim, scale / self.t.unsqueeze(1))  # type: ignore[no-untyped-call]
        return found

    def log_pos(self) -> Tensor:
        """(R,) log Σ_p exp(s_ip / t) over the positives."""
        return (self.pos / self.t.unsqueeze(1)).logsumexp(1)

    def weight(self) -> Tensor:
        """(R,) Σ_j w_ij."""
        return self.log_w.exp().sum(1)

    def pull(self, own_weight: float | None = None) -> Tensor:
        """(R,) mean similarity of positives and attracted kin, which count by their degrees.
        `own_weight`: the share of the positives where there are kin; None: each counts as one."""
        own, number = self.pos.mean(1), self.pos.shape[1]
        if self.y is None:
            return own
        mass, kin = self.y.sum(1), (self.y * self.sim).sum(1)
        if own_weight is None:
            return (number * own + kin) / (number + mass)
        shared = own_weight * own + (1 - own_weight) * kin / mass.clamp(min=1e-30)
        return torch.where(mass > 0, shared, own)


class LogSumExp(torch.autograd.Function):
    """log Σ_j exp(s_ij · inv_t_i + log w_ij), keeping one matrix for the backward pass."""

    @staticmethod
    def forward(ctx: Any, log_w: Tensor, sim: Tensor, inv_t: Tensor) -> Tensor:
        x = torch.addcmul(log_w, sim, inv_t)
        top = x.amax(1, keepdim=True)
        x = x.sub_(top).mul_(1 / math.log(2)).exp2_()  # three times as fast as `exp_` on a CPU
        total = x.sum(1, keepdim=True)
        ctx.save_for_backward(x, total, inv_t, sim if ctx.needs_input_grad[2] else None)
        return (top + total.log()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, total, inv_t, sim = ctx.saved_tensors
        scale = grad.unsqueeze(1) / total
        by_inv_t = None if sim is None else (x * sim).sum(1, keepdim=True) * scale
        return None, x * (scale * inv_t), by_inv_t


@dataclass(frozen=True)
class Contrast:
    row_loss: Callable[[Rows], tuple[Tensor, State]]  # (R,) losses, and (b,) state to write
    policy: Policy = Policy()
    find: Callable[[Block], Kin | tuple[Kin, ...]] | None = None  # of a detector
    prepared: Any = None  # see `Block`
    labels_N: Tensor | None = None  # of all samples, for the counts; below 0: unknown
    block_rows: int | None = None  # held at a time; None: as many as `BLOCK_ENTRIES` allows
    num_anchors: int | None = None  # of all ranks; None: those of the pairs


Summed = tuple[Tensor, Tensor, State, State]
BlockLoss = Callable[..., Summed]


def block_loss(how: Contrast, pairs: Pairs, t: Tensor, *parameters: Tensor) -> Summed:
    """The summed loss of a block; its counts; and the state that detector, (b, …), and loss, (b,
    L), propose."""
    sim_RC = pairs.anchors @ pairs.candidates.T
    pos_RP = (pairs.anchors.unsqueeze(1) * pairs.positives).sum(2)
    own_RC, levels, counts, update = find_kin(how, pairs, sim_RC.detach(), pos_RP.detach())
    given = pairs.ids, pairs.num_views, t.expand(len(sim_RC)), pos_RP, sim_RC
    losses, states = [], []  # `list[Tensor]()` would break a compiled graph
    for log_w_RC, y_RC, kin_RC in levels:
        rows = Rows(*given, log_w_RC, y_RC, kin_RC, own_RC, pairs.degree, parameters)
        loss_R, state = how.row_loss(rows)
        losses.append(loss_R.sum())
        states.append(state)
    proposed = {name: torch.stack([state[name] for state in states], 1) for name in states[0]}
    return torch.stack(losses).mean(), counts, update, proposed


@torch.no_grad()
def find_kin(
    how: Contrast, pairs: Pairs, sim_RC: Tensor, pos_RP: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor | None, Tensor | None]], Tensor, State]:
    """(R, C) bool, the candidates of the anchor's sample or group; of each level, see `weigh`; the
    counts; and the state that the detector proposes."""
    ids_b, ids_C, views = pairs.ids, pairs.candidate_ids, pairs.num_views
    keys_b, keys_C, owners_C = pairs.groups, pairs.candidate_groups, pairs.candidate_owners
    if keys_b is None or keys_C is None:
        keys_b, keys_C = ids_b, ids_C
    out_bC = keys_b.unsqueeze(1) == keys_C
    own_RC = out_RC = out_bC.repeat_interleave(views, 0)
    if owners_C is not None:
        out_bC = out_bC | ((owners_C >= 0) & (owners_C != ids_b.unsqueeze(1)))
        out_RC = out_bC.repeat_interleave(views, 0)
    if pairs.degree is not None:
        pos_RP = pos_RP[:, :1]  # the first is the other view, the rest are retrieved keys
    seen_RC = torch.where(out_RC, OUT, sim_RC)
    num_negatives_b = len(ids_C) - out_bC.sum(1, dtype=torch.int32)
    known = num_negatives_b, pos_RP, pairs.guide, pairs.candidate_guide, how.prepared
    block = Block(seen_RC, ids_b, ids_C, views, *known)
    found = (Kin(),) if how.find is None else check_answer(how.find(block), block)
    levels = [weigh(seen_RC, out_RC, kin, how.policy) for kin in found]
    labels = None if how.labels_N is None else (how.labels_N[ids_b], how.labels_N[ids_C])
    counts = [count(block, kin_RC, labels, not n) for n, (_, _, kin_RC) in enumerate(levels)]
    update = {name: value for kin in found for name, value in kin.update.items()}
    return own_RC, levels, torch.stack(counts).sum(0), update


def compile_block_loss() -> BlockLoss:
    """Each call compiles a new function: the compiler keeps at most eight variants of a function,
    and then silently runs it as it is."""
    new = types.FunctionType(block_loss.__code__.replace(), block_loss.__globals__)
    return torch.compile(new, dynamic=True)


class Outcome(NamedTuple):
    loss: Tensor
    stats: Stats
    found: State  # (B, …)
    proposed: State  # (B, L)


def contrast(
    how: Contrast,
    pairs: Pairs,
    temperature: Tensor,
    *parameters: Tensor,
    run: BlockLoss = block_loss,
) -> Outcome:
    """The mean loss of all anchors of `pairs`, which have unit norm. `parameters`: learned scalars
    besides the temperature."""
    samples, number = len(pairs.ids), how.num_anchors or len(pairs.anchors)
    inputs = (pairs.anchors, pairs.candidates, pairs.positives, temperature, *parameters)
    by_row = [True, False, True] + [False] * (1 + len(parameters))
    needs_grad = [torch.is_grad_enabled() and x.requires_grad for x in inputs]
    # made once: tensors kept from each block would scatter the memory that the next ones need
    grads = [
        torch.zeros_like(x) if want else None for x, want in zip(inputs, needs_grad, strict=True)
    ]
    total, counts = temperature.new_zeros(()), Stats.empty(temperature.device).counts
    update, proposed = dict[str, Tensor](), dict[str, Tensor]()
    many = BLOCK_ENTRIES.get(temperature.device.type, MANY_ENTRIES) // len(pairs.candidates)
    step = max(1, (how.block_rows or many) // pairs.num_views)

    def cut(x: Tensor | None, first: int) -> Any:
        if x is not None:
            return x[first * len(x) // samples : (first + step) * len(x) // samples]
        return None

    for first in range(0, samples, step):
        cuts = [cut(x, first) if own else x for x, own in zip(inputs, by_row, strict=True)]
        leaves = [x.detach().requires_grad_(want) for x, want in zip(cuts, needs_grad, strict=True)]
        a, c, p, *scalars = leaves
        changed = {n: cut(getattr(pairs, n), first) for n in ("ids", "groups", "degree", "guide")}
        changed |= {"anchors": a, "candidates": c, "positives": p}
        with torch.enable_grad():
            loss, found, *states = run(how, pairs.with_changes(**changed), *scalars)
        total += loss.detach()
        counts += found
        for whole, part in zip((update, proposed), states, strict=True):
            for name, rows in part.items():
                if name not in whole:
                    whole[name] = rows.new_empty(samples, *rows.shape[1:])
                cut(whole[name], first).copy_(rows)
        wrt = [x for x in leaves if x.requires_grad]
        derived = iter(torch.autograd.grad(loss, wrt, materialize_grads=True) if wrt else ())
        for grad, own in zip(grads, by_row, strict=True):
            if grad is not None:
                (cut(grad, first) if own else grad).add_(next(derived))
    loss = _WithGradient.apply(total / number, grads, number, *inputs)  # type: ignore[no-untyped-call]
    return Outcome(loss, Stats(counts), update, proposed)


class _WithGradient(torch.autograd.Function):
    """The mean loss; `grads` are the derivatives of the sum over `number` anchors."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, grads: list[Tensor | None], number: int, *inputs: Tensor
    ) -> Tensor:
        ctx.grads, ctx.number = grads, number
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a contrastive loss cannot be differentiated twice; leave out `create_graph`"
            )
        scale = by_loss / ctx.number
        return None, None, None, *(None if x is None else scale * x for x in ctx.grads)
