from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.auditing.verdict import guide_advice
from kinfolk.frameworks.registry import parse


def features(noise: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(200) % 10
    return np.eye(10)[labels] + noise * random.normal(size=(200, 10)), labels


def method_of(command: str) -> str:
    return command.split("--method ")[1].split()[0]


def test_a_good_guide_attracts_with_its_own_file(tmp_path: Path) -> None:
    x, labels = features(0.05)
    path = tmp_path / "features.npy"
    np.save(path, x)
    sentence, command = guide_advice(kf.audit(x, labels=labels), path, "photos/")
    assert sentence.startswith("As a guide for training: of the nearest")
    assert "100% are right (measured with the labels); attract the nearest" in sentence
    assert f"--data photos/ --out runs/guided --method simclr+guide:attract --guide {path} --set detector.alpha=" in command
    assert parse(method_of(command)).detector == "guide"
    assert 0 < float(command.rpartition("=")[2]) <= 0.1


def test_a_fair_guide_eliminates() -> None:
    x, labels = features(0.32)
    found = kf.audit(x, labels=labels)
    assert 0.5 <= found.precision < 0.9
    sentence, command = guide_advice(found)
    assert "eliminate the nearest" in sentence
    assert "--data DATA" in command
    assert "--guide FEATURES" in command
    assert method_of(command) == "simclr+guide"


def test_a_weak_guide_is_replaced_by_a_prior() -> None:
    x, labels = features(5.0)
    sentence, command = guide_advice(kf.audit(x, labels=labels))
    assert "too weak" in sentence
    assert method_of(command) == "simclr"
    assert float(command.rpartition("framework.prior=")[2]) == pytest.approx(0.1, abs=0.01)


def test_without_labels_the_precision_is_estimated() -> None:
    x, _ = features(0.05)
    assert "estimated without labels" in guide_advice(kf.audit(x))[0]
