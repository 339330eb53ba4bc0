"""Subsets of the labels: balanced, seeded, nested, at least one of each class; and those that a
file lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.evaluation.gradient_training import label_subset, read_subset


def counts(labels: np.ndarray, used: np.ndarray) -> list[int]:
    return [int((used & (labels == label)).sum()) for label in range(3)]


def test_as_many_of_each_class_and_at_least_one() -> None:
    labels = np.repeat([0, 1, 2, -1], [600, 300, 4, 500])
    assert counts(labels, label_subset(labels, 1.0, 0)) == [600, 300, 4]
    assert counts(labels, label_subset(labels, 0.1, 0)) == [30, 30, 4]
    assert counts(labels, label_subset(labels, 0.01, 0)) == [3, 3, 3]
    assert counts(labels, label_subset(labels, 0.0001, 0)) == [1, 1, 1]
    assert not label_subset(labels, 1.0, 0)[labels < 0].any()


def test_label_subsets_are_seeded_and_nested() -> None:
    labels = np.arange(300) % 3
    tenth = label_subset(labels, 0.1, 5)
    assert np.array_equal(tenth, label_subset(labels, 0.1, 5))
    assert not np.array_equal(tenth, label_subset(labels, 0.1, 6))
    assert (tenth | ~label_subset(labels, 0.02, 5)).all()


def test_wrong_lists_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"`fraction` \(=0\)"):
        label_subset(np.arange(3), 0, 0)
    with pytest.raises(KinfolkError, match="no labelled samples"):
        label_subset(np.full(3, -1), 0.5, 0)


KEYS = [
    "train/n01/n01_1.JPEG",
    "train/n01/n01_2.JPEG",
    "train/n02/n02_1.JPEG",
    "train/n02/same.png",
    "train/n01/same.png",
]


def test_a_list_of_file_names(tmp_path: Path) -> None:
    path = tmp_path / "1percent.txt"
    path.write_text("\ufeffn01_2.JPEG\r\n\nn02_1.JPEG\nn02_1.JPEG\nn99_7.JPEG\n", encoding="utf-8")
    assert read_subset(path, KEYS).tolist() == [False, True, True, False, False]
    path.write_text("train/n01/n01_1.JPEG\n", encoding="utf-8")
    assert read_subset(path, KEYS).tolist() == [True, False, False, False, False]


def test_lists_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    for text, message in (
        ("same.png", "several images share"),
        ("n99_7.JPEG", "lists none of the labelled"),
        ("", "lists none of the labelled"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_subset(path, KEYS)
