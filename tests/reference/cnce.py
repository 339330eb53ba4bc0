"""NCE and CNCE as slow loops over the paper's equations, and the toy's best critic in closed
form."""

from __future__ import annotations

import math
from itertools import product

from torch import Tensor

VARIANCE, CORRELATION = 2.0, 0.2  # of Σ = Σ_Z + Σ_ε: 2 on the diagonal, 0.4 beside it


def z(positive: float, negatives: list[float]) -> float:
    """Theorem 3.2's Z: log of e^f(u, v_1) over the mean of e^f over all k candidates, the positive
    among them."""
    total = math.exp(positive)
    for score in negatives:
        total += math.exp(score)
    return math.log(math.exp(positive) / (total / (1 + len(negatives))))


def expectation(
    positives: list[float], others: list[list[float]], num_negatives: int, lower: float
) -> float:
    """CNCE without sampling: Z averaged over all ways to draw the negatives from the scores above
    the percentile."""
    means = []
    for positive, row in zip(positives, others, strict=True):
        kept = [
            score for rank, score in enumerate(sorted(row)) if 100 * (rank + 1) > lower * len(row)
        ]
        values = [z(positive, list(drawn)) for drawn in product(kept, repeat=num_negatives)]
        means.append(sum(values) / len(values))
    return sum(means) / len(means)


def log_density_ratio(x: Tensor, y: Tensor) -> Tensor:
    """log p(x, y) / (p(x) p(y)) of the toy, for standardised x and y by broadcasting: the critic
    for which NCE tends to I as k grows."""
    x, y = x / math.sqrt(VARIANCE), y / math.sqrt(VARIANCE)
    rest = 1 - CORRELATION**2
    return -0.5 * math.log(rest) - (CORRELATION**2 * (x**2 + y**2) - 2 * CORRELATION * x * y) / (
        2 * rest
    )
