"""Statistics of a random part of the anchors, the share of pairs with equal labels, and the false
negatives that a batch will contain.

`take_survey` computes all similarities of some anchors. From them come the histogram of
similarities and, with labels, the curve of precision and recall along α.

Dimension key: S surveyed anchors (in `kin_shares`: samples with a known label), R rows of a block,
N data set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing import similarity_spread
from kinfolk.auditing.exact import full_rows, num_kin
from kinfolk.auditing.inputs import Features, Floats, Ints

PAIRS, PAIRS_LABELLED = 10_000_000, 50_000_000
FEWEST_ANCHORS = 256
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
BINS = 80


@dataclass(frozen=True)
class Point:
    """What one α flags. `share` is the share of all pairs; precision, recall and F1 are NaN where
    no labels are known."""

    alpha: float
    rule: str
    share: float
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Survey:
    """Statistics of the surveyed anchors.

    Args:
        anchors: (S,) their ids; all samples of a small data set.
        curve: for each α one point of the rule "one α" and one of "α by sample".
        level: the z of `similarity_spread` at the audit's α.
        edges, density: histogram of all similarities of the anchors.
        same_density: histogram of the similarities of pairs with equal labels; None without labels.
    """

    anchors: Ints
    curve: tuple[Point, ...]
    level: float
    edges: Floats
    density: Floats
    same_density: Floats | None


def surveyed_anchors(num_samples: int, labelled: bool) -> Ints:
    """Enough anchors for about ten million pairs, or fifty million with labels."""
    return similarity_spread.column_sample(
        num_samples, max(FEWEST_ANCHORS, (PAIRS_LABELLED if labelled else PAIRS) // num_samples)
    )


def take_survey(
    features: Features, alpha: float, labels_N: Ints | None, progress: bool = False
) -> Survey:
    """Computes all similarities of the surveyed anchors twice: first for their distribution, then
    for what each α flags."""
    anchors_S = surveyed_anchors(len(features), labels_N is not None)
    columns_M, columns_MD = similarity_spread.prepared_columns(features)
    tails_Z = np.zeros(len(similarity_spread.LEVELS), dtype=np.int64)
    edges = np.linspace(-1, 1, BINS + 1, dtype=np.float32)
    counts, same_counts = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
    spreads: list[tuple[Floats, Floats]] = []
    for ids_R, sim_RN in full_rows(features, anchors_S, progress, "Surveying some anchors"):
        spreads.append(
            similarity_spread.spread(
                similarity_spread.sampled_rows(features.take(ids_R), ids_R, columns_MD, columns_M)
            )[:2]
        )
        tails_Z += similarity_spread.tails(sim_RN, *spreads[-1]).sum(0)
        for total, more in zip(
            (counts, same_counts), _histogram(sim_RN, labels_N, ids_R), strict=True
        ):
            total += more
    pairs = len(anchors_S) * (len(features) - 1)
    level = similarity_spread.level_for(alpha, tails_Z, pairs)
    curve = _curve(
        features, anchors_S, labels_N, spreads, tails_Z, sorted({*ALPHAS, alpha}), progress
    )
    return Survey(
        anchors_S,
        curve,
        level,
        edges,
        (counts / max(1, counts.sum())).astype(np.float32),
        None if labels_N is None else (same_counts / max(1, same_counts.sum())).astype(np.float32),
    )


def _curve(
    features: Features,
    anchors_S: Ints,
    labels_N: Ints | None,
    spreads: list[tuple[Floats, Floats]],
    tails_Z: NDArray[np.int64],
    alphas: list[float],
    progress: bool,
) -> tuple[Point, ...]:
    if labels_N is None:
        return ()
    others = len(features) - 1
    pairs = len(anchors_S) * others
    ranks = np.asarray([num_kin(alpha, others) for alpha in alphas])
    levels = np.asarray(
        [similarity_spread.level_for(alpha, tails_Z, pairs) for alpha in alphas], dtype=np.float32
    )
    known_N = labels_N >= 0
    all_known = bool(known_N.all())
    counts = np.zeros(
        (3, 2 * len(alphas)), dtype=np.int64
    )  # flagged pairs, those with known labels, those with equal labels; for both rules
    kin = 0
    for (ids_R, sim_RN), (median_R, spread_R) in zip(
        full_rows(features, anchors_S, progress, "Counting along α"), spreads, strict=True
    ):
        for anchor, sim_N, median, spread in zip(ids_R, sim_RN, median_R, spread_R, strict=True):
            order_N = np.sort(sim_N)  # the sample itself, at −inf, comes first
            bounds = np.concatenate((order_N[others - ranks], median + levels * spread))
            counts[0] += _above(order_N, bounds)
            if known_N[anchor]:
                same = np.sort(sim_N[labels_N == labels_N[anchor]])
                counts[1] += _above(order_N if all_known else np.sort(sim_N[known_N]), bounds)
                counts[2] += _above(same, bounds)
                kin += len(same) - 1
    rules = [(rule, alpha) for rule in ("one α", "α by sample") for alpha in alphas]
    return tuple(
        _point(alpha, rule, counts[:, i], kin, pairs) for i, (rule, alpha) in enumerate(rules)
    )


def _above(order: Floats, bounds: Floats) -> Ints:
    """Number of sorted values above each bound."""
    return len(order) - np.searchsorted(order, bounds, side="right")


def _point(alpha: float, rule: str, counts: Any, kin: int, pairs: int) -> Point:
    flagged, judged, hits = (int(count) for count in counts)
    nan = float("nan")
    precision, recall = hits / judged if judged else nan, hits / kin if kin else nan
    return Point(
        alpha,
        rule,
        flagged / pairs,
        precision,
        recall,
        2 * hits / (judged + kin) if judged + kin else nan,
    )


def _histogram(
    sim_RN: Floats, labels_N: Ints | None, ids_R: Ints
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(BINS,), (BINS,) number of similarities of the rows in each bin, and of those between samples
    with equal labels."""
    counts, same = np.zeros(BINS + 1, dtype=np.int64), np.zeros(BINS + 1, dtype=np.int64)
    for anchor, sim_N in zip(ids_R, sim_RN, strict=True):
        # 0: the sample itself
        place_N = (
            np.floor((sim_N + 1) * np.float32(BINS / 2)).clip(-1, BINS - 1).astype(np.int64) + 1
        )
        counts += np.bincount(place_N, minlength=BINS + 1)
        if labels_N is not None and labels_N[anchor] >= 0:
            same += np.bincount(place_N[labels_N == labels_N[anchor]], minlength=BINS + 1)
    return counts[1:], same[1:]


