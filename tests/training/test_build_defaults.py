"""Defaults that fit device and data, and what is shown of them before and during a training."""

from __future__ import annotations

import io
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import (
    assemble,
    fit_batch,
    fit_text,
    fit_to_data,
    names_batch_size,
)
from kinfolk.training.documents import read_yaml
from kinfolk.training.metrics_log import ProgressBar, describe
from kinfolk.training.run_folder import Run
from kinfolk.training.settings import describe_settings, flat, recipe_names, recipe_path
from kinfolk.training.train import train
from tests.training.pairs_of import write_pairs
from tests.training.small import BARE


def fitted(
    side: int, settings: dict[str, Any] | None = None, accelerator: str = "cpu"
) -> TrainConfig:
    """The configuration for square images of one size, as on a machine with this accelerator."""
    config = assemble(None, None, {}, settings or {})
    trainer = config.trainer.model_copy(update={"accelerator": accelerator})
    source: Any = SimpleNamespace(native_size=(side, side), has_texts=False)
    return fit_to_data(config.model_copy(update={"trainer": trainer}), source)


@pytest.mark.parametrize(
    ("side", "accelerator", "expected"),
    [
        (8, "cpu", ("resnet10", "cifar", 16)),
        (32, "cpu", ("resnet10", "cifar", 32)),
        (500, "cpu", ("resnet10", "imagenet", 64)),
        (32, "cuda", ("resnet18", "cifar", 32)),
        (64, "cuda", ("resnet18", "cifar", 64)),
        (500, "cuda", ("resnet18", "imagenet", 224)),
    ],
)
def test_encoder_and_size_fit_images_and_device(
    side: int, accelerator: str, expected: tuple[str, str, int]
) -> None:
    config = fitted(side, accelerator=accelerator)
    assert (config.model.name, config.model.stem, config.views.size) == expected


def test_photos_on_a_cpu_get_a_wider_resnet10_unless_the_width_is_given() -> None:
    assert [
        fitted(500).model.width,
        fitted(32).model.width,
        fitted(500, {"model.width": 8}).model.width,
    ] == [32, None, 8]
    assert fitted(500, accelerator="cuda").model.width is None


def test_what_is_given_stays() -> None:
    config = fitted(500, {"views.size": 128, "model.name": "resnet34", "epochs": 7})
    assert (config.model.name, config.views.size, config.epochs) == ("resnet34", 128, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("adamw", 0.003, "none", 0.01, 0)),
        ({"optimizer.name": "sgd"}, ("sgd", 0.03, "linear", 5e-4, 0)),
        ({"optimizer.name": "sgd", "optimizer.lr": 0.5}, ("sgd", 0.5, "linear", 5e-4, 0)),
        ({"method": "clip"}, ("adamw", 0.001, "none", 0.1, 1)),
        ({"method": "clip", "optimizer.weight_decay": 0}, ("adamw", 0.001, "none", 0, 1)),
        ({"method": "clip", "optimizer.name": "sgd"}, ("sgd", 0.03, "linear", 5e-4, 0)),
    ],
)
def test_rate_and_decay_fit_the_optimiser_and_captions(
    settings: dict[str, Any], expected: tuple[object, ...]
) -> None:
    found = assemble(None, None, {}, settings).optimizer
    assert expected == (
        found.name,
        found.lr,
        found.lr_scaling,
        found.weight_decay,
        found.warmup_epochs,
    )


def test_views_and_head_fit_captions() -> None:
    images, captions = (assemble(None, None, {"method": name}, {}) for name in ("simclr", "clip"))
    assert (images.views.preset, images.views.options, images.head.layers) == ("simclr", {}, 2)
    assert (captions.views.preset, captions.head.layers) == ("clip", 1)
    assert captions.views.options == {"scale": [0.5, 1.0], "flip": 0.5}
    chosen = assemble(None, None, {"method": "clip"}, {"views.preset": "simclr"})
    assert (chosen.views.preset, chosen.views.options) == ("simclr", {})


