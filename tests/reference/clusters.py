"""MTPR, MTNR and NMI as slow loops over their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rates(labels: Sequence[int], truth: Sequence[int]) -> tuple[float, float]:
    """Sample by sample, pair by pair. A sample of unknown class (−1) is not there; a negative
    pseudo-label is equal to none."""
    known = [i for i in range(len(truth)) if truth[i] >= 0]
    positive, negative = [], []
    for i in known:
        same = [j for j in known if j != i and truth[j] == truth[i]]
        other = [j for j in known if truth[j] != truth[i]]
        together = {j for j in known if j != i and labels[j] == labels[i] and labels[i] >= 0}
        if same:
            positive.append(sum(j in together for j in same) / len(same))
        if other:
            negative.append(sum(j not in together for j in other) / len(other))
    return sum(positive) / len(positive) if positive else math.nan, sum(negative) / len(
        negative
    ) if negative else math.nan


def mutual_information(
    labels: Sequence[int], truth: Sequence[int], normaliser: str = "arithmetic"
) -> float:
    """I(p; y) over a mean of both entropies, or over one of them."""
    count = len(truth)

    def share(test: Sequence[bool]) -> float:
        return sum(test) / count

    def entropy(values: Sequence[int]) -> float:
        shares = [share([value == v for value in values]) for v in set(values)]
        return -sum(p * math.log(p) for p in shares)

    information = 0.0
    for p in set(labels):
        for y in set(truth):
            both = share([a == p and b == y for a, b in zip(labels, truth, strict=True)])
            if both:
                information += both * math.log(
                    both / share([a == p for a in labels]) / share([b == y for b in truth])
                )
    a, b = entropy(labels), entropy(truth)
    return (
        information
        / {
            "arithmetic": (a + b) / 2,
            "geometric": math.sqrt(a * b),
            "min": min(a, b),
            "max": max(a, b),
        }[normaliser]
    )
