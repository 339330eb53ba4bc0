"""Mean per class and average precision against scikit-learn and slow loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score

from kinfolk.evaluation.probes import (
    average_precision,
    mean_average_precision,
    mean_per_class,
    top5,
)


def test_mean_per_class_is_scikit_learns_balanced_accuracy() -> None:
    rng = np.random.default_rng(0)
    truth = rng.choice(4, 200, p=(0.7, 0.2, 0.06, 0.04))
    predicted = np.where(rng.random(200) < 0.6, truth, rng.integers(0, 4, 200))
    assert mean_per_class(predicted, truth) == pytest.approx(
        balanced_accuracy_score(truth, predicted)
    )


def eleven_points(scores: np.ndarray, truth: np.ndarray) -> float:
    """VOC 2007: for each recall of 0, 0.1 … 1 the best precision at that recall or more."""
    order = np.argsort(-scores)
    hits = np.cumsum(truth[order])
    precision, recall = hits / np.arange(1, len(order) + 1), hits / truth.sum()
    return (
        float(
            sum(
                max(p for p, r in zip(precision, recall, strict=True) if r >= level - 1e-9)
                for level in np.arange(11) / 10
            )
        )
        / 11
    )


def test_average_precision_equals_scikit_learn_and_eleven_points() -> None:
    rng = np.random.default_rng(0)
    truth, scores = rng.integers(0, 2, 60), rng.normal(size=60)
    assert average_precision(scores, truth) == pytest.approx(average_precision_score(truth, scores))
    assert average_precision(scores, truth, points=11) == pytest.approx(
        eleven_points(scores, truth)
    )
    known = truth.copy()
    known[:20] = -1
    assert average_precision(scores, known) == pytest.approx(
        average_precision_score(truth[20:], scores[20:])
    )
    assert math.isnan(average_precision(scores, np.zeros(60)))


def test_classes_without_a_positive_do_not_count() -> None:
    scores, truth = np.array([[0.9, 0.5], [0.1, 0.4]]), np.array([[1, 0], [0, 0]])
    assert mean_average_precision(scores, truth) == 1
    assert math.isnan(mean_average_precision(scores, np.zeros((2, 2))))


def test_top5_equals_a_sort() -> None:
    rng = np.random.default_rng(0)
    scores, classes, truth = rng.normal(size=(50, 9)), np.arange(9) * 3, rng.integers(0, 9, 50) * 3
    truth[0] = 1  # a class that training lacks
    slow = np.mean(
        [y in classes[np.argsort(row)[::-1][:5]] for row, y in zip(scores, truth, strict=True)]
    )
    assert top5(scores, classes, truth) == slow
    assert np.isnan(top5(scores[:, :5], classes[:5], truth))
