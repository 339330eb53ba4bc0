"""What must be refused before, or instead of, going on: changed data, foreign folders, names
nothing knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from kinfolk.data.images import ImageData
from kinfolk.data.labels import TEST_SPLITS
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.training.checkpoint import AtomicCheckpointIO, CheckpointSaver, read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.epoch_end import _parts
from kinfolk.training.module import NonFiniteLossError
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.small import SMALL


def tiny(data: Any, out: Path, **more: Any) -> Run:
    settings = {**SMALL, **more.pop("settings", {})}
    return train(
        data=data,
        out=out,
        **{"epochs": 2, "batch_size": 8, "progress": False, **more},
        settings=settings,
    )


def folder_of(path: Path, number: int = 20) -> Path:
    random = np.random.default_rng(0)
    path.mkdir()
    for i in range(number):
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            path / f"{i:02}.png"
        )
    return path


def stopped(data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A run that ended after its first epoch, as if killed."""
    with monkeypatch.context() as patched:
        original = CheckpointSaver.on_train_epoch_end

        def end(self: CheckpointSaver, trainer: Any, module: Any) -> None:
            original(self, trainer, module)
            raise RuntimeError("killed")

        patched.setattr(CheckpointSaver, "on_train_epoch_end", end)
        with pytest.raises(RuntimeError, match="killed"):
            tiny(data, out, **more)


NEWER = (
    "head.second",
    "framework.own_weight",
    "framework.prior",
    "framework.hardness",
    "framework.decoupled",
)
"""Settings that runs of an earlier version do not have. Each is off by default."""


def test_a_run_from_before_a_setting_existed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, method = (
        folder_of(tmp_path / "images"),
        {"method": "simclr+fnc:attract", "settings": {"detector.top_k": 2}},
    )
    stopped(data, tmp_path / "run", monkeypatch, **method)
    run = Run(tmp_path / "run")
    config, state = yaml.safe_load(run.config.read_text()), read_checkpoint(run.checkpoint)
    for key in NEWER:
        section, name = key.split(".")
        del config[section][name]
        state["kinfolk"]["settings"].pop(key, None)
    run.config.write_text(yaml.safe_dump(config))
    AtomicCheckpointIO().save_checkpoint(state, run.checkpoint)
    with pytest.raises(
        KinfolkError, match=r"`framework.prior` \(=0.1\) was None when the run began"
    ):
        tiny(data, run.path, resume=True, settings={"framework.prior": 0.1})
    assert [row["epoch"] for row in tiny(data, run.path, resume=True).epochs()] == [1, 2]
    whole = tiny(data, tmp_path / "whole", **method)
    assert all(
        torch.equal(value, load_file(whole.model)[name])
        for name, value in load_file(run.model).items()
    )


@pytest.mark.parametrize(
    "case", ["a refused file is mended", "a file is spoilt under the same size and time"]
)
def test_resuming_with_other_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    data = folder_of(tmp_path / "images")
    first, good = data / "00.png", (data / "00.png").read_bytes()
    if case.startswith("a refused"):
        first.write_bytes(good[:40])
    stopped(data, tmp_path / "run", monkeypatch)
    if case.startswith("a refused"):
        first.write_bytes(good)
    else:
        import os
        import shutil

        stat = first.stat()
        first.write_bytes(b"x" * len(good))
        os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        shutil.rmtree(tmp_path / "run" / "cache", ignore_errors=True)
    words = "" if case.startswith("a refused") else r" \(00\.png\) can't be read any more: not an"
    expected = rf"the data has changed since the run began.*{words or '00.png'}"
    with pytest.raises(KinfolkError, match=expected):
        tiny(data, tmp_path / "run", resume=True)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, how: str) -> None:
    project = tmp_path / "project"
    (project / "eval").mkdir(parents=True)
    kept = [
        project / "eval" / "mine.txt",
        project / "download.json.partial",
        project / "notes.unfinished",
    ]
    for file in kept:
        file.write_text("mine")
    with pytest.raises(UsageError, match="is not a run folder"):
        tiny(folder_of(tmp_path / "images"), project, **{how: True})
    assert all(file.read_text() == "mine" for file in kept)


