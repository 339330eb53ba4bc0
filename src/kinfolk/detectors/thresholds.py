"""Learning one similarity threshold per sample: three step rules, and the exact quantile of a batch.

The threshold λ of a sample is to have the share α of all its negatives above it. A visit shows n negatives.

    sgd       λ ← λ − lr (α − p)          p: the share of the negatives above λ
    adam      the same gradient through Adam, with the bias correction of the sample's own number of updates
    tracking  counts at a level that moves with the mean and the spread of the similarities, and steps in units of the mean excess above it

"tracking" has no constant with the unit of a similarity: if all similarities are shifted and stretched, so are the thresholds. λ is kept as
its place π in units of the spread, λ = μ + σπ, and so is β, the mean excess above the level. One visit:

    1. v is the mean of the sample's similarities in this visit, and the mean of (s − v)₊ their spread.
       μ ← v − (1 − w) [v − μ], where [ ] limits a change to ± kσ, k = 7.5 / √n; σ likewise. So μ and σ are running means (the weight of a
       visit is w = n / 16384 within [1/128, 1/4]), but a change beyond the noise of a visit is followed at once.
    2. The level is u = μ + σ (π + cβ), and what is above it is flagged. The count of this visit must not move the level first: where fewer
       than one is expected, a sample would raise its level just when there is something to flag, and flag too little.
    3. p is the share of the n negatives above u, x the sum of their excess over u, divided by nσ.
       β ← (κβ + x) / (κ + p)             at least half of that of a normal distribution
       π ← π + cβ / 5 + βy,  y = min(a (p / α − 1), 1.5)
       a = m / (m + 6) with m = max(1, αn) is the weight of this visit, and κ = α (1 − a) / a that of the visits before. Steps up and down
       cancel where the mean of p is α, so over many visits the share flagged is α whatever the distribution.
    4. c ← c + η ȳ / a within ± 2         ȳ: the mean of y over all samples of the batch
       c is a drift that all samples share. It follows an encoder that moves the thresholds of all of them. η = E / (E + 500), at most 0.3,
       where the batch expects E flags in all.

A sample that was never visited has σ = 0, so that its first visit sets μ and σ, and it has π and β of a normal distribution.

Dimension key: b samples, M similarities of a sample over all its views, K largest of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors.selection import sampled
from kinfolk.kinship import looks, others, parts
from kinfolk.stores.per_sample import sent

State = dict[str, Tensor]
Rule = Literal["tracking", "adam", "sgd"]
Init = Literal["one", "quantile"]

_EVIDENCE = 6.0  # the weight of past visits, in flags
_LARGEST = 1.5  # step up, in units of β
_WINDOW, _SLOWEST, _FASTEST = 16384, 1 / 128, 1 / 4
_NOISE = 7.5  # a mean of n normal similarities is within 3 standard deviations, and these are 2.5 spreads
_COMMON, _COMMON_WINDOW, _FARTHEST, _KEPT = 0.3, 500.0, 2.0, 0.2
_SAMPLED = 4096  # candidates that mean and spread are taken over, at most
_NORMAL_SPREAD = 1 / math.sqrt(2 * math.pi)  # of a standard normal distribution


@dataclass(frozen=True)
class ThresholdRule:
    """How thresholds are learned. Holds no state: it maps state to state.

    Args: as `GloFND`.
    """

    name: Rule
    lr: float
    betas: tuple[float, ...]
    init: Init

    def __post_init__(self) -> None:
        if self.name not in get_args(Rule):
            raise ValueError(f"`rule` (={self.name!r}) must be one of {', '.join(get_args(Rule))}")
        if self.init not in get_args(Init):
            raise ValueError(f"`init` (={self.init!r}) must be one of {', '.join(get_args(Init))}")
        if not self.lr > 0:
            raise ValueError(f"`lr` (={self.lr}) must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` (={self.betas}) must be two numbers in [0, 1)")

    def fields(self) -> dict[str, float]:
        """The state of a sample before its first visit."""
        own: dict[Rule, dict[str, float]] = {
            "sgd": {"visits": 0},
            "adam": {"visits": 0, "m": 0.0, "v": 0.0},
            "tracking": {"place": 0.0, "tail": 0.0, "mean": 0.0, "spread": 0.0},
        }
        return {"threshold": 1.0, **own[self.name]}

    def descend(self, state: State, share: Tensor, alpha: float | Tensor) -> State:
        """One step of "adam" or "sgd"; `share`: (b,) the share of the negatives above the threshold."""
        visits = state["visits"] + 1
        if self.name == "sgd":
            return {"threshold": (state["threshold"] - self.lr * (alpha - share)).clamp(-1, 1), "visits": visits}
        updates = (visits - int(self.init == "quantile")).clamp(min=1)
        gradient = alpha - share
        m = self.betas[0] * state["m"] + (1 - self.betas[0]) * gradient
        v = self.betas[1] * state["v"] + (1 - self.betas[1]) * gradient.square()
        m_hat, v_hat = (moment / (1 - beta**updates) for moment, beta in zip((m, v), self.betas, strict=True))
        return {"threshold": (state["threshold"] - self.lr * m_hat / (v_hat.sqrt() + 1e-8)).clamp(-1, 1), "visits": visits, "m": m, "v": v}


@dataclass(frozen=True)
class Gains:
    """The constants of a visit: a, κ and the least β, which are (b,) where each sample has its own α; w and k. All are tensors where the
    rule is compiled: as numbers they would make a graph for each size of a batch."""

    weight: float | Tensor
    prior: float | Tensor
    least_tail: float | Tensor
    rate: float | Tensor
    noise: float | Tensor


@functools.lru_cache(maxsize=64)
def gains_on(alpha: float, number: float, device: torch.device, dtype: torch.dtype) -> Gains:
    """The constants of a visit as tensors without dimensions on a device; copied there once for each number of negatives."""
    at = gains(alpha, number)
    return Gains(*(sent(torch.tensor(value, dtype=dtype), device) for value in (at.weight, at.prior, at.least_tail, at.rate, at.noise)))


def gains(alpha: float | Tensor, number: float) -> Gains:
    """The constants of a visit with about that many negatives."""
    seen = min(number, _SAMPLED)
    moving = (min(max(seen / _WINDOW, _SLOWEST), _FASTEST), _NOISE / math.sqrt(max(seen, 1)))
    if isinstance(alpha, Tensor):
        return Gains(*_gains(alpha, number), *moving)
    return Gains(*_gains_of_number(alpha, number), *moving)


@functools.lru_cache(maxsize=64)
def _gains_of_number(alpha: float, number: float) -> tuple[float, float, float]:
    weight, prior, least_tail = (float(each) for each in _gains(torch.tensor(alpha, dtype=torch.float64), number))
    return weight, prior, least_tail


def _gains(alpha: Tensor, number: float) -> tuple[Tensor, Tensor, Tensor]:
    weight = (alpha * number).clamp(min=1)
    weight = weight / (weight + _EVIDENCE)
    return weight, alpha * (1 - weight) / weight, start(alpha)[1] / 2


def start(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """π and β of a normal distribution."""
    share = alpha.clamp(1e-30, 0.999)
    level = -torch.special.ndtri(share)
    excess = torch.exp(-level.square() / 2) / (math.sqrt(2 * math.pi) * share) - level
    return level / _NORMAL_SPREAD, excess / _NORMAL_SPREAD


def track(sim_bM: Tensor, n_b: Tensor, state_b5: Tensor, drift: Tensor, at: Gains, init: Init) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3.

    Args:
        sim_bM: similarities over all views of a sample, below −2 at its own candidates.
        n_b: how many others there are.
        state_b5: the fields of `ThresholdRule.fields` after the last visit.
        drift: c, without dimensions.

    Returns:
        (b, 6) the new state and y; and (b,) the level above which candidates are flagged in this visit. The y of a first visit is 0, so
        that it leaves c as it is: a first visit shows how far the distribution is from a normal one.
    """
    place_b, tail_b, fresh_b = state_b5[:, 1], state_b5[:, 2], state_b5[:, 4] == 0
    mean_b, spread_b = follow(state_b5, moments(sim_bM, n_b), at)
    moved_b = torch.addcmul(place_b, tail_b, drift)
    level_b = torch.addcmul(mean_b, spread_b, moved_b)
    new_tail_b, y_b = counted(tail_b, spread_b, above(sim_bM, n_b, level_b), at)
    moved_b = torch.addcmul(moved_b, new_tail_b, y_b)
    place_b = torch.addcmul(moved_b, tail_b, drift, value=_KEPT - 1)  # of the drift only a part stays
    threshold_b = torch.addcmul(mean_b, spread_b, moved_b)
    new_b6 = torch.stack((threshold_b, place_b, new_tail_b, mean_b, spread_b, y_b.masked_fill(fresh_b, 0.0)), 1)
    return new_b6, level_b if init == "quantile" else level_b.masked_fill(fresh_b, torch.inf)


