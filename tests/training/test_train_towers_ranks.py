"""Two processes that learn from captions end where one does: towers, thresholds of both directions,
losses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kinfolk.models import adapt, read_state
from kinfolk.training import build
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.ranks import exit_codes
from tests.training.pairs_of import SMALL, write_pairs

SETTINGS: dict[str, Any] = {
    **SMALL,
    "views.preset": "plain",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.5,
    "detector.alpha": 0.2,
    "detector.init": "quantile",
}
"""Views without chance: a rank draws its own."""


def no_norm(*args: Any, **more: Any) -> nn.Module:
    """An encoder that does not look at the batch: BatchNorm would see each rank's part alone."""
    return adapt(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 24), nn.GELU(), nn.Linear(24, 8)), 8
    )


def learn(data: str, out: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    setattr(build, "build_encoder", no_norm)  # noqa: B010
    settings = {**SETTINGS, "trainer.devices": int(environment.get("WORLD_SIZE", "1"))}
    train(
        data, out, method="clip+glofnd", epochs=3, batch_size=16, settings=settings, progress=False
    )


def run_in(data: Path, out: Path, world_size: int, task: Callable[..., None] = learn) -> Run:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": port,
        "GROUP_RANK": "0",
    }
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    places = (
        [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        if world_size > 1
        else [{}]
    )
    assert exit_codes(task, [(str(data), str(out), place) for place in places]) == [0] * world_size
    return Run(out)


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "d", 32, captions=3)
    one, two = (run_in(data, tmp_path / str(ranks), ranks) for ranks in (1, 2))
    losses = [[row["loss"] for row in run.epochs()] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    states = [read_state(run.path / "towers.safetensors") for run in (one, two)]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-3, atol=1e-4)
    kept = [read_checkpoint(run.checkpoint)["state_dict"] for run in (one, two)]
    thresholds = [name for name in kept[0] if name.endswith("store.threshold")]
    assert len(thresholds) == 2, "one for each direction"
    for name in thresholds:
        assert (kept[0][name] != 1).all(), "every sample's threshold has been learned"
        torch.testing.assert_close(kept[0][name], kept[1][name], rtol=1e-3, atol=1e-3)
    assert all(row["flagged"] > 0 for row in one.epochs())
