"""A few anchors looked at in full: precision and recall along α, what stands out, and the check of an approximate audit.

Dimension key: S surveyed anchors, R rows of a block, N data set, G values of α.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing import shape
from kinfolk.auditing.features import Features, Floats, Ints
from kinfolk.auditing.rows import full_rows, num_kin

PAIRS, PAIRS_LABELLED = 10_000_000, 50_000_000
FEWEST_ANCHORS = 256
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
BINS = 80


@dataclass(frozen=True)
class Point:
    """What one α flags: shares of pairs; NaN without labels."""

    alpha: float
    rule: str
    share: float
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Survey:
    """What the surveyed anchors say.

    Args:
        anchors: (S,) their ids; all samples where there are few.
        curve: for each α one point of the rule "one α" and one of "α by sample".
        level: the z of `shape` at the audit's α.
        excess: share of pairs that stands out from the similarities of strangers, mean over the anchors.
        edges, density: histogram of all similarities of the anchors.
        same_density: the same of those with equal labels; None without labels.
    """

    anchors: Ints
    curve: tuple[Point, ...]
    level: float
    excess: float
    edges: Floats
    density: Floats
    same_density: Floats | None


def surveyed_anchors(num_samples: int, labelled: bool) -> Ints:
    """As many anchors as make some ten million pairs, or fifty where there are labels to count by."""
    return shape.column_sample(num_samples, max(FEWEST_ANCHORS, (PAIRS_LABELLED if labelled else PAIRS) // num_samples))


def take_survey(features: Features, alpha: float, labels_N: Ints | None, progress: bool = False) -> Survey:
    """Looks twice at the rows of the surveyed anchors: for their shape, then for what each α flags."""
    anchors_S = surveyed_anchors(len(features), labels_N is not None)
    columns_M, columns_MD = shape.prepared_columns(features)
    tails_Z = np.zeros(len(shape.LEVELS), dtype=np.int64)
    edges = np.linspace(-1, 1, BINS + 1, dtype=np.float32)
    counts, same_counts = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
    standing_out = 0.0
    shapes: list[tuple[Floats, Floats]] = []
    for ids_R, sim_RN in full_rows(features, anchors_S, progress, "Looking at a few anchors"):
        shapes.append(shape.spread(shape.sampled_rows(features.take(ids_R), ids_R, columns_MD, columns_M))[:2])
        tails_RZ = shape.tails(sim_RN, *shapes[-1])
        tails_Z += tails_RZ.sum(0)
        standing_out += float(shape.excess(tails_RZ, len(features) - 1).sum())
        for total, more in zip((counts, same_counts), _histogram(sim_RN, labels_N, ids_R), strict=True):
            total += more
    pairs = len(anchors_S) * (len(features) - 1)
    level = shape.level_for(alpha, tails_Z, pairs)
    curve = _curve(features, anchors_S, labels_N, shapes, tails_Z, sorted({*ALPHAS, alpha}), progress)
    return Survey(
        anchors_S,
        curve,
        level,
        standing_out / len(anchors_S),
        edges,
        (counts / max(1, counts.sum())).astype(np.float32),
        None if labels_N is None else (same_counts / max(1, same_counts.sum())).astype(np.float32),
    )


def _curve(
    features: Features,
    anchors_S: Ints,
    labels_N: Ints | None,
    shapes: list[tuple[Floats, Floats]],
    tails_Z: NDArray[np.int64],
    alphas: list[float],
    progress: bool,
) -> tuple[Point, ...]:
    if labels_N is None:
        return ()
    others = len(features) - 1
    pairs = len(anchors_S) * others
    ranks = np.asarray([num_kin(alpha, others) for alpha in alphas])
    levels = np.asarray([shape.level_for(alpha, tails_Z, pairs) for alpha in alphas], dtype=np.float32)
    known_N = labels_N >= 0
    everyone_known = bool(known_N.all())
    counts = np.zeros((3, 2 * len(alphas)), dtype=np.int64)  # flagged, judged, hits; of both rules
    kin = 0
    for (ids_R, sim_RN), (median_R, spread_R) in zip(full_rows(features, anchors_S, progress, "Counting along α"), shapes, strict=True):
        for anchor, sim_N, median, spread in zip(ids_R, sim_RN, median_R, spread_R, strict=True):
            order_N = np.sort(sim_N)  # −inf, the sample itself, comes first
            bounds = np.concatenate((order_N[others - ranks], median + levels * spread))
            counts[0] += _above(order_N, bounds)
            if known_N[anchor]:
                same = np.sort(sim_N[labels_N == labels_N[anchor]])
                counts[1] += _above(order_N if everyone_known else np.sort(sim_N[known_N]), bounds)
                counts[2] += _above(same, bounds)
                kin += len(same) - 1
    rules = [(rule, alpha) for rule in ("one α", "α by sample") for alpha in alphas]
    return tuple(_point(alpha, rule, counts[:, i], kin, pairs) for i, (rule, alpha) in enumerate(rules))


def _above(order: Floats, bounds: Floats) -> Ints:
    """How many of the sorted values are above each bound."""
    return len(order) - np.searchsorted(order, bounds, side="right")


def _point(alpha: float, rule: str, counts: Any, kin: int, pairs: int) -> Point:
    flagged, judged, hits = (int(count) for count in counts)
    nan = float("nan")
    precision, recall = hits / judged if judged else nan, hits / kin if kin else nan
    return Point(alpha, rule, flagged / pairs, precision, recall, 2 * hits / (judged + kin) if judged + kin else nan)


def _histogram(sim_RN: Floats, labels_N: Ints | None, ids_R: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(BINS,), (BINS,) how many similarities of the rows fall into each bin, and how many of those with equal labels."""
    counts, same = np.zeros(BINS + 1, dtype=np.int64), np.zeros(BINS + 1, dtype=np.int64)
    for anchor, sim_N in zip(ids_R, sim_RN, strict=True):
        place_N = np.floor((sim_N + 1) * np.float32(BINS / 2)).clip(-1, BINS - 1).astype(np.int64) + 1  # 0: the sample itself
        counts += np.bincount(place_N, minlength=BINS + 1)
        if labels_N is not None and labels_N[anchor] >= 0:
            same += np.bincount(place_N[labels_N == labels_N[anchor]], minlength=BINS + 1)
    return counts[1:], same[1:]
