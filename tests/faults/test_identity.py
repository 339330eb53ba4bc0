"""A checkpoint belongs to one run: of other samples or other settings it is refused, with what
differs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.errors import InterruptedRunError, KinfolkError, UsageError
from kinfolk.evaluation.protocols import write_result
from kinfolk.models.weights import meta_of
from kinfolk.training.checkpoint import CheckpointSaver, read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.load_run import open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.settings import CHANGEABLE, result_settings
from kinfolk.training.train import train
from tests.faults.methods import TINY

SETTINGS = {**TINY, "detector.alpha": 0.1}


def interrupted(data: Path, out: Path) -> Run:
    """A run that ended in the middle of its first epoch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointSaver, "_agreed_action", lambda self, device: 2)
        with pytest.raises(InterruptedRunError):
            train(**arguments(data, out))
    return Run(out)


def arguments(data: Path, out: Path) -> dict[str, Any]:
    return {
        "data": str(data),
        "out": out,
        "method": "simclr+glofnd",
        "epochs": 2,
        "batch_size": 12,
        "settings": SETTINGS,
        "progress": False,
    }


def samples(path: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    np.savez(
        path,
        x_train=random.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
        y_train=np.arange(24) % 3,
    )
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of data sets of one size, each ended in its first epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    for seed in (0, 1):
        interrupted(samples(folder / f"{seed}.npz", seed), folder / f"run{seed}")
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Run:
    shutil.copytree(stopped / "run0", tmp_path / "run")
    return Run(tmp_path / "run")


def test_a_checkpoint_of_other_samples_is_refused(run: Run, stopped: Path) -> None:
    shutil.copy(Run(stopped / "run1").checkpoint, run.checkpoint)
    with pytest.raises(
        KinfolkError,
        match=(
            r"last\.ckpt belongs to another run: it was saved for 24 training samples of .*1\.npz"
        ),
    ):
        train(out=run.path, resume=True, progress=False)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [("seed", "seed: 0", "seed: 1"), ("batch_size", "batch_size: 12", "batch_size: 8"), ("detector.alpha", "alpha: 0.1", "alpha: 0.2"),  # noqa: E501
     ("optimizer.lr", "lr: 0.003", "lr: 0.3")],
)  # fmt: skip
def test_an_edited_configuration_is_refused(run: Run, key: str, before: str, after: str) -> None:
    text = run.config.read_text(encoding="utf-8")
    assert before in text
    run.config.write_text(text.replace(before, after, 1), encoding="utf-8")
    kept = run.checkpoint.read_bytes()
    with pytest.raises(
        KinfolkError,
        match=rf"was saved with `{key}` = {before.split()[1]}, and config\.yaml or the options say",
    ):
        train(out=run.path, resume=True, progress=False)
    assert run.checkpoint.read_bytes() == kept


def test_epochs_loggers_intervals_and_places_may_change_on_resume(run: Run) -> None:
    """Epochs, loggers, intervals and places."""
    given = {"trainer.log_every": 3, "checkpoint.keep": 3, "knn.every": 0, "data.workers": 0}
    train(out=run.path, resume=True, epochs=3, settings=given, progress=False)
    assert [row["epoch"] for row in run.epochs()] == [1, 2, 3]
    assert read_checkpoint(run.checkpoint)["kinfolk"]["finished"]
    train(out=run.path, resume=True, epochs=4, progress=False)
    assert [row["epoch"] for row in run.epochs()] == [
        1,
        2,
        3,
        4,
    ], "a finished run goes on with more epochs"


def test_every_free_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    assert [key for key in CHANGEABLE if f"`{key}`" not in text] == []


def test_processes_are_counted_not_where_they_run() -> None:
    one = TrainConfig().with_settings({"trainer.devices": 4, "trainer.num_nodes": 1})
    assert result_settings(one) == result_settings(
        one.with_settings({"trainer.devices": 2, "trainer.num_nodes": 2})
    )
    assert result_settings(one) != result_settings(one.with_settings({"trainer.devices": 2}))


def test_known_pairs_count_by_content(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("anchor,kin\n0,1\n", encoding="utf-8")
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    config = TrainConfig().with_settings({"detector.pairs": str(tmp_path / "a.csv")})
    moved = config.with_settings({"detector.pairs": str(tmp_path / "b.csv")})
    assert result_settings(config) == result_settings(moved)
    (tmp_path / "b.csv").write_text("anchor,kin\n0,2\n", encoding="utf-8")
    assert result_settings(config) != result_settings(moved)


def test_the_model_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    done = train(out=run.path, resume=True, progress=False)
    open_run(done.path).encoder()
    text = run.config.read_text(encoding="utf-8")
    run.config.write_text(text.replace("seed: 0", "seed: 1", 1), encoding="utf-8")
    with pytest.raises(KinfolkError, match=r"model\.safetensors does not belong to this run"):
        open_run(done.path).encoder()


def test_a_model_of_other_samples_is_refused(run: Run, stopped: Path, tmp_path: Path) -> None:
    """Two runs with the same settings: nothing but the samples tells them apart."""
    done = train(out=run.path, resume=True, progress=False)
    shutil.copytree(stopped / "run1", tmp_path / "other")
    other = train(out=tmp_path / "other", resume=True, progress=False)
    shutil.copy(other.model, done.model)
    with pytest.raises(
        KinfolkError,
        match=r"model\.safetensors does not belong to this run: it was exported with other samples",
    ):
        open_run(done.path).encoder()
    with pytest.raises(KinfolkError, match=r"towers\.safetensors does not belong to this run"):
        open_run(done.path)._require_exported(meta_of(other.model), "towers.safetensors")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run: Run) -> None:
    train(out=run.path, resume=True, progress=False)
    whole = run.model.read_bytes()
    before = read_checkpoint(run.older_checkpoints()[0])["kinfolk"]
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:-100])
    train(out=run.path, resume=True, progress=False)
    assert before["step"] < read_checkpoint(run.checkpoint)["kinfolk"]["step"]
    assert run.model.read_bytes() == whole
    assert "is used instead" in run.log.read_text(encoding="utf-8")


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_copy_with_another_seed_is_not_compared(
    stopped: Path, tmp_path: Path, with_weights: bool
) -> None:
    for name in ("a", "b"):
        shutil.copytree(stopped / "run0", tmp_path / name)
        write_result(
            tmp_path / name, "linear", {"accuracy": 0.5, "test": 10, "measured_on": "test split"}
        )
    kf.compare([tmp_path / "a"])
    config = tmp_path / "b" / "config.yaml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("seed: 0", "seed: 1", 1), encoding="utf-8"
    )
    if not with_weights:
        (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"b/config\.yaml was changed after the training \(`seed` is 1 and was 0\)"
    ):
        kf.compare([tmp_path / "a", tmp_path / "b"])
