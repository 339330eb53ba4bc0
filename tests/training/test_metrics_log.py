"""The line of an epoch: detection per anchor next to that over pairs."""

from __future__ import annotations

from pathlib import Path

from kinfolk.training.metrics_log import describe
from kinfolk.training.train import train
from tests.training.small import BARE


def test_a_training_writes_both_kinds_of_detection(tmp_path: Path) -> None:
    """FNC flags as many for every anchor, so that precision is the same over pairs and per anchor;
    recall need not be."""
    settings = {**BARE, "detector.alpha": 0.1}
    (row,) = train(
        "digits",
        tmp_path / "run",
        method="simclr+fnc",
        batch_size=256,
        epochs=1,
        settings=settings,
        progress=False,
    ).epochs()
    assert all(
        0 < row[f"{kind}{name}"] < 1
        for kind in ("", "anchor_")
        for name in ("precision", "recall", "f1")
    )
    assert abs(row["anchor_precision"] - row["precision"]) < 1e-3
    assert row["anchor_recall"] != row["recall"]
    assert "F1" in describe(row)
    assert "F1" not in describe(row, speed=False), "a narrow screen"
