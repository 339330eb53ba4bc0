"""The line of an epoch: detection per anchor beside that over pairs, and counts of checkpoints that
have fewer of them."""

from __future__ import annotations

from pathlib import Path

import torch

from kinfolk.stats import Stats
from kinfolk.training.metrics_log import MetricsLog, describe
from kinfolk.training.run_folder import Run
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
    assert "per anchor" in describe(row)
    assert "per anchor" not in describe(row, speed=False), "a narrow screen"


def test_a_checkpoint_of_fewer_counts_begins_the_epoch_anew(tmp_path: Path) -> None:
    metrics_log = MetricsLog(Run(tmp_path), [], 1)
    state = {"loss": torch.zeros(()), "steps": 3, "seconds": 1.0}
    metrics_log.load_state_dict({**state, "counts": torch.ones(9, dtype=torch.int64)})
    assert torch.equal(metrics_log.counts, Stats.empty().counts)
    kept = torch.arange(len(Stats.empty().counts))
    metrics_log.load_state_dict({**state, "counts": kept})
    assert torch.equal(metrics_log.counts, kept)
