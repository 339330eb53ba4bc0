"""Learning one similarity threshold per sample: three step rules, and the exact quantile of a batch.

The threshold λ of a sample is to have the share α of all its negatives above it. A visit shows n negatives.

    sgd       λ ← λ − lr (α − p)          p: the share of the negatives above λ
    adam      the same gradient through Adam, with the bias correction of the sample's own number of updates
    tracking  counts at a level that moves with the mean of the similarities, and steps in units of the mean excess above it

"tracking" has no constant with the unit of a similarity: if all similarities are shifted and stretched, so are the thresholds. One visit:

    1. μ' is the mean of the sample's similarities in this visit, μ that of its last visit. The level is u = λ + μ' − μ, and what is above
       it is flagged. The count of this visit must not move the level first: where fewer than one is expected, a sample would raise its
       level just when there is something to flag, and flag too little.
    2. p is the share of the n negatives above u, x the sum of their excess over u, divided by n.
    3. β ← (κ β + x) / (κ + p)            the mean excess above the level
       λ ← u + β y,  y = min(a (p / α − 1), c)
       a = m / (m + 6) with m = max(1, α n) is the weight of this visit, and κ = α (1 − a) / a that of the visits before. Steps up and down
       cancel where the mean of p is α, so over many visits the share flagged is α whatever the distribution.
    4. λ ← λ + β min(g ȳ / a, 2)          ȳ: the mean of y over all samples of the batch
       follows an encoder that moves the thresholds of all samples. g = 0.8 E / (E + 10), where the batch expects E flags in all.

A sample that was never visited has β = 0, and u is its mean. Half of the similarities are above it, β becomes their mean excess, and the
bound c puts λ where the quantile of a normal distribution lies.

Dimension key: b samples, M similarities of a sample over all its views, K largest of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.kinship import greater, others

State = dict[str, Tensor]
Rule = Literal["tracking", "adam", "sgd"]
Init = Literal["one", "quantile"]

_EVIDENCE = 6.0  # the weight of past visits, in flags
_COMMON, _COMMON_EVIDENCE, _COMMON_LARGEST = 0.8, 10.0, 2.0
_SAMPLED = 4096  # candidates that the mean is taken over, at most


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
            "tracking": {"tail": 0.0, "location": 2.0},
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
    """The constants of step 3: a, a / α, κ and c; numbers, or (b,) where each sample has its own α."""

    weight: float | Tensor
    per_share: float | Tensor
    prior: float | Tensor
    largest: float | Tensor


def gains(alpha: float | Tensor, number: float) -> Gains:
    """The constants of a visit with about that many negatives."""
    if isinstance(alpha, Tensor):
        return Gains(*_gains(alpha, number))
    return _gains_of_number(alpha, number)


@functools.lru_cache(maxsize=64)
def _gains_of_number(alpha: float, number: float) -> Gains:
    return Gains(*(float(each) for each in _gains(torch.tensor(alpha, dtype=torch.float64), number)))


def _gains(alpha: Tensor, number: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = (alpha * number).clamp(min=1)
    weight = weight / (weight + _EVIDENCE)
    normal_level = -torch.special.ndtri(alpha.clamp(max=0.5))
    largest = (normal_level / math.sqrt(2 / math.pi)).clamp(min=1.5)  # a normal distribution's mean excess above its mean is σ √(2 / π)
    return weight, weight / alpha, alpha * (1 - weight) / weight, largest


@dataclass(frozen=True)
class Visit:
    """What one visit shows, (b,) each: the level u; the share p of the negatives above it; the sum of their excess x, divided by n; and
    where the similarities lie, as one plus their mean."""

    level: Tensor
    share: Tensor
    excess: Tensor
    location: Tensor


def visited(sim_bM: Tensor, n_b: Tensor, state_b3: Tensor, shared: bool = False) -> Visit:
    """Steps 1 and 2.

    Args:
        sim_bM: similarities over all views of a sample, below −2 at its own candidates.
        n_b: how many others there are.
        state_b3: threshold, tail and location of the last visit.
        shared: whether it is the state of one threshold for all samples, which does not move with the mean of each.
    """
    threshold_b, tail_b, before_b = state_b3.unbind(1)
    location_b = locations(sim_bM, n_b).to(threshold_b.dtype)
    level_b = threshold_b + (location_b - before_b)
    if shared:
        level_b = torch.where(tail_b == 0, level_b, threshold_b)
    return Visit(level_b, *above(sim_bM, n_b, level_b), location_b)


def stepped(visit: Visit, state_b3: Tensor, alpha: float | Tensor, at: Gains) -> tuple[Tensor, Tensor]:
    """Step 3: (b, 4) the new threshold, tail and location, and y, which is 0 at a first visit; and (b,) whether it is the first."""
    tail_b = state_b3[:, 1]
    fresh_b = tail_b == 0
    if isinstance(at.prior, float):
        tail_b = torch.add(visit.excess, tail_b, alpha=at.prior) / (visit.share + at.prior)
    else:
        tail_b = (visit.excess + tail_b * at.prior) / (visit.share + at.prior)
    step_b = ((visit.share - alpha) * at.per_share).clamp(max=at.largest)
    columns = (torch.addcmul(visit.level, tail_b, step_b), tail_b, visit.location, step_b.masked_fill(fresh_b, 0.0))
    return torch.stack(columns, 1), fresh_b


def track(sim_bM: Tensor, n_b: Tensor, state_b3: Tensor, alpha: float | Tensor, at: Gains, init: Init) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3: (b, 4) as `stepped` returns it, and (b,) the level above which candidates are flagged in this visit."""
    visit = visited(sim_bM, n_b, state_b3)
    new_b4, fresh_b = stepped(visit, state_b3, alpha, at)
    if init == "one":
        return new_b4, visit.level.masked_fill(fresh_b, torch.inf)
    return new_b4, torch.where(fresh_b, new_b4[:, 0], visit.level)


