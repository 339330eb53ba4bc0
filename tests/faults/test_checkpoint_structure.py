"""Checkpoints whose digest is right and whose content does not fit the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.errors import KinfolkError
from kinfolk.training.checkpoint import (
    AtomicCheckpointIO,
    read_checkpoint,
)
from kinfolk.training.load_run import open_run, restore
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.faults.methods import TINY

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one epoch, which is resumed with two."""
    folder = tmp_path_factory.mktemp("finished")
    pixels = np.random.default_rng(0).integers(0, 256, (36, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "a.npz", x_train=pixels, y_train=np.arange(36) % 3)
    return start(folder / "a.npz", folder / "run")


def start(data: Path, out: Path, plain: bool = False, **more: Any) -> Run:
    settings = {**TINY, "framework.queue_size": 12, "detector.alpha": 0.1}
    settings |= {"checkpoint.every_minutes": None, "optimizer.name": "sgd"}
    settings["optimizer.momentum"] = 0.0 if plain else 0.9
    given: dict[str, Any] = {"epochs": 1, "batch_size": 12, **more}
    return train(str(data), out, method="moco+glofnd", settings=settings, progress=False, **given)


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Run:
    shutil.copytree(finished.path, tmp_path / "run")
    return Run(tmp_path / "run")


def resume(finished: Run, run: Run) -> Run:
    return start(finished.path.parent / "a.npz", run.path, epochs=2, resume=True)


def edit(path: Path, change: Edit) -> None:
    checkpoint = read_checkpoint(path)
    change(checkpoint)
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)


def per_sample(checkpoint: dict[str, Any]) -> Any:
    return next(
        name
        for name, value in checkpoint["state_dict"].items()
        if "detector" in name and value.shape == (36,)
    )


def shorten(checkpoint: dict[str, Any]) -> None:
    name = per_sample(checkpoint)
    checkpoint["state_dict"][name] = checkpoint["state_dict"][name][:35].clone()


def drop(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"][per_sample(checkpoint)]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["optimizer_states"][0].update(param_groups=[]),
        lambda c: c["loops"].clear(),
    ],
    ids=["no groups", "no position"],
)
def test_a_position_or_optimiser_that_does_not_fit_is_refused(
    finished: Run, run: Run, change: Edit
) -> None:
    edit(run.checkpoint, change)
    with pytest.raises(KinfolkError, match=r"last\.ckpt does not fit this run: "):
        resume(finished, run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorten, r"thresholds?` has the size 35, but `num_samples` is 36"),
        (drop, r"Missing key\(s\) in state_dict"),
    ],
    ids=["short store", "no store"],
)
def test_a_state_that_does_not_fit_is_refused(
    finished: Run, run: Run, change: Edit, message: str
) -> None:
    edit(run.checkpoint, change)
    with pytest.raises(KinfolkError, match=r"last\.ckpt does not fit this run: .*" + message):
        resume(finished, run)
    opened = open_run(run.path)
    with pytest.raises(KinfolkError, match=r"last\.ckpt does not fit this run: .*" + message):
        restore(run.path, opened.config, opened.data())


def test_the_one_before_is_used(finished: Run, run: Run) -> None:
    whole = resume(finished, Run(shutil.copytree(finished.path, run.path.with_name("whole"))))
    shutil.copy(finished.checkpoint, run.checkpoint.with_name("last-1.ckpt"))
    edit(run.checkpoint, lambda c: c.pop("loops"))
    resumed = resume(finished, run)
    assert "the one before it is used instead" in resumed.log.read_text()
    assert [row["loss"] for row in resumed.epochs()] == [row["loss"] for row in whole.epochs()]


def test_a_deleted_checkpoint_is_noticed(finished: Run, run: Run) -> None:
    run.checkpoint.rename(run.checkpoint.with_name("last-1.ckpt"))
    resumed = resume(finished, run)
    expected = "last.ckpt is missing; the one before it is used instead"
    assert expected in resumed.log.read_text()


def test_a_run_without_any_checkpoint_starts_again_with_a_warning(finished: Run, run: Run) -> None:
    run.checkpoint.unlink()
    again = resume(finished, run)
    expected = "although 1 epoch of the run ended; the training starts again from the beginning"
    assert expected in again.log.read_text()
    assert len(again.epochs()) == 2


def test_an_optimiser_without_state_is_resumed(finished: Run, tmp_path: Path) -> None:
    """SGD without momentum has none."""
    data = finished.path.parent / "a.npz"
    run = start(data, tmp_path / "run", plain=True)
    assert read_checkpoint(run.checkpoint)["optimizer_states"][0]["state"] == {}
    assert len(start(data, run.path, epochs=2, resume=True, plain=True).epochs()) == 2
