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


def _level(share: float) -> float:
    """What the share of a standard normal distribution lies above."""
    return NormalDist().inv_cdf(1 - share)


def _excess(share: float) -> float:
    return NormalDist().pdf(_level(share)) / share - _level(share)


@dataclass
class Tracked:
    """One sample's threshold under the rule "tracking"; `drift` is given. `value` is the stored one, `used` that of the last visit."""

    value: float = 1.0
    tail: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    visits: int = 0
    used: float = 1.0

    def visit(self, row: list[float], alpha: float, drift: float = 0.0) -> None:
        negatives = [s for s in row if s != -math.inf]
        n = len(negatives)
        mean = sum(negatives) / n
        below = [(mean - s) ** 2 for s in negatives if s < mean]
        spread = math.sqrt(sum(below) / max(1, len(below)))
        share = min(0.999, max(alpha, min(0.5, 1 / n)))
        fresh = self.visits == 0
        rate = spread_rate = 1.0
        if fresh or abs(mean - self.mean) > self.spread * max(0.5, 6 / math.sqrt(n)):
            self.visits = min(self.visits, 2)
        else:
            rate, spread_rate = (max(least, 1 / (self.visits + 1)) for least in (1 / 8, min(1 / 8, max(1 / 32, n / 4096))))
        offset, before = self.value - self.mean, self.spread
        self.mean += rate * (mean - self.mean)
        self.spread += spread_rate * (spread - self.spread)
        stretch = self.spread / before if before > 0 else 1.0
        self.value, self.tail = self.mean + offset * stretch, self.tail * stretch
        if fresh:
            to_top = _level(min(0.5, math.exp(-0.5772156649015329) / n)) - _level(share)
            self.tail = self.spread * _excess(share)
            self.value = max(negatives) - self.spread * to_top + self.tail * math.log(share / alpha)
        self.used = self.value + self.tail * (0.0 if fresh else drift)
        peaks = [s - self.used for s in negatives if s > self.used]
        expected = alpha * n
        trust = expected / (expected + min(expected * self.visits, 5 * min(1.0, expected)) + min(1.0, expected))
        change = trust * (len(peaks) / expected - 1)
        self.value = self.used + max(self.tail, self.spread * _excess(share) / 2) * (change if change < 1 else 1 + math.log(change))
        if peaks:
            self.tail = ((1 - trust) * self.tail + trust * sum(peaks) / expected) / (1 + change)
        if fresh:
            self.used = self.value
        self.value -= 0.9 * drift * self.tail
        self.visits += 1
