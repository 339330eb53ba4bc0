"""What is done about the kin of one anchor, as slow loops over the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ROUNDING = 1e-12
"""Similarities that differ by less are equal."""


class Row(NamedTuple):
    """Of each candidate: weight in the denominator, target in the numerator, whether it is kin."""

    w: list[float]
    y: list[float]
    kin: list[bool]


def row(
    sim: Sequence[float],
    out: Sequence[bool],
    degree: Sequence[float],
    action: str,
    min_negatives: int = 1,
    attracted_stay: bool = True,
) -> Row:
    """`out`: own or ignored. `degree`: 1 for kin without degrees; with "reweight" what is taken
    from the weight. At least `min_negatives` keep a weight, the least similar of those that would
    lose all of it, and with them all that are equally similar."""
    degree = [0.0 if o else d for o, d in zip(out, degree, strict=True)]
    if action == "eliminate":
        taken = [float(d > 0) for d in degree]
    elif action == "attract" and attracted_stay:
        taken = [0.0] * len(sim)
    else:
        taken = list(degree)
    left = [j for j in range(len(sim)) if not out[j] and taken[j] < 1]
    gone = sorted((sim[j], j) for j in range(len(sim)) if not out[j] and taken[j] >= 1)
    missing = min_negatives - len(left)
    spared: set[int] = set()
    if missing > 0 and gone:
        cut = gone[min(missing, len(gone)) - 1][0] + ROUNDING
        spared = {j for s, j in gone if s <= cut}
    found = Row([], [], [])
    for j in range(len(sim)):
        found.w.append(0.0 if out[j] else 1.0 if j in spared else 1.0 - taken[j])
        found.y.append(degree[j] if action == "attract" and j not in spared else 0.0)
        found.kin.append(degree[j] > 0 and j not in spared)
    return found
