"""Learning a quantile of each sample's similarities from batches: three step rules, and the batch's own quantile to start from.

λ is to leave the share α of all negatives above it. What a visit knows of it: n negatives, the share p of them above λ.

    sgd       λ ← λ − lr (α − p)
    adam      the same gradient through Adam, bias-corrected by the sample's own number of updates
    tracking  peaks over a threshold: the similarities above λ are taken as exponential, of scale β. With ρ = p / α, the trust
              a = min(¼, αn / (αn + e)) in this visit against the e expected peaks seen before, and D = 1 + a (ρ − 1), the relative
              share when the visit is mixed in,
                  β ← β (1 + a (x − ρ) / D)      x: what ρ would be by the peaks' heights, cut at β so that far clusters do not count
                  λ ← λ + β log D                where the exponential has the share α again
                  e ← e + αn (ρ − ½)             within [0, 32]: the floor of the step; it falls where peaks stay out
              A threshold that nothing reaches and no evidence supports falls by lr a visit.

The drift common to all samples, with ρ̄ = found / expected peaks of a whole batch and η = expected / (expected + 1000), at most ⅕:
    c ← (1 − η/5) c + log(1 + η (ρ̄ − 1))

Dimension key: R rows of a block, C candidates, b samples, M similarities of a sample over all its views.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]

EVIDENCE, TRUST = 32.0, 0.25
_WINDOW, _RATE, _LEAK, _FASTEST = 1000.0, 0.2, 0.2, 2.0
_CUT = 1 - math.exp(-1)  # mean of min(x, 1) for x exponential of scale 1


@dataclass(frozen=True)
class Visit:
    """What one visit measured of each sample, (b,) each: the share above λ, the mean height of peaks cut at β in units of β, and n."""

    share: Tensor
    height: Tensor
    n: Tensor


def batch_quantile(sim_bM: Tensor, n_b: Tensor, alpha: float) -> Tensor:
    """(b,) the (1 − α) quantile of the n finite entries of each row, interpolated as `torch.quantile` does; 1 where there are none."""
    place_b = alpha * (n_b.double() - 1).clamp(min=0)
    first_b = place_b.floor().long()
    most = min(int(first_b.max()) + 2, sim_bM.shape[1])
    top_bK = sim_bM.topk(most, dim=1).values.double()
    second_b = torch.minimum(first_b + 1, (n_b.long() - 1).clamp(min=0))
    upper_b, lower_b = (top_bK.gather(1, at.unsqueeze(1)).squeeze(1) for at in (first_b, second_b))
    return torch.lerp(upper_b, lower_b, place_b - first_b).where(n_b > 0, 1.0)


def sgd_step(state: State, visit: Visit, alpha: float, lr: float) -> State:
    """Equation 4 of the GloFND paper."""
    return {"threshold": (state["threshold"] - lr * (alpha - visit.share)).clamp(-1, 1)}


def adam_step(state: State, visit: Visit, alpha: float, lr: float, betas: tuple[float, ...], updates: Tensor) -> State:
    """Adam on equation 4's gradient. `updates`: (b,) how many the sample has had, this one included."""
    gradient = alpha - visit.share
    m = betas[0] * state["m"] + (1 - betas[0]) * gradient
    v = betas[1] * state["v"] + (1 - betas[1]) * gradient.square()
    m_hat, v_hat = (moment / (1 - beta**updates) for moment, beta in zip((m, v), betas, strict=True))
    return {"threshold": (state["threshold"] - lr * m_hat / (v_hat.sqrt() + 1e-8)).clamp(-1, 1), "m": m, "v": v}


def tracking_step(state: State, visit: Visit, alpha: float, lr: float) -> State:
    """The rule of the module docstring."""
    evidence, expected = state["evidence"], alpha * visit.n
    ratio, by_height = visit.share / alpha, visit.height / (alpha * _CUT)
    trust = (expected / (expected + evidence)).clamp(max=TRUST)
    mixed = 1 + trust * (ratio - 1)
    scale = state["scale"] * torch.where(ratio > 0, 1 + trust * (by_height - ratio) / mixed, 1.0)
    scale = scale.clamp(min=1e-3)
    evidence = (evidence + expected * (ratio - 0.5)).clamp(0, EVIDENCE)
    lost = (ratio == 0) & (evidence == 0) | (ratio < 0.5) & (expected * (1 - ratio).square() > 16)  # four standard deviations
    threshold = state["threshold"] + torch.where(lost, -lr, scale * mixed.log())
    return {"threshold": threshold.clamp(-1, 1), "scale": scale, "evidence": evidence}


def followed(drift: Tensor, expected: Tensor, found: Tensor) -> Tensor:
    """The common drift, in scales per visit, after a batch with `found` peaks where `expected` were to be."""
    rate = (expected / (expected + _WINDOW)).clamp(max=_RATE)
    ratio = torch.where(expected > 0, found / expected.clamp(min=1e-12), 1.0)
    return ((1 - _LEAK * rate) * drift + torch.log1p(rate * (ratio - 1))).clamp(-_FASTEST, _FASTEST)