@pytest.mark.parametrize(
    ("number", "words", "accelerator", "settings", "expected"),
    [
        (1000, 10, "cpu", {}, (1, 128, 4, 32, 4096)),
        (1000, 10, "cuda", {}, (1, 128, 4, 32, 4096)),
        (200_000, 25, "cuda", {}, (4, 256, 8, 48, 16384)),
        (1_000_001, 60, "cuda", {}, (12, 512, 8, 77, 49408)),
        (1_000_001, 60, "cpu", {}, (4, 256, 8, 77, 16384)),
        (1000, 10, "cpu", {"text.width": 48, "text.context": 20}, (1, 48, 1, 20, 4096)),
        (1000, 10, "cpu", {"text.name": "open_clip/RN50"}, (12, 512, 8, 77, 49408)),
    ],
)
def test_the_text_tower_fits_captions_and_device(
    number: int,
    words: int,
    accelerator: str,
    settings: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    samples: Any = SimpleNamespace(
        captions=["word " * words] * number, splits=itertools.repeat("train", number)
    )
    config = assemble(None, None, {"method": "clip"}, settings)
    trainer = config.trainer.model_copy(update={"accelerator": accelerator})
    text = fit_text(config.model_copy(update={"trainer": trainer}), samples).text
    assert (text.layers, text.width, text.heads, text.context, text.vocab_size) == expected


def test_recipes_do_not_depend_on_the_defaults() -> None:
    """What was chosen by measurement may change; a recipe keeps its settings."""
    for name in recipe_names():
        document = flat(read_yaml(recipe_path(name)))
        keys = ["optimizer.name", "optimizer.lr", "optimizer.lr_scaling", "optimizer.weight_decay"]
        keys += ["views.preset"]
        tower = document.get("text.name", "transformer")
        if "clip" in document["method"] and tower == "transformer":
            keys += ["text.layers", "text.width", "text.heads", "text.context", "text.vocab_size"]
            keys += ["head.layers", "optimizer.warmup_epochs"]
        assert [key for key in keys if key not in document] == [], name


@pytest.mark.parametrize(
    ("method", "alpha", "warned"),
    [("simclr+fnc", 0.6, True), ("clip+glofnd", 0.9, True), ("simclr+fnc", 0.5, False)],
)
def test_an_alpha_that_flags_most_negatives_is_reported(
    method: str, alpha: float, warned: bool, tmp_path: Path
) -> None:
    run = train(
        str(write_pairs(tmp_path / "pairs", 16)),
        tmp_path / "run",
        method=method,
        epochs=1,
        settings={**BARE, "detector.alpha": alpha, "model.width": 4, "views.size": 16},
        progress=False,
    )
    text = f"`alpha` (={alpha:g}) flags most of the negatives"
    assert run.log.read_text(encoding="utf-8").count(text) == (1 if warned else 0)


def test_captions_are_learnt_with_the_defaults(tmp_path: Path) -> None:
    """Three epochs of few captions: clearly below ln(batch), where the loss of a tower that learns
    nothing stays."""
    run = train(
        str(write_pairs(tmp_path / "pairs", 64)),
        tmp_path / "run",
        method="clip+glofnd",
        epochs=3,
        settings={"trainer.loggers": []},
        progress=False,
    )
    batch_size = TrainConfig.load(run.config).batch_size
    assert run.epochs()[-1]["loss"] < 0.85 * math.log(batch_size)


def test_a_configuration_with_defaults_resumes(tmp_path: Path) -> None:
    """Batch and text tower are fitted again, to the same values; another method is named."""
    data, config = str(write_pairs(tmp_path / "pairs", 24)), tmp_path / "mine.yaml"
    config.write_text("method: clip+glofnd\nepochs: 1\n", encoding="utf-8")
    settings: dict[str, Any] = {"trainer.loggers": []}
    for epochs in (1, 2):
        run = train(
            data,
            tmp_path / "run",
            recipe=config,
            epochs=epochs,
            settings=settings,
            resume=epochs == 2,
            progress=False,
        )
    assert len(run.epochs()) == 2
    with pytest.raises(UsageError, match=r"`method` \(='clip'\) was 'clip\+glofnd'"):
        train(data, run.path, recipe=config, method="clip", resume=True, progress=False)


def test_fewer_epochs_on_a_cpu_but_never_fewer_than_the_warm_up() -> None:
    assert assemble(None, None, {}, {"trainer.accelerator": "cpu"}).epochs == 30
    assert (
        assemble(
            None, None, {}, {"trainer.accelerator": "cpu", "optimizer.warmup_epochs": 40}
        ).epochs
        == 40
    )
    assert assemble(None, "simclr-cpu", {"epochs": 2}, {}).epochs == 2


@pytest.mark.parametrize(
    ("num_train", "expected"), [(10, 10), (100, 16), (1000, 64), (1442, 128), (50_000, 256)]
)
def test_the_batch_fits_the_data(num_train: int, expected: int) -> None:
    assert fit_batch(fitted(32), num_train, chosen=False).batch_size == expected


def test_a_chosen_batch_is_reduced_with_a_warning_and_shared_by_the_devices() -> None:
    config = fitted(32, {"batch_size": 64})
    assert fit_batch(config, 64, chosen=True).batch_size == 64
    with pytest.warns(
        KinfolkWarning,
        match=r"`batch_size` \(=64\) is larger than the 51 training samples; 51 is used",
    ):
        assert fit_batch(config, 51, chosen=True).batch_size == 51
    trainer = config.trainer.model_copy(update={"devices": 2})
    with pytest.warns(KinfolkWarning, match="50 is used"):
        assert (
            fit_batch(config.model_copy(update={"trainer": trainer}), 51, chosen=True).batch_size
            == 50
        )


def test_settings_are_shown() -> None:
    given = {"method": None, "epochs": 3}, ["optimizer.lr=0.5"]
    lines = describe_settings(assemble(None, "simclr-cpu", *given))
    found = dict(re.split(r"\s{2,}", line.strip()) for line in lines)
    assert (found["method"], found["epochs"], found["optimizer.lr"]) == ("simclr", "3", "0.5")
    assert names_batch_size("simclr-cpu", *given)
    assert not names_batch_size(None, *given)


def test_a_run_of_few_images_trains_and_says_what_it_does(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), dtype=np.uint8)
    run = train(
        images,
        tmp_path / "run",
        epochs=1,
        batch_size=64,
        settings={"model.width": 4, "knn.every": 0},
        progress=False,
    )
    log = run.log.read_text(encoding="utf-8")
    assert "`batch_size` (=64) is larger than the 20 training samples; 20 is used" in log
    assert "for 1 epoch," in log
    assert TrainConfig.load(run.config).batch_size == 20
    again = train(out=run.path, resume=True, batch_size=64, progress=False, data=images)
    assert again.unchanged, "the same command with `resume` agrees with the reduced batch"


