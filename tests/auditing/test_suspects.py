"""Label errors that were planted are found, and hard samples are not listed."""

from __future__ import annotations

from typing import Any

import numpy as np

import kinfolk as kf
from tests.auditing.test_run_audit import clustered

Array = np.ndarray[Any, Any]


def with_errors(labels: Array, wrong: Array, classes: int, seed: int = 0) -> Array:
    given: Array = labels.copy()
    shift = np.random.default_rng(seed).integers(1, classes, len(wrong))
    given[wrong] = (labels[wrong] + shift) % classes
    return given


def test_planted_label_errors_are_found_and_corrected() -> None:
    x, labels = clustered(800, dim=24, clusters=8)
    wrong = np.arange(0, 800, 20)
    check = kf.audit(x, 0.05, with_errors(labels, wrong, 8)).label_check
    hits = np.isin(check.found["sample"], wrong)
    assert len(hits) >= 20
    assert hits.mean() >= 0.9
    assert check.noise == np.clip(check.noise, 0.03, 0.07)
    right = check.found["suggested"] == labels[check.found["sample"]]
    assert right[hits].all()
    assert (check.found["probability"] >= 0.9).all()
    assert len(kf.audit(x, 0.05, labels).mislabels) == 0
    assert len(kf.audit(x, 0.05).mislabels) == 0


def test_hard_samples_are_not_taken_for_errors() -> None:
    """Classes that overlap: many right labels have neighbours that agree on another one."""
    x, labels = clustered(1200, dim=4, clusters=6)
    check = kf.audit(x, 0.02, labels).label_check
    assert check.accuracy < 0.9
    assert len(check.found) <= 3
    wrong = np.arange(0, 1200, 20)
    found = kf.audit(x, 0.02, with_errors(labels, wrong, 6)).mislabels
    assert not len(found) or np.isin(found["sample"], wrong).mean() >= 0.7


def test_features_that_cannot_tell_say_so() -> None:
    x = np.random.default_rng(0).normal(size=(300, 8))
    check = kf.audit(x, 0.05, np.random.default_rng(1).integers(0, 3, 300)).label_check
    assert len(check.found) == 0
    assert not check.can_tell
    assert check.description.startswith("Label errors cannot be judged: these features predict")


def test_labels_that_have_nothing_to_do_with_clear_clusters_are_not_all_errors() -> None:
    x, _ = clustered(80, dim=16, clusters=3)
    check = kf.audit(x, 0.1, np.arange(80) % 10).label_check
    assert len(check.found) == 0
    assert not check.can_tell


def test_labels_that_occur_too_rarely_are_left_out() -> None:
    x, labels = clustered(300, dim=24, clusters=4)
    given = [f"class {label}" if i >= 4 else f"only {i}" for i, label in enumerate(labels)]
    assert kf.audit(x, 0.05, given).label_check.num_checked == 296
    alone = kf.audit(x, 0.05, [str(i) for i in range(300)]).label_check
    assert alone.description == "No class has 5 labels or more, so label errors cannot be judged."
