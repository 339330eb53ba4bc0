"""Algorithm 1 of the Ring paper and its annealing, one anchor and one similarity at a time."""

from __future__ import annotations

import math
from fractions import Fraction


def ring(row: list[float], lower: str, upper: str) -> tuple[list[int], list[int], list[int]]:
    """Columns too far, in the ring, and too close: the negatives sorted from far to close, cut at
    ⌊ω_ℓ n⌋ and ⌊ω_u n⌋.

    The shares are written out, so that their products are exact. Own candidates are −inf.
    """
    order = sorted((j for j, s in enumerate(row) if s != -math.inf), key=lambda j: (row[j], j))
    first, last = (math.floor(Fraction(share) * len(order)) for share in (lower, upper))
    return order[:first], order[first:last], order[last:]


def moco_ring_loss(
    own: float, row: list[float], lower: str, upper: str, temperature: float
) -> float:
    """−dps + logsumexp(ring_dps), with the positive in the sum."""
    kept = ring(row, lower, upper)[1]
    return -own / temperature + math.log(
        math.exp(own / temperature) + sum(math.exp(row[j] / temperature) for j in kept)
    )