def test_the_bar_fits_80_columns() -> None:
    row = {
        "loss": 12.345,
        "knn": 0.9876,
        "flagged": 0.1234,
        "f1": 0.5,
        "anchor_f1": 0.5,
        "images_per_second": 1234.0,
        "epoch": 100,
    }
    screen = io.StringIO()
    console = Console(
        file=screen, width=80, force_terminal=True, legacy_windows=False, color_system=None
    )
    metrics: Any = SimpleNamespace(row=row)
    bar = ProgressBar(console, metrics, epochs=100)
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(
            batch_progress=SimpleNamespace(total=SimpleNamespace(completed=0))
        )
    )
    trainer: Any = SimpleNamespace(
        is_global_zero=True, num_training_batches=5000, current_epoch=99, fit_loop=loop
    )
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert bar._bar is not None
    text = {"metrics": describe(row, speed=False), "left": "11 h 03 min left"}
    bar._bar.update(
        bar._task,
        completed=250_000,
        description="epoch 100/100",
        figures=text["metrics"],
        left=text["left"],
    )
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]
    line = [line for line in screen.getvalue().splitlines() if "left" in line][-1]
    assert "11 h 03 min left" in line
    assert "kNN 98.8 %" in line
    assert "━" in line
    assert len(line.split("\x1b[2K")[-1]) <= 80


def test_the_bar_ends_with_the_metrics_of_the_last_epoch() -> None:
    row = {"loss": 1.5, "knn": 0.2, "epoch": 1, "seconds": 60.0, "images_per_second": 10.0}
    screen = io.StringIO()
    console = Console(
        file=screen, width=80, force_terminal=True, legacy_windows=False, color_system=None
    )
    bar = ProgressBar(console, SimpleNamespace(row=row), epochs=2)  # type: ignore[arg-type]
    total = SimpleNamespace(total=SimpleNamespace(completed=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=total))
    trainer: Any = SimpleNamespace(is_global_zero=True, num_training_batches=5, fit_loop=loop)
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    bar.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    row.update(loss=1.25, knn=0.3, epoch=2)
    bar.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]
    line = [line for line in screen.getvalue().splitlines() if "epoch" in line][-1]
    assert "epoch 2/2" in line
    assert "loss 1.250  kNN 30.0 %" in line
    assert "left" not in line


def test_one_logger_may_be_given_by_its_name() -> None:
    assert TrainConfig().with_settings(["trainer.loggers=tensorboard"]).trainer.loggers == (
        "tensorboard",
    )
    assert TrainConfig().with_settings(["trainer.loggers=none"]).trainer.loggers == ()


def test_a_finished_run_is_extended_or_left_alone(tmp_path: Path) -> None:
    run = train("digits", tmp_path / "run", epochs=1, batch_size=512, settings=BARE, progress=False)
    before = run.checkpoint.stat().st_mtime_ns
    assert train(out=run.path, resume=True, progress=False) == Run(run.path, unchanged=True)
    assert run.checkpoint.stat().st_mtime_ns == before
    longer = train(out=run.path, resume=True, epochs=3, progress=False)
    assert not longer.unchanged
    rows = longer.epochs()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0]["lr"] < rows[1]["lr"], "the schedule is that of three epochs from here on"
    assert "`epochs` was 1 until now" in run.log.read_text(encoding="utf-8")