def moments(sim_bM: Tensor, n_b: Tensor) -> Tensor:
    """(2, b) mean and spread of the entries that are not below −2, of which there are n; NaN where there are none."""
    if sim_bM.shape[1] > 2 * _SAMPLED:
        sim_bM = sampled(sim_bM, _SAMPLED)  # every fourth entry would cost as much as all of them
        n_b = others(sim_bM).sum(1)
    return _beside([_moments(sim_bM[rows], n_b[rows]) for rows in parts(sim_bM)])


def _moments(sim_bM: Tensor, n_b: Tensor) -> Tensor:
    if looks(sim_bM):  # eager on a CPU: −2 in the place of what is below, a fifth of the time of 0
        sum_b = torch.add(sim_bM.clamp(min=-2.0).sum(1), sim_bM.shape[1] - n_b, alpha=2)
    else:
        sum_b = F.threshold(sim_bM, -2.0, 0.0).sum(1)
    if torch.compiler.is_compiling():
        mean_b = sum_b / n_b
        return torch.stack((mean_b, (sim_bM - mean_b.unsqueeze(1)).relu_().sum(1) / n_b))
    seen_2b = sim_bM.new_empty(2, len(sim_bM))  # written in place: a launch less
    mean_b = torch.div(sum_b, n_b, out=seen_2b[0])
    torch.div((sim_bM - mean_b.unsqueeze(1)).relu_().sum(1), n_b, out=seen_2b[1])
    return seen_2b


