"""Learning a quantile of each sample's similarities from batches: three step rules, and a visit's own quantile to start from.

λ is to leave the share α of all negatives above it. A visit shows n negatives, the share p of them above λ.

    sgd       λ ← λ − lr (α − p)
    adam      the same gradient through Adam, bias-corrected by the sample's own number of updates
    tracking  counts how many are above λ and steps in units of their mean excess β; no constant has the unit of a similarity, so a shift
              and a stretch of all similarities shift and stretch λ. A visit, in this order:

    1. μ, running mean of the similarities, and σ, their running deviation below the mean (a few false negatives far above it change it
       little): μ ← μ + w (mean − μ), w = max(1/visits, 1/8); σ likewise, with n/4096 within [1/32, 1/8] in the place of 1/8. λ and β keep
       their place: λ − μ and β stay the same multiples of σ. Where the mean is off by more than max(½, 6/√n) σ (a jump), w = 1 and at
       most two of the past visits count from here on.
    2. Flagged is what lies above the level u = λ + cβ. The count of this very visit must not move the level first: where few are expected,
       a sample would lower it whenever nothing is above, raise it whenever something is, and flag too little.
    3. The step. With m = αn expected above u, ρ = number / m, x = sum of their excess / m, and the weight of this visit
       a = m / (m + e + min(1, m)), where the evidence e of the visits before is at most 5 and at most 5m,
           λ ← u + max(β, β₀/2) g(a (ρ − 1))      g(y) = y, but 1 + log y above 1; β₀ is a normal distribution's
           β ← ((1 − a) β + a x) / (1 + a (ρ − 1))     the mean excess, pooled, where any is above
       Steps up and down cancel only where the mean of ρ is 1, so over many visits the share flagged is α whatever the distribution.
       λ is stored less (1 − κ) cβ, κ = 1/10.
    4. c, the drift common to all samples, in units of β: c ← c + log(1 + η (ρ̄ − 1)) with ρ̄ = found / expected of a whole batch and
       η = expected / (expected + 1000), at most ⅕. It follows an encoder that spreads or concentrates all similarities.

    A first visit starts from its largest similarity, less what lies between the largest and the quantile in a normal distribution, and
    flags with the λ after its count.

Dimension key: R rows of a block, C candidates, S sampled candidates, b samples, M similarities of a sample over all its views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]

_EVIDENCE, _SLOWEST, _SPREAD_WINDOW = 5.0, 1 / 8, 4096
_JUMP, _DEVIATIONS, _KEPT = 0.5, 6.0, 2
_WINDOW, _RATE, _KAPPA, _FARTHEST = 1000.0, 0.2, 0.1, 2.0
_MEDIAN = math.exp(-0.5772156649015329)  # the largest of n lies where about this share of one is above


@dataclass(frozen=True)
class Seen:
    """What one visit shows of each sample before any level is set, (b,) each: mean of the similarities looked at and their deviation below
    it, the largest of them, how many they are, and n, the number of negatives."""

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
    slowest = (seen.number / _SPREAD_WINDOW).clamp(_SLOWEST / 4, _SLOWEST)  # a deviation of few similarities is noisy
    rate, spread_rate = (torch.where(jump, 1.0, (1 / (visits + 1)).clamp(min=least)) for least in (_SLOWEST, slowest))
    mean, spread = state["mean"] + rate * shift, state["spread"] + spread_rate * (seen.spread - state["spread"])
    stretch = torch.where(state["spread"] > 0, spread / state["spread"], 1.0)
    share = _at_least_one(alpha, seen.n)
    to_top = normal_level((_MEDIAN / seen.number).clamp(max=0.5)) - normal_level(share)
    tail = torch.where(fresh, spread * normal_excess(share), state["tail"] * stretch)
    start = seen.top - spread * to_top + tail * (share / alpha).log()
    threshold = torch.where(fresh, start, mean + (state["threshold"] - state["mean"]) * stretch)
    return {"threshold": threshold, "tail": tail, "mean": mean, "spread": spread, "visits": visits}, jump


def level_of(state: State, drift: Tensor) -> Tensor:
    """(b,) u of step 2. The state is that of `moved`; a sample that starts does not drift."""
    return state["threshold"] + state["tail"] * torch.where(state["visits"] > 0, drift, 0.0)


def tracking_step(state: State, visit: Visit, alpha: Tensor, drift: Tensor) -> State:
    """Step 3: the new state. The state is that of `moved`, and `visit` was counted at its `level_of`."""
    expected, ratio = alpha * visit.n, visit.share / alpha
    evidence = torch.minimum(expected * state["visits"], _EVIDENCE * expected.clamp(max=1))
    trust = expected / (expected + evidence + expected.clamp(max=1))
    change = trust * (ratio - 1)
    scale = torch.maximum(state["tail"], state["spread"] * normal_excess(_at_least_one(alpha, visit.n)) / 2)
    threshold = level_of(state, drift) + scale * torch.where(change < 1, change, 1 + change.clamp(min=1).log())
    pooled = ((1 - trust) * state["tail"] + trust * visit.excess / alpha) / (1 + change)
    tail = pooled.where(ratio > 0, state["tail"])
    return {**state, "threshold": threshold - (1 - _KAPPA) * drift * tail, "tail": tail, "visits": state["visits"] + 1}


def in_use(state: Mapping[str, Tensor], drift: Tensor) -> Tensor:
    """(b,) the thresholds that stored ones stand for, with the common drift."""
    return state["threshold"] + (1 - _KAPPA) * drift * state["tail"]


def followed(drift: Tensor, expected: Tensor, found: Tensor) -> Tensor:
    """Step 4: the common drift after a batch with `found` similarities above their level where `expected` were to be."""
    rate = (expected / (expected + _WINDOW)).clamp(max=_RATE)
    ratio = torch.where(expected > 0, found / expected.clamp(min=1e-12), 1.0)
    return (drift + torch.log1p(rate * (ratio - 1))).clamp(-_FARTHEST, _FARTHEST)


def normal_level(share: Tensor) -> Tensor:
    """What the share of a standard normal distribution lies above."""
    below: Tensor = torch.special.ndtri(share)
    return -below


def normal_excess(share: Tensor) -> Tensor:
    """The mean height above that level of what lies above it."""
    level = normal_level(share)
    return torch.exp(-level.square() / 2) / (math.sqrt(2 * math.pi) * share) - level


def _at_least_one(alpha: Tensor, n: Tensor) -> Tensor:
    """α, or the share of one similarity where α is less; never all of them."""
    return torch.maximum(alpha, (1 / n).clamp(max=0.5)).clamp(max=0.999)
