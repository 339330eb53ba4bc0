"""GloFND and FNC as slow loops over the papers' equations, one sample and one similarity at a
time."""

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

    def visit(
        self, views: Tensor, alpha: float, lr: float, betas: tuple[float, float] | None
    ) -> list[set[int]]:
        """Equation 4 on one sample's rows (V, C), then the columns above the new threshold, row by
        row. `betas` None: plain SGD."""
        shares = []
        for row in views.tolist():
            negatives = [s for s in row if s > -2]
            shares.append(sum(1 for s in negatives if s > self.value) / len(negatives))
        gradient = alpha - sum(shares) / len(shares)
        self.updates += 1
        step = gradient
        if betas is not None:
            self.m = betas[0] * self.m + (1 - betas[0]) * gradient
            self.v = betas[1] * self.v + (1 - betas[1]) * gradient**2
            step = (self.m / (1 - betas[0] ** self.updates)) / (
                math.sqrt(self.v / (1 - betas[1] ** self.updates)) + 1e-8
            )
        self.value = min(1.0, max(-1.0, self.value - lr * step))
        return [
            {j for j, s in enumerate(row) if s > self.value and self.value < 1}
            for row in views.tolist()
        ]


def quantile(values: list[float], share_above: float) -> float:
    """The (1 − share_above) quantile, linear between neighbours."""
    ordered = sorted((x for x in values if x > -2), reverse=True)
    place = share_above * (len(ordered) - 1)
    first = math.floor(place)
    second = min(first + 1, len(ordered) - 1)
    return ordered[first] + (place - first) * (ordered[second] - ordered[first])


def normal_quantile(values: list[float], share_above: float) -> float:
    """The (1 − share_above) quantile of a normal distribution with the mean of the values and their
    mean excess over it, which is 1 / √(2π) of the standard deviation."""
    kept = [x for x in values if x > -2]
    mean = sum(kept) / len(kept)
    excess = sum(max(0.0, x - mean) for x in kept) / len(kept)
    return mean + math.sqrt(2 * math.pi) * excess * NormalDist().inv_cdf(1 - share_above)
