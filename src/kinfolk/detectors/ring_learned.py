"""Two thresholds per sample that bound its ring, learned from counts, so that nothing is sorted.

A threshold λ is to have the share f of the sample's negatives below it. Similarities near λ are
taken as logistic of scale β, so that logit(share below) grows by one with every β. With p(x) the
share below x in a visit of n similarities, w = n f(1 − f) its weight, e the weight of the visits
before and a = min(½, w / (w + e)) the trust in this one:

    λ ← λ + β Δ,  e ← e / (1 + e (0.3 Δ)²)         Δ: by how much annealing has moved logit f
    the ring of this visit is bounded by this λ
    λ ← λ + a β (f − p(λ)) / (f (1 − f))           by at most 2 β
    β ← β exp(a (1 − (p(λ + β) − p(λ − β)) / m))   m: the share a logistic has there
    e ← min(e + w, 100)                            so that λ follows an encoder that moves

The step is linear in p and its factor is known before the visit: where λ rests, the mean of p(λ)
is f, however few candidates a visit has. The first visit takes λ and β from mean and standard
deviation, with the evidence of one candidate.

Dimension key: b samples of a block, V views, C candidates, T three levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.pairs import Block
from kinfolk.stores import PerSample
from kinfolk.stores.per_sample import Exact

_EVIDENCE, _TRUST, _FARTHEST, _EXTRAPOLATION, _FINEST = 100.0, 0.5, 2.0, 0.3, 1e-5
_FIELDS = ("level", "scale", "evidence", "aim")
State = dict[str, Tensor]


class Boundaries(Exact):
    """The thresholds of all samples.

    Args:
        num_samples: N; ids are in [0, N).

    State: per sample and boundary λ, β, e and the share f it was last aimed at (0: not visited).
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        fields = {
            f"{name}_{field}": value
            for name, level in (("lower", -math.inf), ("upper", math.inf))
            for field, value in zip(_FIELDS, (level, 0.0, 0.0, 0.0), strict=True)
        }
        self.store = PerSample(num_samples, **fields)

    def learn(self, block: Block, lower: Tensor, upper: Tensor) -> tuple[State, Tensor, Tensor]:
        """The state after this visit, and the (b,) lower and upper levels that bound its ring.
        `lower`, `upper`: shares, without dimensions; 0 and 1 mean that there is no bound."""
        state, n_b = self.store.read(block.ids), block.num_per_sample.to(self.store.rows.dtype)
        new, bounds = dict(state), []
        for name, share in (("lower", lower.to(n_b.dtype)), ("upper", upper.to(n_b.dtype))):
            old = {field: state[f"{name}_{field}"] for field in _FIELDS}
            moved, level = visit(block.sim_bVC, n_b, old, share)
            none = torch.where(share > 0.5, math.inf, -math.inf).expand_as(level)
            bounded_b = (share > 0) & (share < 1)
            moved |= {
                "level": moved["level"].where(bounded_b, none),
                "aim": moved["aim"] * bounded_b,
            }
            new |= {
                f"{name}_{field}": rows.where(n_b > 0, old[field]) for field, rows in moved.items()
            }
            bounds.append(level.where(n_b > 0, old["level"]).where(bounded_b, none))
        return new, bounds[0], bounds[1]

    def observe(
        self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Tensor | None = None
    ) -> None:
        """Writes the state after the visits of a step."""
        self.store.write(ids, update, is_finite)


def visit(sim_bVC: Tensor, n_b: Tensor, state: State, share: Tensor) -> tuple[State, Tensor]:
    """The formulae above: the state after the visit, and the (b,) level that bounds this ring."""
    share = share.clamp(1e-6, 1 - 1e-6)
    fresh, target, variance = state["aim"] == 0, torch.logit(share), share * (1 - share)
    first_level, first_scale = first_visit(sim_bVC, n_b, target)
    moved = (target - torch.logit(state["aim"].clamp(1e-6, 1 - 1e-6))).masked_fill(fresh, 0.0)
    scale = torch.where(fresh, first_scale, state["scale"]).clamp(_FINEST, 1.0)
    before = torch.where(fresh, first_level, state["level"] + scale * moved).clamp(-1, 1)
    evidence = torch.where(
        fresh, 1.0, state["evidence"] / (1 + state["evidence"] * (_EXTRAPOLATION * moved) ** 2)
    )
    weight = n_b * variance
    trust = (weight / (weight + evidence)).clamp(max=_TRUST)
    below_bT = share_below(sim_bVC, n_b, torch.stack((before - scale, before, before + scale), 1))
    step = (trust * (share - below_bT[:, 1]) / variance).clamp(-_FARTHEST, _FARTHEST)
    expected = torch.sigmoid(target + 1) - torch.sigmoid(target - 1)
    stretch = (1 - (below_bT[:, 2] - below_bT[:, 0]) / expected).clamp(min=-1)
    new = {
        "level": (before + step * scale).clamp(-1, 1),
        "scale": (scale * (trust * stretch).exp()).clamp(_FINEST, 1.0),
        "evidence": (evidence + weight).clamp(max=_EVIDENCE),
        "aim": share.expand_as(before),
    }
    return new, before


def first_visit(sim_bVC: Tensor, n_b: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(b,), (b,) level and scale of a logistic with the mean and standard deviation of the
    visit."""
    seen_bVC, n_b = sim_bVC > -2, n_b.clamp(min=1)
    mean_b = torch.where(seen_bVC, sim_bVC, 0.0).sum((1, 2)) / n_b
    off_bVC = torch.where(seen_bVC, sim_bVC - mean_b.to(sim_bVC.dtype).view(-1, 1, 1), 0.0)
    variance_b = off_bVC.square().sum((1, 2)) / n_b
    scale_b = variance_b.to(n_b.dtype).sqrt() * (math.sqrt(3) / math.pi)
    return mean_b.to(n_b.dtype) + scale_b * target, scale_b


def share_below(sim_bVC: Tensor, n_b: Tensor, level_bT: Tensor) -> Tensor:
    """(b, T) the share of the n similarities below each level."""
    levels = level_bT.to(sim_bVC.dtype).view(-1, 3, 1, 1).unbind(1)
    at_least_bT = torch.stack([(sim_bVC >= level).sum((1, 2)) for level in levels], 1)
    return 1 - at_least_bT.to(n_b.dtype) / n_b.clamp(min=1).unsqueeze(1)
