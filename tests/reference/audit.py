"""The audit's definitions as slow loops, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def similarities(features: NDArray[Any]) -> list[list[float]]:
    """Cosine similarity of every pair."""
    rows = [[float(value) for value in row] for row in features]
    norms = [math.sqrt(sum(value * value for value in row)) for row in rows]
    return [
        [
            sum(a * b for a, b in zip(one, two, strict=True)) / (n * m)
            for two, m in zip(rows, norms, strict=True)
        ]
        for one, n in zip(rows, norms, strict=True)
    ]


def threshold(similarity: list[float], own: int, alpha: float) -> float:
    """The smallest value that at least a share 1 − α of the other similarities does not exceed."""
    others = sorted(value for j, value in enumerate(similarity) if j != own)
    for value in others:
        if sum(other <= value for other in others) >= (1 - alpha) * len(others) - 1e-9:
            return value
    raise AssertionError("the largest value is exceeded by none")


def flagged(
    features: NDArray[Any], alpha: float
) -> tuple[NDArray[np.float64], list[list[tuple[int, float]]]]:
    """(N,) thresholds, and for each anchor who is above its own, with the similarity, closest
    first."""
    thresholds, kin = [], []
    for i, row in enumerate(similarities(features)):
        level = threshold(row, i, alpha)
        above = [(j, value) for j, value in enumerate(row) if j != i and value > level]
        thresholds.append(level)
        kin.append(sorted(above, key=lambda pair: -pair[1]))
    return np.asarray(thresholds), kin


def judged(kin: list[list[tuple[int, float]]], labels: list[int]) -> tuple[float, float, float]:
    """Precision, recall and F1 over all flagged pairs with two known labels."""
    hits = judged = total = 0
    for i, row in enumerate(kin):
        total += sum(
            j != i and labels[i] >= 0 and labels[j] == labels[i] for j in range(len(labels))
        )
        for j, _ in row:
            if labels[i] >= 0 and labels[j] >= 0:
                judged += 1
                hits += labels[i] == labels[j]
    return hits / judged, hits / total, 2 * hits / (judged + total)