def test_sweeping_takes_only_names_a_run_writes(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    own = [
        tmp_path / "checkpoints" / "last.ckpt.unfinished",
        tmp_path / "model.json.partial",
        tmp_path / "quarantine.csv.part",
    ]
    foreign = [tmp_path / "thesis.partial", tmp_path / "song.part"]
    for file in own + foreign:
        file.write_text("half")
    (tmp_path / "model.unfinished").mkdir()
    Run(tmp_path).remove_unfinished_files()
    assert not any(file.exists() for file in own)
    assert all(file.exists() for file in foreign)


@pytest.mark.parametrize("key", ["precision", "accelerator"])
def test_unknown_names_for_lightning_lose_nothing(tmp_path: Path, key: str) -> None:
    data, out = folder_of(tmp_path / "images"), tmp_path / "run"
    tiny(data, out, epochs=1)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match=rf"`trainer\.{key}` \(='banana'\) must be 'auto'"):
        tiny(data, out, overwrite=True, settings={f"trainer.{key}": "banana"})
    assert (out / "model.safetensors").read_bytes() == before


def test_a_run_finds_its_data_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = folder_of(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    run = tiny("images", tmp_path / "run", epochs=1)
    assert TrainConfig.load(run.config).data.source == str(data)


def sorted_classes() -> ImageData:
    x, y = (
        np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8),
        np.repeat(np.arange(4), 10),
    )
    return prepare(open_source({"train": Pairs(x, y), "test": Pairs(x, y)}), image_size=8)


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], int(self.y[index])


def test_a_part_of_the_test_samples_is_drawn_from_all_classes() -> None:
    data = sorted_classes()
    bank, queries = _parts(data, TEST_SPLITS, 12, seed=0)
    assert data.labels is not None
    assert bank is not None
    assert queries is not None
    assert len(queries) == len(bank) == 12
    assert len(set(data.labels[queries].tolist())) > 1


def test_copies_of_an_image_are_no_neighbours_of_each_other() -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8).repeat(5, 0)
    data = prepare(open_source({"train": Pairs(x, np.arange(20) % 3)}), image_size=8)
    bank, queries = _parts(data, TEST_SPLITS, 100, seed=0)
    assert bank is not None
    assert (bank.tolist(), queries) == ([0, 5, 10, 15], None)


def test_features_that_are_not_finite_name_step_and_method(tmp_path: Path) -> None:
    x, y = (
        np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8),
        np.arange(16) % 2,
    )
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    with pytest.raises(NonFiniteLossError, match=r"simclr is not finite at step 1 "):
        tiny(tmp_path / "a.npz", tmp_path / "run", batch_size=16, settings={"optimizer.lr": 1e30})
    assert "not finite" in (tmp_path / "run" / "train.log").read_text(encoding="utf-8")


def test_settings_as_people_write_them(tmp_path: Path) -> None:
    config = TrainConfig().with_settings(["optimizer.lr=1e-3", "views.options.blur=1e-1"])
    assert (config.optimizer.lr, config.views.options["blur"]) == (1e-3, 0.1)
    with pytest.raises(UsageError, match=r"optimizer\.lr.*finite"):
        TrainConfig().with_settings(["optimizer.lr=.inf"])
    broken = tmp_path / "broken.yaml"
    broken.write_text("epochs: [1,")
    with pytest.raises(UsageError, match=r"broken\.yaml is not YAML"):
        TrainConfig.load(broken)


def test_one_image_is_too_few(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "images", 1)
    with pytest.raises(
        UsageError,
        match=r"images. has 1 training image; a training contrasts images with each other and "
        r"needs at least 2",
    ):
        tiny(data, tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()