def common_gain(expected: float, at: Gains) -> float:
    """g / a of step 4, for a batch that expects so many flags in all."""
    assert isinstance(at.weight, float)
    return _COMMON * expected / (expected + _COMMON_EVIDENCE) / at.weight


def common_step(new_b4: Tensor, gain: float) -> Tensor:
    """(b, 3) Step 4, from what `stepped` returned for all samples of the batch."""
    gain /= len(new_b4)
    total_step = new_b4[:, 3].nansum().clamp(max=_COMMON_LARGEST / gain)
    new_b3 = new_b4[:, :3]
    new_b3[:, 0].addcmul_(new_b3[:, 1], total_step, value=gain)
    return new_b3


def locations(sim_bM: Tensor, n_b: Tensor) -> Tensor:
    """(b,) one plus the mean of the entries that are not below −2, of which there are n; NaN where there are none."""
    if sim_bM.shape[1] > 2 * _SAMPLED:
        sim_bM = sim_bM[:, :: sim_bM.shape[1] // _SAMPLED]
        n_b = others(sim_bM).sum(1)
    return (sim_bM.clamp(min=-1).sum(1) + sim_bM.shape[1]) / n_b  # an entry below −2 counts as −1, and so adds nothing


def above(sim_bM: Tensor, n_b: Tensor, level_b: Tensor) -> tuple[Tensor, Tensor]:
    """(b,), (b,) the share of the n entries above the level, and the sum of s − level over them, divided by n."""
    excess_bM = sim_bM - level_b.to(sim_bM.dtype).unsqueeze(1)
    number_bM = greater(excess_bM, 0.0)
    if torch.compiler.is_compiling():
        sums_2b = torch.stack((number_bM.sum(1), excess_bM.relu().sum(1)))
    else:
        sums_2b = excess_bM.new_empty(2, len(excess_bM))
        torch.sum(number_bM, 1, out=sums_2b[0])
        torch.sum(excess_bM.relu_(), 1, out=sums_2b[1])
    share_b, excess_b = (sums_2b / n_b).to(level_b.dtype).unbind(0)
    return share_b, excess_b


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


def convert(saved: dict[str, Tensor], prefix: str) -> None:
    """Brings the state of "tracking" that version 0.1.0 saved into today's fields, in place."""
    drift, visits = saved.pop(f"{prefix}drift", None), saved.pop(f"{prefix}store.visits")
    del saved[f"{prefix}store.spread"]
    level, tail, mean = saved[f"{prefix}store.threshold"], saved[f"{prefix}store.tail"], saved.pop(f"{prefix}store.mean")
    level = level if drift is None else level + 0.9 * drift * tail
    for name, value, initial in (("threshold", level, 1.0), ("tail", tail, 0.0), ("location", mean + 1, 2.0)):
        saved[f"{prefix}store.{name}"] = torch.where(visits > 0, value, initial)
