"""Few labels: the same as probes on the subsets, draws, fewer samples than classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.embedding import LabelledFeatures
from kinfolk.errors import KinfolkError
from kinfolk.evaluation.gradient_training import label_subset
from kinfolk.evaluation.probes import linear_probe
from kinfolk.evaluation.protocols import run_semi


def blobs(count: int, seed: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    return (
        np.random.default_rng(0).normal(size=(classes, 12))[y] + 0.7 * rng.normal(size=(count, 12))
    ).astype(np.float32), y


def parts_of(count: int = 200) -> LabelledFeatures:
    train, test, ids = blobs(count, 1), blobs(count, 2), np.arange(count)
    return LabelledFeatures(ids, *train, ids + count, *test, "test split")


def test_equals_probes_on_the_subsets() -> None:
    parts = parts_of()
    data = parts.train_x, parts.train_y, parts.test_x, parts.test_y
    found = run_semi(parts, 3, fractions=(0.001, 1, 0.1))
    whole, tenth, few = found["fractions"]
    labels = [(row["fraction"], row["labels"]) for row in (whole, tenth, few)]
    assert labels == [(1, 200), (0.1, 20), (0.001, 4)]
    assert whole["accuracy"] == linear_probe(*data, seed=3).accuracy
    expected = []
    for seed in (3, 4, 5):
        used = label_subset(parts.train_y, 0.1, seed)
        few_data = parts.train_x[used], parts.train_y[used], *data[2:]
        expected.append(linear_probe(*few_data, seed=seed).accuracy)
    assert tenth["accuracy"] == pytest.approx(np.mean(expected))
    assert tenth["deviation"] == pytest.approx(np.std(expected, ddof=1))
    assert "deviation" not in whole
    assert whole["accuracy"] > few["accuracy"] > 0.25
    rows = (whole, tenth, few)
    assert found["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in rows]))


def test_one_class_and_fractions_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`fraction` \(=2\)"):
        run_semi(parts_of(40), 0, fractions=(2,))
    parts = parts_of(40)
    parts.train_y[:] = 0
    with pytest.raises(KinfolkError, match="at least two classes"):
        run_semi(parts, 0, fractions=(0.1,))


def test_a_listed_subset_probes_the_listed_labels(tmp_path: Path) -> None:
    parts = parts_of()
    used = np.arange(200) % 7 == 0
    (tmp_path / "few.txt").write_text("\n".join(f"{row}.png" for row in np.flatnonzero(used)))
    keys = [f"train/{row}.png" for row in range(400)]
    found = run_semi(parts, 0, fractions=(), lists=[tmp_path / "few.txt"], keys=keys)
    (row,) = found["fractions"]
    assert (row["subset"], row["labels"]) == ("few", int(used.sum()))
    assert row["fraction"] == pytest.approx(used.mean())
    data = parts.train_x[used], parts.train_y[used], parts.test_x, parts.test_y
    assert row["accuracy"] == linear_probe(*data).accuracy
