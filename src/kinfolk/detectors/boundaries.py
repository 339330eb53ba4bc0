"""Two thresholds per sample that bound its ring, learned from a few of its candidates a visit, so that nothing is ever selected.

A threshold λ is to have the share f of the sample's negatives below it. Similarities near λ are taken as logistic of scale β, so that
logit(share below) grows by one with every β. With p(x) the share below x in a visit of n sampled similarities, e the evidence of the
visits before and a = min(½, n f(1 − f) / (n f(1 − f) + e)) the weight of this one, n f(1 − f) being the inverse variance of logit p:

    λ ← λ + β (logit f − logit f_before)                         where annealing has moved the target since the last visit
    β ← β (2 / (logit p(λ + β) − logit p(λ − β)))^a              the scale at this very place, by at most a factor of 2
    λ ← λ + a β (logit f − logit p(λ))
    e ← min(e + n f(1 − f), 100)                                 the floor of the step, so that λ follows an encoder that moves

The first visit takes λ and β from the sampled similarities' own quantiles.

Dimension key: R rows of a block, C candidates, S sampled candidates, b samples, V views, M = V·S, T three levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.detectors.order import sampled
from kinfolk.detectors.quantile import State
from kinfolk.pairs import Block
from kinfolk.stores import PerSample
from kinfolk.stores.exact import Exact

SAMPLED = 4096
_EVIDENCE, _TRUST, _FINEST = 100.0, 0.5, 1e-5
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

    def learned(self, block: Block, lower: float, upper: float) -> State:
        """The state that this visit leads to."""
        state, sample_RS = self.read(block), sampled(block.sim_RC, SAMPLED, int(self.turn))
        known_R = torch.gt(sample_RS, -2, out=torch.empty_like(sample_RS)).sum(1)
        n_b = known_R.view(-1, block.num_views).sum(1).to(state["lower_level"].dtype)
        sim_bM = sample_RS.reshape(len(block.ids), -1)
        new = dict(state)
        for name, share in (("lower", lower), ("upper", upper)):
            old = {field: state[f"{name}_{field}"] for field in _FIELDS}
            if 0 < share < 1:
                moved = visited(sim_bM, n_b, old, share)
                new |= {f"{name}_{field}": rows.where(n_b > 0, old[field]) for field, rows in moved.items()}
            else:  # no bound; it starts anew should there be one again
                none = torch.full_like(old["level"], -math.inf if share <= 0 else math.inf)
                new |= {f"{name}_level": none, f"{name}_aim": torch.zeros_like(none)}
        return new

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        """Writes what the visits of a step led to."""
        self.store.write(ids, update, sound)
        self.turn += 1


def visited(sim_bM: Tensor, n_b: Tensor, state: State, share: float) -> State:
    """The formulae of the module docstring; −inf among the similarities does not count."""
    fresh = state["aim"] == 0
    weight = n_b * (share * (1 - share))
    trust = (weight / (weight + state["evidence"])).clamp(max=_TRUST)
    target = math.log(share / (1 - share))
    scale = state["scale"].clamp(min=_FINEST)
    level = state["level"] + scale * (target - torch.logit(state["aim"].clamp(1e-6, 1 - 1e-6)))
    level_bT = torch.stack((level - scale, level, level + scale), 1)
    logit_bT = _logit_below(sim_bM, n_b, level_bT.masked_fill(fresh.unsqueeze(1), 0.0))
    stretch = (2 / (logit_bT[:, 2] - logit_bT[:, 0]).clamp(min=1e-6)).clamp(0.5, 2) ** trust
    scale = (scale * stretch).clamp(min=_FINEST, max=1.0)
    level = level + trust * scale * (target - logit_bT[:, 1])
    if fresh.any():
        first_level, first_scale = _own_quantile(sim_bM[fresh], n_b[fresh], share)
        level[fresh], scale[fresh] = first_level.to(level.dtype), first_scale.to(scale.dtype)
    evidence = (torch.where(fresh, 0.0, state["evidence"]) + weight).clamp(max=_EVIDENCE)
    return {"level": level.clamp(-1, 1), "scale": scale, "evidence": evidence, "aim": torch.full_like(level, share)}


def _logit_below(sim_bM: Tensor, n_b: Tensor, level_bT: Tensor) -> Tensor:
    """(b, T) logit of the share of finite similarities below each level, with half a similarity on either side so that it is finite."""
    level_bT = level_bT.to(sim_bM.dtype)
    mask_bM = torch.empty_like(sim_bM)  # of numbers: summed faster than bools
    above_bT = torch.stack([torch.ge(sim_bM, level_b1, out=mask_bM).sum(1) for level_b1 in level_bT.unsqueeze(2).unbind(1)], 1)
    above_bT = above_bT.to(n_b.dtype)
    return ((n_b.unsqueeze(1) - above_bT + 0.5) / (above_bT + 0.5)).log()


def _own_quantile(sim_bM: Tensor, n_b: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """(b,), (b,) the similarity with that share below it, and the scale from those one logit to either side."""
    order_bM, target = sim_bM.sort(1).values, math.log(share / (1 - share))
    absent_b = sim_bM.shape[1] - n_b
    low_b, level_b, high_b = (
        order_bM.gather(1, (absent_b + at * n_b).long().clamp(max=sim_bM.shape[1] - 1).unsqueeze(1)).squeeze(1)
        for at in (1 / (1 + math.exp(-target - shift)) for shift in (-1, 0, 1))
    )
    return level_b, ((high_b - low_b) / 2).clamp(min=_FINEST)
