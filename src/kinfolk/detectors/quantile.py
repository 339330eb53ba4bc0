"""Learning a quantile of each sample's similarities from batches: three step rules, and a visit's own quantile to start from.

λ is to leave the share α of all negatives above it. A visit shows n negatives, the share p of them above λ.

    sgd       λ ← λ − lr (α − p)
    adam      the same gradient through Adam, bias-corrected by the sample's own number of updates
    tracking  counts at a level u and follows the quantile in units of the mean excess β above it; no constant has the unit of a
              similarity, so a shift and a stretch of all similarities shift and stretch λ. A visit, in this order:

    1. μ and σ, running mean and standard deviation of the similarities: μ ← μ + w (mean − μ), w = max(1/visits, ⅛), and λ moves with μ.
       Where the mean is off by more than max(½, 6/√n) σ (a jump), w = 1 and at most two of the past visits count from here on.
    2. The level. m = max(αn, 1) similarities are expected above u = λ + cβ − β log(m/αn). With αn ≥ 1, u is the threshold itself; below,
       there would be next to nothing to count, so the count is taken lower and the exponential tail of scale β leads from u to λ.
    3. The step. With ρ = number above u / m, x = sum of their excess / m, and the weight a = m / (m + min(m·visits, 16) + 1),
           D = 1 + a (ρ − 1)                      the relative share above u when the visit is mixed in
           β ← ((1 − a) β + a x) / D              the mean excess, pooled
           u ← u + max(β, β₀/2) log D             where the exponential has the wanted share again; β₀ is a normal distribution's
           λ = u + β log(m/αn)                    used for this visit; stored less (1 − κ) cβ, κ = 1/10
    4. c, the drift common to all samples, in units of β: c ← c + log(1 + η (ρ̄ − 1)) with ρ̄ = found / expected of a whole batch and
       η = expected / (expected + 1000), at most ⅕.

    A first visit starts half way between two guesses: the normal quantile μ + zσ, and the largest similarity less what lies between the
    largest and the quantile in a normal distribution. In a gap between clusters β is wide, so that a start there soon leaves it.

Dimension key: R rows of a block, C candidates, S sampled candidates, b samples, M similarities of a sample over all its views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]

_EVIDENCE, _PRIOR, _SLOWEST = 16.0, 1.0, 1 / 8
_JUMP, _DEVIATIONS, _KEPT = 0.5, 6.0, 2
_WINDOW, _RATE, _KAPPA, _FARTHEST = 1000.0, 0.2, 0.1, 2.0
_MEDIAN = math.exp(-0.5772156649015329)  # the largest of n lies where about this share of one is above


@dataclass(frozen=True)
class Seen:
    """What one visit shows of each sample before any level is set, (b,) each: mean and standard deviation of the similarities looked at,
    the largest of them, how many they are, and n, the number of negatives."""

    mean: Tensor
    spread: Tensor
    top: Tensor
    number: Tensor
    n: Tensor


@dataclass(frozen=True)
class Visit:
    """What one visit counted at a level, (b,) each: the share of the negatives above it, the sum of their excess over n, and n."""

    share: Tensor
    excess: Tensor
    n: Tensor


def batch_quantile(sim_bM: Tensor, n_b: Tensor, alpha: float | Tensor) -> Tensor:
    """(b,) the (1 − α) quantile of the n finite entries of each row, interpolated as `torch.quantile` does; 1 where there are none."""
    place_b = alpha * (n_b.double() - 1).clamp(min=0)
    first_b = place_b.floor().long()
    most = sim_bM.shape[1]
    if isinstance(alpha, float):
        most = min(int(alpha * (most - 1)) + 2, most)
    elif first_b.device.type == "cpu":
        most = min(int(first_b.max()) + 2, most)
    top_bK = sim_bM.topk(most, dim=1).values.double()
    second_b = torch.minimum(first_b + 1, (n_b.long() - 1).clamp(min=0))
    upper_b, lower_b = (top_bK.gather(1, at.unsqueeze(1)).squeeze(1) for at in (first_b, second_b))
    return torch.lerp(upper_b, lower_b, place_b - first_b).where(n_b > 0, 1.0)


def sgd_step(state: State, visit: Visit, alpha: Tensor, lr: float) -> State:
    """Equation 4 of the GloFND paper."""
    return {"threshold": (state["threshold"] - lr * (alpha - visit.share)).clamp(-1, 1)}


def adam_step(state: State, visit: Visit, alpha: Tensor, lr: float, betas: tuple[float, ...], updates: Tensor) -> State:
    """Adam on equation 4's gradient. `updates`: (b,) how many the sample has had, this one included."""
    gradient = alpha - visit.share
    m = betas[0] * state["m"] + (1 - betas[0]) * gradient
    v = betas[1] * state["v"] + (1 - betas[1]) * gradient.square()
    m_hat, v_hat = (moment / (1 - beta**updates) for moment, beta in zip((m, v), betas, strict=True))
    return {"threshold": (state["threshold"] - lr * m_hat / (v_hat.sqrt() + 1e-8)).clamp(-1, 1), "m": m, "v": v}


