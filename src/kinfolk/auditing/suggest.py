"""What the audit advises: a share α, and how many false negatives a batch would hold.

Dimension key: N data set, S samples with a known label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.features import Ints
from kinfolk.auditing.survey import Survey

BATCH_SIZES = (64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class BatchLine:
    """False negatives to be expected in a batch of two views a sample.

    Args:
        batch_size: samples.
        negatives: of each anchor: 2 · (batch_size − 1).
        per_anchor: false ones among them.
        per_batch: the same over all 2 · batch_size anchors.
        chance: that an anchor has at least one.
    """

    batch_size: int
    negatives: int
    per_anchor: float
    per_batch: float
    chance: float


def suggested_alpha(survey: Survey, num_samples: int) -> float:
    """The share of pairs that stands out from strangers, to two digits, at least one pair for each anchor and at most a half."""
    share = min(max(survey.excess, 1 / (num_samples - 1)), 0.5)
    return float(f"{share:.2g}")


def best_alpha(survey: Survey) -> float | None:
    """The α of the curve with the highest F1; None without labels."""
    points = [point for point in survey.curve if point.rule == "one α" and np.isfinite(point.f1)]
    return max(points, key=lambda point: point.f1).alpha if points else None


def kin_share(labels_N: Ints) -> float:
    """Share of the pairs with two known labels whose labels are equal; NaN where there are none."""
    known = labels_N[labels_N >= 0]
    pairs = len(known) * (len(known) - 1)
    return kin_pairs(labels_N) / pairs if pairs else float("nan")


def kin_pairs(labels_N: Ints) -> int:
    """Ordered pairs of different samples with equal known labels."""
    known = labels_N[labels_N >= 0]
    sizes = np.unique(known, return_counts=True)[1].astype(object)  # Python integers: the product may be large
    return int(sum(size * (size - 1) for size in sizes))


def kin_shares(labels_N: Ints | None, suggested: float) -> NDArray[np.float64]:
    """(S,) the share of kin among the others, of each sample with a known label; without any, the suggested one."""
    known = np.empty(0) if labels_N is None else labels_N[labels_N >= 0]
    if len(known) < 2:
        return np.full(1, suggested)
    _, inverse, sizes = np.unique(known, return_inverse=True, return_counts=True)
    shares: NDArray[np.float64] = (sizes[inverse] - 1) / (len(known) - 1)
    return shares


def batch_lines(shares_S: NDArray[np.float64], num_samples: int, sizes: Sequence[int]) -> tuple[BatchLine, ...]:
    """One line for each batch size that the data can fill, or one for all of it; see `kin_shares`."""
    share, lines = float(shares_S.mean()), []
    for size in [size for size in sizes if size <= num_samples] or [num_samples]:
        others = size - 1
        chance = float((1 - (1 - shares_S) ** others).mean())
        lines.append(BatchLine(size, 2 * others, 2 * others * share, 4 * size * others * share, chance))
    return tuple(lines)
