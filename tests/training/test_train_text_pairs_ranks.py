"""Two processes that learn from text pairs end where one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kinfolk.models import read_state
from kinfolk.training.train import train
from tests.training.test_train_towers_ranks import run_in
from tests.training.text_table import SMALL, write_table


def learn(data: str, out: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    settings = {
        **SMALL,
        "detector.alpha": 0.2,
        "detector.init": "quantile",
        "knn.every": 0,
        "optimizer.name": "sgd",  # AdamW turns rounding into steps where a gradient is 0
        "optimizer.lr": 0.1,
        "trainer.devices": int(environment.get("WORLD_SIZE", "1")),
    }
    given = {"method": "pairs+glofnd", "epochs": 2, "batch_size": 12}
    train(data, out, settings=settings, progress=False, **given)  # type: ignore[arg-type]


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    data = write_table(tmp_path / "t.csv", negatives=1)
    one, two = (run_in(data, tmp_path / str(ranks), ranks, learn) for ranks in (1, 2))
    losses = [[row["loss"] for row in run.epochs()] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    states = [read_state(run.path / "towers.safetensors") for run in (one, two)]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-3, atol=1e-4)
