"""GloFND and FNC as slow loops over the papers' equations, one sample and one similarity at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """One sample's threshold under the rule "tracking", without the common drift."""

    value: float = 1.0
    scale: float = 0.05
    evidence: float = 0.0

    def visit(self, row: list[float], alpha: float, lr: float) -> None:
        negatives = [s for s in row if s != -math.inf]
        n = len(negatives)
        peaks = [s - self.value for s in negatives if s > self.value]
        ratio = len(peaks) / n / alpha
        by_height = sum(min(x / self.scale, 1.0) for x in peaks) / n / alpha / (1 - math.exp(-1))
        trust = min(0.25, alpha * n / (alpha * n + self.evidence))
        mixed = 1 + trust * (ratio - 1)
        if peaks:
            self.scale = max(1e-3, self.scale * (1 + trust * (by_height - ratio) / mixed))
        self.evidence = min(32.0, max(0.0, self.evidence + alpha * n * (ratio - 0.5)))
        lost = (not peaks and self.evidence == 0) or (ratio < 0.5 and alpha * n * (1 - ratio) ** 2 > 16)
        self.value = min(1.0, max(-1.0, self.value + (-lr if lost else self.scale * math.log(mixed))))