BATCH_SIZES = (64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class BatchLine:
    """Expected number of false negatives in a batch.

    Args:
        batch_size: number of samples.
        negatives: negatives of each anchor, with two views of each sample 2 · (batch_size − 1).
        per_anchor: false negatives among them.
        per_batch: false negatives of all anchors, two for each sample.
        chance: probability that an anchor has at least one.
    """

    batch_size: int
    negatives: int
    per_anchor: float
    per_batch: float
    chance: float


def best_alpha(survey: Survey) -> float | None:
    """The α of the curve with the highest F1; None without labels."""
    points = [point for point in survey.curve if point.rule == "one α" and np.isfinite(point.f1)]
    return max(points, key=lambda point: point.f1).alpha if points else None


def kin_share(labels_N: Ints) -> float:
    """Share of pairs with equal labels among the pairs with two known labels; NaN where there are
    none."""
    known = labels_N[labels_N >= 0]
    pairs = len(known) * (len(known) - 1)
    return kin_pairs(labels_N) / pairs if pairs else float("nan")


def kin_pairs(labels_N: Ints) -> int:
    """Ordered pairs of different samples with equal known labels."""
    known = labels_N[labels_N >= 0]
    # Python integers: the product may be large
    sizes = np.unique(known, return_counts=True)[1].astype(object)
    return int(sum(size * (size - 1) for size in sizes))


def kin_share_range(labels_N: Ints) -> tuple[float, float]:
    """95 % confidence interval of `kin_share` in the whole data set, if the samples with a known
    label are a random part of it. With all labels known both ends are the share.

    The variance is that of a U-statistic, corrected for the labelled part of the data, on a
    logarithmic scale, because the share is small and its distribution skewed.
    """
    share, known = kin_share(labels_N), labels_N[labels_N >= 0]
    num = len(known)
    unknown = 1 - num / len(labels_N)
    if num < 3 or share in (0, 1):
        highest = -math.log(0.025) / max(1, num * (num - 1) // 2)
        return (0.0, min(1.0, highest)) if share == 0 and unknown else (share, share)
    by_pair = share * (1 - share) / (num - 1)
    by_sample = max(0.0, float(kin_shares(labels_N, share).var(ddof=1)) - by_pair)
    pairs_unknown = 1 - (num / len(labels_N)) ** 2
    # 3 instead of the 2 of theory: `by_sample` is itself uncertain if few samples are labelled
    error = math.sqrt((unknown * 4 * by_sample + pairs_unknown * 3 * by_pair) / num)
    factor = math.exp(1.96 * error / share)
    return share / factor, min(1.0, share * factor)


def kin_shares(labels_N: Ints | None, otherwise: float) -> NDArray[np.float64]:
    """(S,) share of the other samples with the same label, for each sample with a known label;
    `otherwise` if there are fewer than two."""
    known = np.empty(0) if labels_N is None else labels_N[labels_N >= 0]
    if len(known) < 2:
        return np.full(1, otherwise)
    _, inverse, sizes = np.unique(known, return_inverse=True, return_counts=True)
    shares: NDArray[np.float64] = (sizes[inverse] - 1) / (len(known) - 1)
    return shares


def batch_lines(
    shares_S: NDArray[np.float64], num_samples: int, sizes: Sequence[int], views: int = 2
) -> tuple[BatchLine, ...]:
    """One line for each batch size that the data can fill; if there is none, one line for the whole
    data set. `views`: of each sample among the negatives. See `kin_shares`."""
    share, lines = float(shares_S.mean()), []
    for size in [size for size in sizes if size <= num_samples] or [num_samples]:
        others = views * (size - 1)
        chance = float((1 - (1 - shares_S) ** (size - 1)).mean())
        lines.append(BatchLine(size, others, others * share, 2 * size * others * share, chance))
    return tuple(lines)
