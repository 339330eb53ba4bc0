"""The verdict: amount, advice and command follow from the audit."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.auditing.verdict import estimated_precision, verdict
from tests.auditing.test_run_audit import clustered


def test_many_false_negatives_and_right_flags_are_eliminated() -> None:
    x, labels = clustered(600, dim=24, clusters=10)
    found = kf.audit(x, 0.02, labels)
    decided = verdict(found, data="my photos/")
    (line,) = [line for line in found.batches if line.batch_size == 256]
    assert f"each anchor has {line.per_anchor:.1f} false negatives among 510 negatives" in decided.amount
    assert "many, about as in CIFAR-10" in decided.amount
    assert found.precision > 0.9
    assert decided.action == "attract"
    assert decided.command.startswith("kinfolk train --data 'my photos/' --out runs/glofnd --method simclr+glofnd --set detector.alpha=")
    low, high = found.suggested_range
    assert low <= found.suggested_alpha <= high
    assert f"interval {low:g} to {high:g}" in decided.alpha


def test_wrong_flags_are_not_removed() -> None:
    x, _ = clustered(600, dim=24, clusters=10)
    labels = np.random.default_rng(9).integers(0, 10, 600)
    decided = verdict(kf.audit(x, 0.02, labels))
    assert decided.action == "prior"
    assert "do not remove" in decided.advice
    assert "--encoder" in decided.command


def test_few_false_negatives_need_no_detector() -> None:
    x = np.random.default_rng(0).normal(size=(600, 24))
    decided = verdict(kf.audit(x, 0.01, np.arange(600) // 2))
    assert "few, about as in ImageNet-1k" in decided.amount
    assert decided.action == "none"
    assert decided.command.endswith("--method simclr")


@pytest.mark.parametrize(
    ("alpha", "level", "expected"), [(0.5, 0.0, 0.0), (0.16, 1.0, 1 - 0.158655 / 0.16), (0.1, 6.0, 1.0), (0.01, 1.0, 0.0)]
)
def test_estimated_precision_is_the_excess_over_a_normal_distribution(alpha: float, level: float, expected: float) -> None:
    assert estimated_precision(alpha, level) == pytest.approx(expected, abs=1e-5)


def test_the_estimate_tells_noise_from_clusters() -> None:
    x, labels = clustered(800, dim=24, clusters=20)
    clear, noise = kf.audit(x, 0.02), kf.audit(np.random.default_rng(0).normal(size=(800, 24)), 0.02)
    assert estimated_precision(0.02, clear.survey.level) > 0.8
    assert estimated_precision(0.02, noise.survey.level) < 0.5
    assert math.isclose(kf.audit(x, 0.02, labels).precision, estimated_precision(0.02, clear.survey.level), abs_tol=0.15)
