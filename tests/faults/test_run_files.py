"""Run folders that are incomplete, damaged, full or gone: one sentence each, and nothing that was
there is lost."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.cli import main
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import InterruptedRunError, KinfolkError, KinfolkWarning, UsageError
from kinfolk.files import write_atomically
from kinfolk.report.record import read_record
from kinfolk.training.checkpoint import CheckpointSaver, read_checkpoint
from kinfolk.training.load_run import open_run
from kinfolk.training.metrics_log import MetricsLog
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.faults.inject import full_disk
from tests.faults.methods import TINY

SETTINGS = {**TINY}
FILES = (
    "config.yaml",
    "samples.parquet",
    "quarantine.csv",
    "metrics.jsonl",
    "model.safetensors",
    "model.json",
    "checkpoints/last.ckpt",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a.npz"
    random = np.random.default_rng(0)
    np.savez(
        path,
        x_train=random.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
        y_train=np.arange(24) % 3,
    )
    return path


def begin(images: Path, out: Path, **more: Any) -> Run:
    return train(
        str(images), out, epochs=2, batch_size=12, settings=SETTINGS, progress=False, **more
    )


@pytest.fixture(scope="module")
def stopped(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was ended after its first epoch, with a checkpoint and a model."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            CheckpointSaver, "_agreed_action", lambda self, device: 2 * (self._finished == 1)
        )
        with pytest.raises(InterruptedRunError):
            begin(images, out)
    return out


ASKED: dict[str, Callable[[Path], object]] = {
    "resume": lambda path: train(out=path, resume=True, progress=False),
    "encoder": lambda path: open_run(path).encoder(),
    "record": read_record,
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", FILES)
def test_missing_and_binary_files_are_reported_in_a_sentence(
    stopped: Path, tmp_path: Path, asked: str, name: str
) -> None:
    for fault in ("missing", "binary", "folder"):
        run = tmp_path / fault
        shutil.copytree(stopped, run)
        (run / name).unlink()
        if fault == "binary":
            (run / name).write_bytes(bytes(range(256)) * 4)
        elif fault == "folder":
            (run / name).mkdir()
        message = _refusal(ASKED[asked], run)
        assert message.isprintable()
        assert "Errno" not in message


def _refusal(ask: Callable[[Path], object], run: Path) -> str:
    """What the error says; empty where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KinfolkWarning)
            ask(run)
    except KinfolkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("room", [0, 200, 5_000, 60_000, 200_000])
def test_a_full_disk_is_reported_and_a_resumed_run_ends_the_same(
    stopped: Path, images: Path, tmp_path: Path, room: int
) -> None:
    run = Run(tmp_path / "run")
    with (
        full_disk(room),
        pytest.raises(
            KinfolkError, match=r"cannot be written: the disk is full; make room; what was there"
        ),
    ):
        begin(images, run.path)
    if run.config.exists():
        train(out=run.path, resume=True, progress=False)
    else:
        with pytest.raises(UsageError, match="no training has started in"):
            train(out=run.path, resume=True, progress=False)
        begin(images, run.path)
    whole = train(out=shutil.copytree(stopped, tmp_path / "whole"), resume=True, progress=False)
    assert run.model.read_bytes() == whole.model.read_bytes()


def test_a_folder_that_is_removed_or_read_only(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = MetricsLog.on_train_epoch_end

    def remove(self: MetricsLog, *args: Any) -> None:
        shutil.rmtree(self.run.path)
        end(self, *args)

    monkeypatch.setattr(MetricsLog, "on_train_epoch_end", remove)
    with pytest.raises(KinfolkError, match=r"cannot be written: its folder was removed"):
        train(
            str(images),
            tmp_path / "run",
            epochs=2,
            batch_size=12,
            settings={**SETTINGS, "checkpoint.every_minutes": None},
            progress=False,
        )

    def refuse(*args: Any) -> None:
        raise OSError(30, "Read-only file system", "somewhere")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        KinfolkError,
        match=r"a cannot be written: the file system is read-only; give another folder",
    ):
        write_atomically(tmp_path / "a", lambda file: file.write(b"x"))
    assert not list(tmp_path.glob("a*"))


