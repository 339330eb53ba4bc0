"""False negatives over a data set as slow loops over their definitions, one pair of views at a
time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from tests.reference.detection import quantile

Flags = Callable[[int, int, float], bool]
"""Whether an anchor flags a candidate: their samples, and their similarity."""


def thresholds(z: Tensor, alpha: float) -> list[float]:
    """The exact quantile of each sample over its views and the views of all others."""
    num, views = z.shape[:2]
    others = [
        [
            float(z[i, v] @ z[j, w])
            for v in range(views)
            for j in range(num)
            if j != i
            for w in range(views)
        ]
        for i in range(num)
    ]
    return [quantile(row, alpha) for row in others]


def judged(z: Tensor, truth: Sequence[int], flags: Flags) -> dict[str, float]:
    """Precision, recall and F1 over pairs and as means over the samples, share flagged, and the
    mean rates of the anchors."""
    num, views = z.shape[:2]
    flagged = known_flagged = hits = kin = pairs = 0
    positive, negative = [], []
    precisions, recalls = [], []
    for i in range(num):
        sample_kin = sample_hits = sample_judged = 0
        for v in range(views):
            own_kin = own_hits = own_other = own_kept = 0
            for j in (j for j in range(num) if j != i):
                for w in range(views):
                    said = flags(i, j, float(z[i, v] @ z[j, w]))
                    pairs, flagged = pairs + 1, flagged + said
                    if truth[i] < 0 or truth[j] < 0:
                        continue
                    known_flagged, sample_judged = known_flagged + said, sample_judged + said
                    if truth[i] == truth[j]:
                        own_kin, own_hits = own_kin + 1, own_hits + said
                    else:
                        own_other, own_kept = own_other + 1, own_kept + (not said)
            hits, kin = hits + own_hits, kin + own_kin
            sample_hits, sample_kin = sample_hits + own_hits, sample_kin + own_kin
            positive += [own_hits / own_kin] if own_kin else []
            negative += [own_kept / own_other] if own_other else []
        if truth[i] >= 0:
            precisions.append(sample_hits / sample_judged if sample_judged else 1.0)
            recalls.append(sample_hits / sample_kin if sample_kin else 1.0)
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return {
        "flagged": flagged / pairs,
        "precision": hits / known_flagged if known_flagged else math.nan,
        "recall": hits / kin if kin else math.nan,
        "f1": 2 * hits / (known_flagged + kin) if known_flagged + kin else math.nan,
        "anchor_precision": precision,
        "anchor_recall": recall,
        "anchor_f1": 2 * precision * recall / (precision + recall),
        "mtpr": sum(positive) / len(positive) if positive else math.nan,
        "mtnr": sum(negative) / len(negative) if negative else math.nan,
    }


def similarities(z: Tensor, truth: Sequence[int]) -> tuple[float, float, float]:
    """Means over the pairs of views of a sample, of samples of one class, and of samples of
    different classes."""
    num, views = z.shape[:2]
    own: list[float] = []
    alike: list[float] = []
    other: list[float] = []
    for i in range(num):
        for j in range(num):
            for v in range(views):
                for w in range(views):
                    similarity = float(z[i, v] @ z[j, w])
                    if i == j and v != w:
                        own.append(similarity)
                    elif i != j and truth[i] >= 0 and truth[j] >= 0:
                        (alike if truth[i] == truth[j] else other).append(similarity)
    mean = [sum(values) / len(values) if values else math.nan for values in (own, alike, other)]
    return mean[0], mean[1], mean[2]