def moved(state: State, seen: Seen, alpha: Tensor) -> tuple[State, Tensor]:
    """Step 1 of "tracking", and the start of a first visit: the state to count with, and (b,) where it jumped or started."""
    fresh, shift = state["visits"] == 0, seen.mean - state["mean"]
    jump = fresh | (shift.abs() > state["spread"] * (_DEVIATIONS * seen.number.rsqrt()).clamp(min=_JUMP))
    visits = state["visits"].clamp(max=_KEPT).where(jump, state["visits"])
    rate = torch.where(jump, 1.0, (1 / (visits + 1)).clamp(min=_SLOWEST))
    spread = state["spread"] + rate * (seen.spread - state["spread"])
    share = _counted(alpha, seen.n)
    tail = torch.where(fresh, spread * normal_excess(share), state["tail"])
    to_top = normal_level((_MEDIAN / seen.number).clamp(max=0.5)) - normal_level(share)
    start = (seen.top - spread * to_top + seen.mean + spread * normal_level(share)) / 2 + tail * (share / alpha).log()
    threshold = torch.where(fresh, start, state["threshold"] + rate * shift)
    return {"threshold": threshold, "tail": tail, "mean": state["mean"] + rate * shift, "spread": spread, "visits": visits}, jump


def counting_level(state: State, n: Tensor, alpha: Tensor, drift: Tensor) -> Tensor:
    """(b,) u of step 2. The state is that of `moved`; a sample that starts does not drift."""
    return state["threshold"] + state["tail"] * (_drifting(state, drift) - (_counted(alpha, n) / alpha).log())


def tracking_step(state: State, visit: Visit, alpha: Tensor, drift: Tensor) -> tuple[State, Tensor]:
    """Step 3: the new state, and (b,) the threshold of this visit. The state is that of `moved`."""
    share = _counted(alpha, visit.n)
    expected, ratio = share * visit.n, visit.share / share
    trust = expected / (expected + (expected * state["visits"]).clamp(max=_EVIDENCE) + _PRIOR)
    mixed = 1 + trust * (ratio - 1)
    pooled = ((1 - trust) * state["tail"] + trust * visit.excess / share) / mixed
    tail = pooled.where(ratio > 0, state["tail"])
    step = torch.maximum(tail, state["spread"] * normal_excess(share) / 2) * mixed.log()
    threshold = counting_level(state, visit.n, alpha, drift) + step + tail * (share / alpha).log()
    stored = threshold - (1 - _KAPPA) * drift * tail
    return {**state, "threshold": stored, "tail": tail, "visits": state["visits"] + 1}, threshold


def in_use(state: Mapping[str, Tensor], drift: Tensor) -> Tensor:
    """(b,) the thresholds that stored ones stand for, with the common drift."""
    return state["threshold"] + (1 - _KAPPA) * drift * state["tail"]


def followed(drift: Tensor, expected: Tensor, found: Tensor) -> Tensor:
    """Step 4: the common drift after a batch with `found` similarities above their level where `expected` were to be."""
    rate = (expected / (expected + _WINDOW)).clamp(max=_RATE)
    ratio = torch.where(expected > 0, found / expected.clamp(min=1e-12), 1.0)
    return (drift + torch.log1p(rate * (ratio - 1))).clamp(-_FARTHEST, _FARTHEST)


def expected_above(n: Tensor, alpha: Tensor) -> Tensor:
    """(b,) m, how many of n are to be above the level that is counted at."""
    return _counted(alpha, n) * n


def normal_level(share: Tensor) -> Tensor:
    """What the share of a standard normal distribution lies above."""
    below: Tensor = torch.special.ndtri(share)
    return -below


def normal_excess(share: Tensor) -> Tensor:
    """The mean height above that level of what lies above it."""
    level = normal_level(share)
    return torch.exp(-level.square() / 2) / (math.sqrt(2 * math.pi) * share) - level


def _counted(alpha: Tensor, n: Tensor) -> Tensor:
    """The share that is expected above the counting level: α, or one similarity; never all of them."""
    return torch.maximum(alpha, (1 / n).clamp(max=0.5)).clamp(max=0.999)


def _drifting(state: State, drift: Tensor) -> Tensor:
    return torch.where(state["visits"] > 0, drift, 0.0)
