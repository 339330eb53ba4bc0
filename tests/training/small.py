"""Settings of a training of a second, and the comparison of two runs bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.run_folder import Run
from tests.faults.inject import differences

SMALL: dict[str, Any] = {
    "model.name": "resnet10",
    "model.width": 4,
    "head.out_size": 8,
    "views.preset": "mild",
    "views.size": 8,
}
"""The smallest network that trains on images of 8×8."""

BARE: dict[str, Any] = {**SMALL, "knn.every": 0, "trainer.loggers": []}
"""The same without measurements and loggers."""


def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the data set "digits" a third of its size."""
    from sklearn import datasets

    few = datasets.load_digits()
    few.update(images=few.images[:600], target=few.target[:600])
    monkeypatch.setattr(datasets, "load_digits", lambda: few)


def assert_same(run: Run, whole: Run) -> None:
    """Both runs ended in the same bits: checkpoint, model and metrics."""
    assert differences(run.path, whole.path) == []
    assert any("detector" in name for name in read_checkpoint(run.checkpoint)["state_dict"]), (
        "per-sample state is in the checkpoint"
    )
    assert {path.name for path in run.checkpoint.parent.iterdir()} == {"last.ckpt", "last-1.ckpt"}
