"""A training that diverges: what is saved is finite, and the message says what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.training.checkpoint import not_finite, read_checkpoint
from kinfolk.training.module import NonFiniteLossError, TrainingModule
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.faults.methods import TINY


@pytest.fixture
def images(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x_train=random.integers(0, 256, (36, 8, 8, 3), dtype=np.uint8), y_train=np.arange(36) % 3)
    return tmp_path / "a.npz"


def diverge(images: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: int, **more: Any) -> str:
    """The message of a run whose BatchNorm statistics, but not its loss, are infinite after `step`."""
    take = TrainingModule.optimizer_step

    def spoil(self: TrainingModule, *args: Any, **others: Any) -> None:
        take(self, *args, **others)
        if self.global_step == step - 1:  # counted after this
            norm = next(part for part in self.framework.modules() if isinstance(part, torch.nn.BatchNorm2d))
            assert norm.running_var is not None
            norm.running_var[0] = torch.inf

    monkeypatch.setattr(TrainingModule, "optimizer_step", spoil)
    settings = {**TINY, "knn.every": 0, "snapshots.epochs": 0, **more}
    with pytest.raises(NonFiniteLossError) as caught:
        train(str(images), out, epochs=2, batch_size=12, settings=settings, progress=False)
    return str(caught.value)


def test_a_state_that_is_not_finite_is_not_saved(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    message = diverge(images, run.path, monkeypatch, step=3)
    assert "running_var of simclr is not finite, so it is not saved, at step 3" in message
    assert f"{run.checkpoint} holds the state after step 2 (0 of 2 epochs done), with last-1.ckpt before it" in message
    for path, step in ((run.checkpoint, 2), (run.older_checkpoints()[0], 1)):
        checkpoint = read_checkpoint(path)
        assert checkpoint["kinfolk"]["step"] == step
        assert all(value.isfinite().all() for value in checkpoint["state_dict"].values() if value.is_floating_point())


def test_the_message_says_that_there_is_none(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = diverge(images, tmp_path / "run", monkeypatch, step=1)
    assert "no checkpoint had been saved yet" in message
    assert not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_state_of_the_optimiser_counts() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not_finite(layer, [optimizer]) is None
    optimizer.state[layer.weight]["momentum_buffer"][0, 0] = torch.nan
    assert not_finite(layer, [optimizer]) == "the optimiser's momentum_buffer of weight"


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_are_kept_and_the_best(images: Path, tmp_path: Path, keep: int) -> None:
    settings = {**TINY, "checkpoint.keep": keep, "checkpoint.best": True, "checkpoint.every_minutes": None, "snapshots.epochs": 0}
    run = train(str(images), tmp_path / "run", epochs=4, batch_size=12, settings=settings, progress=False)
    steps = [read_checkpoint(path)["kinfolk"]["step"] for path in (run.checkpoint, *run.older_checkpoints())]
    assert steps == [12, 9, 6][:keep]
    accuracies = [row["knn"] for row in run.epochs()]
    best = read_checkpoint(run.checkpoint.with_name("best.ckpt"))["kinfolk"]
    assert (best["epoch"], best["best"]) == (accuracies.index(max(accuracies)) + 1, max(accuracies))
    assert read_checkpoint(run.checkpoint)["kinfolk"]["best"] == max(accuracies)