def follow(state_b5: Tensor, seen_2b: Tensor, at: Gains) -> Tensor:
    """(2, b) step 1: the new μ and σ. The old ones are first brought to within ± kσ of what was seen."""
    before_2b = state_b5[:, 3:].T
    seen_2b, spread_b = seen_2b.to(before_2b.dtype), before_2b[1]
    if isinstance(at.noise, Tensor):
        far_b = spread_b * at.noise
        near_2b = before_2b.clamp(seen_2b - far_b, seen_2b + far_b)
    else:
        near_2b = before_2b.clamp(torch.sub(seen_2b, spread_b, alpha=at.noise), torch.add(seen_2b, spread_b, alpha=at.noise))
    return torch.lerp(seen_2b, near_2b, 1 - at.rate)


def counted(tail_b: Tensor, spread_b: Tensor, above_2b: Tensor, at: Gains) -> tuple[Tensor, Tensor]:
    """(b,), (b,) step 3: the new β, and y. With q = 1 + p / κ they are (β + x / κ) / q and min((1 − a) q − 1, 1.5)."""
    share_b, excess_b = above_2b
    q_b = _affine(share_b, 1 / at.prior, 1.0)
    if isinstance(at.prior, Tensor):
        tail_b = torch.addcdiv(tail_b, excess_b, spread_b * at.prior)
    else:
        tail_b = torch.addcdiv(tail_b, excess_b, spread_b, value=1 / at.prior)
    tail_b = tail_b.div_(q_b).clamp_(min=at.least_tail)
    return tail_b, _affine(q_b, 1 - at.weight, -1.0).clamp_(max=_LARGEST)


def _affine(x: Tensor, factor: float | Tensor, offset: float) -> Tensor:
    """factor · x + offset, in one operation where the factor is a number."""
    return factor * x + offset if isinstance(factor, Tensor) else torch.rsub(x, offset, alpha=-factor)


def move_drift(drift: Tensor, y_b: Tensor, expected: float, at: Gains) -> None:
    """Step 4: changes c in place, by the y of all samples of a batch that expects so many flags in all. NaN does not count."""
    assert isinstance(at.weight, float)
    rate = min(expected / (expected + _COMMON_WINDOW), _COMMON)
    drift.add_(y_b.nansum(), alpha=rate / at.weight / len(y_b)).clamp_(-_FARTHEST, _FARTHEST)


def above(sim_bM: Tensor, n_b: Tensor, level_b: Tensor) -> Tensor:
    """(2, b) the share of the n entries above the level, and the sum of s − level over them, divided by n."""
    bound_b = level_b.to(sim_bM.dtype)
    return (_beside([_above(sim_bM[rows], bound_b[rows]) for rows in parts(sim_bM)]) / n_b).to(level_b.dtype)


def _above(sim_bM: Tensor, level_b: Tensor) -> Tensor:
    if sim_bM.device.type == "cpu" or torch.compiler.is_compiling():
        excess_bM = (sim_bM - level_b.unsqueeze(1)).relu_()
        excess_b = excess_bM.sum(1)
        return torch.stack((excess_bM.sign_().sum(1), excess_b))
    both_2bM = sim_bM.new_empty(2, *sim_bM.shape)  # one sum over both: two launches less
    excess_bM = torch.sub(sim_bM, level_b.unsqueeze(1), out=both_2bM[1])
    torch.gt(excess_bM, 0.0, out=both_2bM[0])
    excess_bM.relu_()
    return both_2bM.sum(2)


def _beside(found: list[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.cat(found, 1)


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


def convert(saved: dict[str, Tensor], prefix: str, alpha: Tensor) -> None:
    """Brings the state of "tracking" that version 0.1.0 saved into today's fields, in place. Its spread was a standard deviation, and its
    threshold and tail had the unit of a similarity."""
    spread = _NORMAL_SPREAD * saved[f"{prefix}store.spread"]
    fresh = (saved.pop(f"{prefix}store.visits") == 0) | (spread == 0)
    level, tail, mean = (saved[f"{prefix}store.{name}"] for name in ("threshold", "tail", "mean"))
    first_place, first_tail = start(alpha.to(level))
    level_now = level + 0.9 * saved.get(f"{prefix}drift", level.new_zeros(())) * tail
    for name, value, initial in (
        ("threshold", level_now, 1.0),
        ("place", (level - mean) / spread, first_place),
        ("tail", tail / spread, first_tail),
        ("mean", mean, 0.0),
        ("spread", spread, 0.0),
    ):
        saved[f"{prefix}store.{name}"] = torch.where(fresh, initial, value)
