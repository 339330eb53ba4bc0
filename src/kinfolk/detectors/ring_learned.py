"""Two thresholds per sample that bound its ring, learned from a few of its candidates a visit, so that nothing is ever selected.

A threshold λ is to have the share f of the sample's negatives below it. Similarities near λ are taken as logistic of scale β, so that
logit(share below) grows by one with every β. With p(x) the share below x in a visit of n sampled similarities, w = n f(1 − f) its weight,
e the weight of the visits before and a = min(½, w / (w + e)) the trust in this one:

    λ ← λ + β Δ,  e ← e / (1 + e (0.3 Δ)²)                       Δ = logit f − logit f_before: how far annealing has moved the target
    the ring of this visit is bounded by this λ
    λ ← λ + a β (f − p(λ)) / (f (1 − f))                         by at most 2 β
    β ← β exp(a (1 − (p(λ + β) − p(λ − β)) / m))                 m: the share a logistic has there; by at most a factor of e^a
    e ← min(e + w, 100)                                          the floor of the step, so that λ follows an encoder that moves

The step is linear in p, and its factor is known before the visit: where λ comes to rest, the mean of p(λ) over visits is f, however few
candidates a visit has. A ring bounded by the λ that has already followed the visit would exclude too few of its candidates.

The first visit takes λ and β from the sampled similarities' own quantiles, extrapolated where f is beyond the outermost of them.

Dimension key: R rows of a block, C candidates, S sampled candidates, b samples, V views, M = V·S, T three levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.detectors.selection import sampled
from kinfolk.detectors.thresholds import State
from kinfolk.kinship import others
from kinfolk.pairs import Block
from kinfolk.stores import PerSample
from kinfolk.stores.per_sample import Exact

SAMPLED = 4096
_EVIDENCE, _TRUST, _FARTHEST, _EXTRAPOLATION, _FINEST = 100.0, 0.5, 2.0, 0.3, 1e-5
_FIELDS = ("level", "scale", "evidence", "aim")


class Boundaries(Exact):
    """The thresholds of all samples.

    Args:
        num_samples: N; ids are in [0, N).

    State: per sample and boundary λ, β, e and the share f it was last aimed at (0: never visited); the number of steps taken, which says
    what columns come next.
    """

    on_host = ("turn",)
    turn: Tensor

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        unset = {"scale": 0.0, "evidence": 0.0, "aim": 0.0}
        fields = {f"lower_{name}": value for name, value in {"level": -math.inf, **unset}.items()}
        fields |= {f"upper_{name}": value for name, value in {"level": math.inf, **unset}.items()}
        self.store = PerSample(num_samples, **fields)
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))

    def read(self, block: Block) -> State:
        """The stored state of the block's samples."""
        return self.store.read(block.ids)

    def learned(self, block: Block, lower: float, upper: float) -> tuple[State, Tensor, Tensor]:
        """The state that this visit leads to, and the (b,) lower and upper levels that bound its ring."""
        state, sample_RS = self.read(block), sampled(block.sim_RC, SAMPLED, int(self.turn))
        known_R = others(sample_RS).sum(1)
        n_b = known_R.view(-1, block.num_views).sum(1).to(state["lower_level"].dtype)
        sim_bM = sample_RS.reshape(len(block.ids), -1)
        new, bounds = dict(state), list[Tensor]()
        for name, share in (("lower", lower), ("upper", upper)):
            old = {field: state[f"{name}_{field}"] for field in _FIELDS}
            if 0 < share < 1:
                moved, level = visited(sim_bM, n_b, old, share, block.num_views)
                new |= {f"{name}_{field}": rows.where(n_b > 0, old[field]) for field, rows in moved.items()}
                bounds.append(level.where(n_b > 0, old["level"]))
            else:  # no bound; it starts anew should there be one again
                none = torch.full_like(old["level"], -math.inf if share <= 0 else math.inf)
                new |= {f"{name}_level": none, f"{name}_aim": torch.zeros_like(none)}
                bounds.append(none)
        return new, bounds[0], bounds[1]

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Writes what the visits of a step led to."""
        self.store.write(ids, update, sound)
        self.turn += 1


def visited(sim_bM: Tensor, n_b: Tensor, state: State, share: float, num_views: int = 1) -> tuple[State, Tensor]:
    """The formulae of the module docstring: the state after the visit, and (b,) the level that bounds the ring of this visit.

    −inf among the similarities does not count.
    """
    fresh, target, variance = state["aim"] == 0, _logit(share), share * (1 - share)
    weight, scale = n_b * variance, state["scale"].clamp(min=_FINEST)
    moved = target - torch.logit(state["aim"].clamp(1e-6, 1 - 1e-6))
    evidence = torch.where(fresh, 0.0, state["evidence"] / (1 + state["evidence"] * (_EXTRAPOLATION * moved) ** 2))
    trust = (weight / (weight + evidence)).clamp(max=_TRUST)
    before = (state["level"] + scale * moved).clamp(-1, 1).masked_fill(fresh, 0.0)
    below_bT = _share_below(sim_bM, n_b, torch.stack((before - scale, before, before + scale), 1))
    step = (trust * (share - below_bT[:, 1]) / variance).clamp(-_FARTHEST, _FARTHEST)
    expected = _share(target + 1) - _share(target - 1)
    stretch = (1 - (below_bT[:, 2] - below_bT[:, 0]) / expected).clamp(min=-1)
    level, scale = before + step * scale, (scale * (trust * stretch).exp()).clamp(_FINEST, 1.0)
    if fresh.device.type != "cpu" or bool(fresh.any()):  # on a CPU looking costs nothing, and saves a sort
        first_level, first_scale = _own_quantile(sim_bM, n_b, share, num_views)
        level, scale = first_level.to(level.dtype).where(fresh, level), first_scale.to(scale.dtype).where(fresh, scale)
    level = level.clamp(-1, 1)
    evidence = (evidence + weight).clamp(max=_EVIDENCE)
    return {"level": level, "scale": scale, "evidence": evidence, "aim": torch.full_like(level, share)}, torch.where(fresh, level, before)


def _share_below(sim_bM: Tensor, n_b: Tensor, level_bT: Tensor) -> Tensor:
    """(b, T) the share of finite similarities below each level."""
    level_bT = level_bT.to(sim_bM.dtype)
    mask_bM = torch.empty_like(sim_bM)  # of numbers: summed faster than bools
    above_bT = torch.stack([torch.ge(sim_bM, level_b1, out=mask_bM).sum(1) for level_b1 in level_bT.unsqueeze(2).unbind(1)], 1)
    return 1 - above_bT.to(n_b.dtype) / n_b.clamp(min=1).unsqueeze(1)


def _own_quantile(sim_bM: Tensor, n_b: Tensor, share: float, num_views: int) -> tuple[Tensor, Tensor]:
    """(b,), (b,) the similarity with that share below it, extrapolated from the outermost one where the share is beyond it, and the scale:
    from the order statistics one logit to either side, or the outermost, at least three places apart. The views of a sample count as
    repetitions of each other: the largest of two alike views stands for one in n/2, not in n."""
    order_bM, last_b, target = sim_bM.sort(1).values, (n_b - 1).clamp(min=0), _logit(share)
    low_b, level_b, high_b = (torch.minimum((_share(target + by) * (n_b + 1) - 1).round().clamp(min=0), last_b) for by in (-1, 0, 1))
    places = torch.minimum(low_b, last_b - 3).clamp(min=0), level_b, torch.minimum(high_b.clamp(min=3), last_b)
    low_b, level_b, high_b = (order_bM.gather(1, (sim_bM.shape[1] - 1 - last_b + at).long().unsqueeze(1)).squeeze(1) for at in places)
    low_logit_b, logit_b, high_logit_b = (torch.logit((at + (1 + num_views) / 2) / (n_b + num_views)) for at in places)
    scale_b = ((high_b - low_b) / (high_logit_b - low_logit_b)).nan_to_num(0.0).clamp(_FINEST, 1.0)  # a single similarity has no scale
    return level_b + scale_b * (target - logit_b), scale_b


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _share(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
