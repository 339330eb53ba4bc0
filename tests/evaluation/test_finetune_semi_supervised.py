"""Few labels: the same as probes on the subsets, draws, fewer samples than classes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.gradient_training import ListedSubset, label_subset, semi_supervised
from kinfolk.evaluation.probes import linear_probe


def blobs(count: int, seed: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    return (
        np.random.default_rng(0).normal(size=(classes, 12))[y] + 0.7 * rng.normal(size=(count, 12))
    ).astype(np.float32), y


def test_equals_probes_on_the_subsets() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(200, 1), blobs(200, 2)
    whole, tenth, few = semi_supervised(
        train_x, train_y, test_x, test_y, fractions=(0.001, 1, 0.1), draws=2, seed=3
    )
    assert [(row.fraction, row.labels) for row in (whole, tenth, few)] == [
        (1, 200),
        (0.1, 20),
        (0.001, 4),
    ]
    assert whole.accuracies == (linear_probe(train_x, train_y, test_x, test_y, seed=3).accuracy,)
    expected = []
    for seed in (3, 4):
        used = label_subset(train_y, 0.1, seed)
        expected.append(
            linear_probe(train_x[used], train_y[used], test_x, test_y, seed=seed).accuracy
        )
    assert tenth.accuracies == tuple(expected)
    assert tenth.accuracy == pytest.approx(np.mean(expected))
    assert tenth.deviation == pytest.approx(np.std(expected, ddof=1))
    assert math.isnan(whole.deviation)
    assert whole.accuracy > few.accuracy > 0.25


def test_missing_labels_and_fractions_out_of_range_are_refused() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(40, 1), blobs(40, 2)
    with pytest.raises(ValueError, match=r"`fractions` \(=\(2,\)\)"):
        semi_supervised(train_x, train_y, test_x, test_y, fractions=(2,))
    with pytest.raises(ValueError, match=r"`draws` \(=0\)"):
        semi_supervised(train_x, train_y, test_x, test_y, draws=0)
    with pytest.raises(KinfolkError, match="at least two classes"):
        semi_supervised(train_x, np.zeros(40, dtype=np.int64), test_x, test_y, fractions=(0.1,))
    unlabelled = np.where(np.arange(40) < 8, train_y, -1)
    (row,) = semi_supervised(train_x, unlabelled, test_x, test_y, fractions=(0.1,), draws=1)
    assert row.labels == 4, "one of each class"


def test_a_listed_subset_probes_the_listed_known_labels() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(200, 1), blobs(200, 2)
    unknown = train_y.copy()
    unknown[:20] = -1
    used = np.arange(200) % 7 == 0
    (row,) = semi_supervised(
        train_x, unknown, test_x, test_y, fractions=(), subsets=[ListedSubset("few", used, 40)]
    )
    chosen = used & (unknown >= 0)
    assert (row.subset, row.labels, row.listed) == ("few", int(chosen.sum()), 40)
    assert row.fraction == pytest.approx(chosen.sum() / 180)
    assert row.accuracy == linear_probe(train_x[chosen], train_y[chosen], test_x, test_y).accuracy
