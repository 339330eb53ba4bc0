"""Subsets of the labels: balanced, seeded, nested, at least one of each class."""

from __future__ import annotations

import numpy as np
import pytest

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.subsets import label_subset


def counts(labels: np.ndarray, used: np.ndarray) -> list[int]:
    return [int((used & (labels == label)).sum()) for label in range(3)]


def test_as_many_of_each_class_and_at_least_one() -> None:
    labels = np.repeat([0, 1, 2, -1], [600, 300, 4, 500])
    assert counts(labels, label_subset(labels, 1.0, 0)) == [600, 300, 4]
    assert counts(labels, label_subset(labels, 0.1, 0)) == [30, 30, 4]
    assert counts(labels, label_subset(labels, 0.01, 0)) == [3, 3, 3]
    assert counts(labels, label_subset(labels, 0.0001, 0)) == [1, 1, 1]
    assert not label_subset(labels, 1.0, 0)[labels < 0].any()


def test_seeded_and_nested() -> None:
    labels = np.arange(300) % 3
    tenth = label_subset(labels, 0.1, 5)
    assert np.array_equal(tenth, label_subset(labels, 0.1, 5))
    assert not np.array_equal(tenth, label_subset(labels, 0.1, 6))
    assert (tenth | ~label_subset(labels, 0.02, 5)).all()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"`fraction` \(=0\)"):
        label_subset(np.arange(3), 0, 0)
    with pytest.raises(KinfolkError, match="no labelled samples"):
        label_subset(np.full(3, -1), 0.5, 0)
