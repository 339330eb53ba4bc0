"""Label errors and outliers that were planted are found."""

from __future__ import annotations

import numpy as np

import kinfolk as kf
from tests.auditing.test_run_audit import clustered


def test_planted_label_errors_are_found_and_corrected() -> None:
    x, labels = clustered(400, dim=24, clusters=4)
    wrong = [3, 50, 200, 321]
    given = labels.copy()
    given[wrong] = (labels[wrong] + 1) % 4
    found = kf.audit(x, 0.05, given).mislabels
    assert sorted(found["sample"]) == wrong
    assert found["suggested"].tolist() == labels[found["sample"]].tolist()
    assert (found["agreement"] > 0.8).all()
    assert len(kf.audit(x, 0.05, labels).mislabels) == 0
    assert len(kf.audit(x, 0.05).mislabels) == 0


def test_neighbours_that_rarely_agree_are_no_evidence() -> None:
    x = np.random.default_rng(0).normal(size=(300, 8))
    assert len(kf.audit(x, 0.05, np.random.default_rng(1).integers(0, 3, 300)).mislabels) == 0


def test_planted_outliers_are_found() -> None:
    x, _ = clustered(400, dim=24, clusters=4)
    x[[7, 99]] = np.random.default_rng(5).normal(size=(2, 24)) * 3
    assert sorted(kf.audit(x, 0.05).outliers["sample"]) == [7, 99]