def test_killed_while_the_images_were_read(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "cache").mkdir(parents=True)
    (tmp_path / "run" / "samples.parquet.abc.unfinished").write_bytes(b"half")
    with pytest.raises(SystemExit) as left:
        main(["train", "--out", str(tmp_path / "run"), "--resume"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "no training has started in" in said
    assert "repeat the whole command" in said
    assert len(begin(images, tmp_path / "run").epochs()) == 2, (
        "what a killed start left is not in the way"
    )


def test_a_checkpoint_without_its_configuration(stopped: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(stopped, tmp_path / "run"))
    run.config.unlink()
    with pytest.raises(
        UsageError, match=r"config\.yaml is missing, and the run cannot be resumed without it"
    ):
        train(out=run.path, resume=True, progress=False)
    assert read_checkpoint(run.checkpoint)


def test_a_folder_that_is_renamed_ends_in_a_sentence(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensorboard writes in a thread; an error there would fail the test."""
    end = MetricsLog.on_train_epoch_start

    def rename(self: MetricsLog, trainer: Any, module: Any) -> None:
        end(self, trainer, module)
        if trainer.current_epoch == 1:
            self.run.path.rename(tmp_path / "other")
            writer = trainer.loggers[0].experiment
            writer.add_scalar("a", 1.0, 1)
            writer.flush()

    monkeypatch.setattr(MetricsLog, "on_train_epoch_start", rename)
    settings = {**SETTINGS, "trainer.loggers": ["tensorboard"], "checkpoint.every_minutes": None}
    gone = r"run was removed or renamed during the run; resume|its folder was removed or renamed"
    with pytest.raises(KinfolkError, match=gone):
        train(
            str(images),
            tmp_path / "run",
            epochs=3,
            batch_size=12,
            settings=settings,
            progress=False,
        )
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    run = train(out=tmp_path / "other", resume=True, progress=False)
    assert [row["epoch"] for row in run.epochs()] == [1, 2, 3]


def test_a_folder_that_cannot_be_read_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    for name in ("good", "closed"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / name / "a.png")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    def refuse_names(path: Any = ".") -> Any:
        refuse(path).close()
        return names(path)

    names = os.listdir
    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse_names)  # `Path.iterdir` asks in this way
    data = prepare(open_source(str(tmp_path)), image_size=8, workers=0)
    assert list(data.samples.keys) == ["good/a.png"]
    assert data.quarantine == [("closed/", "the folder can't be read: Permission denied")]


def test_a_split_of_shards_that_cannot_be_read_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import tarfile

    from PIL import Image

    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        image = io.BytesIO()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(image, "png")
        with tarfile.open(tmp_path / name / "0.tar", "w") as archive:
            member = tarfile.TarInfo("a.png")
            member.size = len(image.getvalue())
            archive.addfile(member, io.BytesIO(image.getvalue()))
    listing = Path.iterdir

    def refuse(path: Path) -> Any:
        if path.name == "test":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    data = prepare(open_source(str(tmp_path)), image_size=8, workers=0)
    assert list(data.samples.splits) == ["train"]
    assert [name for name, _ in data.quarantine] == ["test"]


def test_all_is_flushed_to_the_disk_before_it_has_its_name(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rename in the run folder comes after a flush of the file, and a flush of the folder
    comes after it."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        events.append(("flush", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(old: Any, new: Any) -> None:
        events.append(("rename", str(new)))
        assert ("flush", str(old)) in events, f"{new} was not flushed"
        events.append(("flush", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    begin(images, tmp_path / "run")
    names = {Path(path).name for kind, path in events if kind == "rename"}
    assert {
        "config.yaml",
        "samples.parquet",
        "quarantine.csv",
        "last.ckpt",
        "model.safetensors",
        "model.json",
    } <= names
    last = max(number for number, event in enumerate(events) if event[0] == "rename")
    assert any(kind == "flush" and Path(path).is_dir() for kind, path in events[last:])


def test_settings_and_features_that_are_not_finite(tmp_path: Path) -> None:
    from kinfolk.features import Features
    from kinfolk.training.config import TrainConfig

    with pytest.raises(UsageError, match=r"`detector\.alpha` \(=nan\) must be a finite number"):
        TrainConfig().with_settings(["detector.alpha=.nan"])
    rows = np.random.default_rng(0).normal(size=(5, 4))
    scaled = [Features(rows * scale).rows(0, 5) for scale in (1.0, 1e300, 1e-200)]
    np.testing.assert_allclose(scaled[1], scaled[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[2], scaled[0], rtol=1e-6)
    with pytest.raises(KinfolkError, match="NaN or infinite"):
        Features(np.where(rows > 1, np.inf, rows))


def test_weights_with_code_are_refused_without_advice(tmp_path: Path) -> None:
    from kinfolk.models.weights import read_state
    from tests.faults.hostile import _Evil

    torch.save({"w": _Evil()}, tmp_path / "a.pt")
    with pytest.raises(
        KinfolkError, match="it holds Python objects besides tensors, which could run code"
    ) as caught:
        read_state(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)
