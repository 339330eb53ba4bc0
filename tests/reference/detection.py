"""GloFND and FNC as slow loops over the papers' equations, one sample and one similarity at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor


def fnc(row: list[float], k: int) -> set[int]:
    """Columns of the k most similar negatives; own candidates are −inf."""
    order = sorted((j for j, s in enumerate(row) if s != -math.inf), key=lambda j: -row[j])
    return set(order[:k])


@dataclass
class Threshold:
    """One sample's threshold and Adam moments."""

    value: float = 1.0
    m: float = 0.0
    v: float = 0.0
    updates: int = 0

    def visit(self, views: Tensor, alpha: float, lr: float, betas: tuple[float, float] | None) -> list[set[int]]:
        """Equation 4 on one sample's rows (V, C), then the columns above the new threshold, row by row. `betas` None: plain SGD."""
        shares = []
        for row in views.tolist():
            negatives = [s for s in row if s != -math.inf]
            shares.append(sum(1 for s in negatives if s > self.value) / len(negatives))
        gradient = alpha - sum(shares) / len(shares)
        self.updates += 1
        step = gradient
        if betas is not None:
            self.m = betas[0] * self.m + (1 - betas[0]) * gradient
            self.v = betas[1] * self.v + (1 - betas[1]) * gradient**2
            step = (self.m / (1 - betas[0] ** self.updates)) / (math.sqrt(self.v / (1 - betas[1] ** self.updates)) + 1e-8)
        self.value = min(1.0, max(-1.0, self.value - lr * step))
        return [{j for j, s in enumerate(row) if s > self.value and self.value < 1} for row in views.tolist()]


def quantile(values: list[float], share_above: float) -> float:
    """The (1 − share_above) quantile, linear between neighbours."""
    ordered = sorted((x for x in values if x != -math.inf), reverse=True)
    place = share_above * (len(ordered) - 1)
    first = math.floor(place)
    second = min(first + 1, len(ordered) - 1)
    return ordered[first] + (place - first) * (ordered[second] - ordered[first])


@dataclass
class Tracked:
    """One sample's threshold under the rule "tracking"; `used` is the level of the last visit. `step` is None at a first visit."""

    alpha: float
    value: float = 1.0
    mean: float = 0.0
    spread: float = 0.0
    used: float = 1.0
    step: float | None = None

    def __post_init__(self) -> None:
        level = NormalDist().inv_cdf(1 - self.alpha)
        unit = NormalDist().pdf(0)  # the spread of a standard normal distribution
        self.place = level / unit
        self.tail = self.first_tail = (NormalDist().pdf(level) / self.alpha - level) / unit

    def visit(self, row: list[float], drift: float) -> None:
        negatives = [s for s in row if s != -math.inf]
        n, fresh = len(negatives), self.spread == 0
        mean = sum(negatives) / n
        limit, rate = 7.5 / math.sqrt(len(row)) * self.spread, min(max(len(row) / 16384, 1 / 128), 1 / 4)
        change, wider = mean - self.mean, sum(s - mean for s in negatives if s > mean) / n - self.spread
        self.mean += change - (1 - rate) * min(max(change, -limit), limit)
        self.spread += wider - (1 - rate) * min(max(wider, -limit), limit)
        self.used = self.mean + self.spread * (self.place + drift * self.tail)
        peaks = [s - self.used for s in negatives if s > self.used]
        weight = max(1.0, self.alpha * len(row)) / (max(1.0, self.alpha * len(row)) + 6)
        prior = self.alpha * (1 - weight) / weight
        self.place += 0.2 * drift * self.tail
        self.tail = max((prior * self.tail + sum(peaks) / n / self.spread) / (prior + len(peaks) / n), self.first_tail / 2)
        step = min(weight * (len(peaks) / n / self.alpha - 1), 1.5)
        self.place += self.tail * step
        self.value = self.used + self.spread * self.tail * step
        self.step = None if fresh else step
