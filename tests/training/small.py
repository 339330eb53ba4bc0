"""Settings of a training of a second, and the comparison of two runs bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.run_folder import Run

SMALL: dict[str, Any] = {"model.name": "resnet10", "model.width": 4, "head.out_size": 8, "views.preset": "mild", "views.size": 8}
"""The smallest network that trains on images of 8×8."""

BARE: dict[str, Any] = {**SMALL, "knn.every": 0, "snapshots.epochs": 0, "trainer.loggers": []}
"""The same without measurements, snapshots and loggers."""


def assert_same(run: Run, whole: Run) -> None:
    ours, theirs = read_checkpoint(run.checkpoint), read_checkpoint(whole.checkpoint)
    assert ours["kinfolk"] == theirs["kinfolk"]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(ours[part], theirs[part], part)
    assert any("detector" in name for name in ours["state_dict"]), "per-sample state is in the checkpoint"
    assert run.model.read_bytes() == whole.model.read_bytes()
    timing = ("seconds", "refresh_seconds", "images_per_second")
    lines = [[{key: value for key, value in row.items() if key not in timing} for row in each.epochs()] for each in (run, whole)]
    assert lines[0] == lines[1]
    assert {path.name for path in run.checkpoint.parent.iterdir()} == {"last.ckpt", "last-1.ckpt"}
    kept = [{path.name: path.read_bytes() for path in each.snapshots.iterdir()} for each in (run, whole)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}[{i}]")
    else:
        assert ours == theirs, where
