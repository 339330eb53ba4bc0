"""The door: what a run leaves behind, what it refuses before it writes anything, and what stops
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfolk.errors import InterruptedRunError, KinfolkError, UsageError
from kinfolk.frameworks.simclr import TwoViews
from kinfolk.models.weights import load_encoder
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.module import (
    NonFiniteLossError,
    _buffers_outside_norms,
    _crashes_channels_last,
)
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.faults.inject import differences
from tests.training.small import SMALL


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 + 16 images of 8×8, two classes."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "images.npz"
    x, y = random.integers(0, 256, (80, 8, 8, 3), dtype=np.uint8), np.arange(80) % 2
    x[y == 1] //= 4
    np.savez(path, x_train=x[:64], y_train=y[:64], x_test=x[64:], y_test=y[64:])
    return path


def tiny(data: Any, out: Path, **more: Any) -> Run:
    settings = {**SMALL, **more.pop("settings", {})}
    return train(
        data=data,
        out=out,
        **{"epochs": 1, "batch_size": 32, "progress": False, **more},
        settings=settings,
    )


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_detector_that_will_flag_nothing_is_reported_before_the_first_step(
    images: Path, tmp_path: Path, epochs: int
) -> None:
    run = tiny(
        images,
        tmp_path / "run",
        epochs=epochs,
        method="simclr+fnc",
        settings={"detector.start_epoch": 1},
    )
    lines = run.log.read_text(encoding="utf-8").splitlines()
    warned = [line for line in lines if "simclr+fnc will flag nothing" in line]
    assert len(warned) == (epochs == 1)
    if warned:
        assert "WARNING" in warned[0]
        assert lines.index(warned[0]) < next(
            number for number, line in enumerate(lines) if "epoch 1/1" in line
        )


def test_what_a_run_leaves_behind(images: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    run = tiny(images, tmp_path / "run", epochs=2, method="simclr+oracle", seed=3)
    assert torch.equal(torch.random.get_rng_state(), state), (
        "the caller's random numbers are not touched"
    )
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "model.json",
        "model.safetensors",
        "quarantine.csv",
        "samples.parquet",
        "tensorboard",
        "train.log",
    ]
    config = TrainConfig.load(run.config)
    assert (config.method, config.seed, config.data.source, config.trainer.devices) == (
        "simclr+oracle",
        3,
        str(images),
        1,
    )
    assert config.framework["temperature"] == 0.2, "the method's defaults are written out"
    assert config.data.image_size == 8, "the images are no larger"
    assert config.trainer.precision != "auto"
    first, last = run.epochs()
    assert (first["epoch"], first["step"], last["epoch"], last["step"]) == (1, 2, 2, 4)
    assert {
        "loss",
        "lr",
        "knn",
        "flagged",
        "precision",
        "recall",
        "f1",
        "images_per_second",
        "seconds",
    } <= last.keys()
    assert -1 < last["fn_similarity"] < last["tp_similarity"] < 1
    assert last["precision"] == last["recall"] == 1.0, "the oracle is right"
    assert 0.3 < last["flagged"] < 0.7, "two classes"
    encoder, meta = load_encoder(run.path)
    assert meta["epoch"] == 2
    saved = read_checkpoint(run.checkpoint)["state_dict"]
    assert torch.equal(
        encoder.state_dict()["conv1.weight"], saved["framework.encoder.conv1.weight"]
    )
    assert "finished" in run.log.read_text(encoding="utf-8")
    assert any((run.path / "tensorboard").iterdir())


def test_lines_are_shown_without_a_terminal(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(images, tmp_path / "run", progress=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("simclr on 64 samples for 1 epoch,")
    *settings, epoch, end = shown[1:]
    assert all(line.startswith("  ") for line in settings), "no other lines"
    assert "epoch 1/1  loss" in epoch
    assert "kNN" in epoch
    assert end.startswith("finished: ")


def test_the_same_seed_gives_the_same_run_and_another_another(images: Path, tmp_path: Path) -> None:
    losses = []
    for i, seed in enumerate((1, 1, 2)):
        torch.rand(i)
        losses.append(tiny(images, tmp_path / str(i), seed=seed).epochs()[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_defaults_follow_from_the_images_and_the_method(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 20, 30, 3), dtype=np.uint8)
    run = train(
        x,
        tmp_path / "run",
        method="simclr+glofnd",
        epochs=1,
        batch_size=20,
        settings={"model.name": "resnet10"},
        progress=False,
    )
    config = TrainConfig.load(run.config)
    assert (config.views.size, config.model.stem, config.detector["alpha"]) == (20, "cifar", 0.01)


def test_arrays_and_data_without_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    run = tiny(x, tmp_path / "run", method="sogclr+glofnd", settings={"detector.alpha": 0.1})
    (row,) = run.epochs()
    assert "flagged" in row
    assert not {"knn", "precision", "recall", "f1"} & row.keys()
    assert TrainConfig.load(run.config).data.source is None
    assert "NaN" not in run.metrics.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="needs labels"):
        tiny(x, tmp_path / "oracle", method="simclr+oracle")
    with pytest.raises(
        UsageError,
        match=r"the data must have labels: simclr\+ring uses the nearest-neighbour accuracy",
    ):
        tiny(x, tmp_path / "ring", method="simclr+ring", settings={"detector.anneal": "knn"})
    with pytest.raises(UsageError, match="`data` is required"):
        train(out=run.path, resume=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch_size": 1}, r"`batch_size` \(=1\) must be greater than or equal to 2"),
        ({"method": "simclrr"}, "simclr"),
        (
            {"method": "glofnd"},
            r"glofnd is a detector; write it as in simclr\+glofnd",
        ),
        ({"method": "simclr+glofn"}, "glofnd"),
        (
            {"method": "simclr+glofnd", "settings": {"detector.alpha": 2}},
            r"`alpha` \(=2.0\) must be in \[0, 1\]",
        ),
        ({"method": "simclr+glofnd", "settings": {"detector.alhpa": 0.5}}, "did you mean alpha"),
        ({"settings": {"detector.alpha": 0.5}}, r"simclr has no detector"),
        ({"settings": {"framework.temprature": 0.5}}, "did you mean temperature"),
        ({"settings": {"framework.temperature": -1}}, "`temperature`"),
        ({"settings": {"views.preset": "simcrl"}}, "simclr"),
        ({"settings": {"views.options.flipp": 1}}, "flip"),
        ({"settings": {"model.name": "resnet19"}}, "resnet18"),
        (
            {"settings": {"optimizer.warmup_epochs": 2}},
            r"`optimizer\.warmup_epochs` \(=2\) must be at most `epochs` \(=1\)",
        ),
        ({"settings": {"trainer.loggers": ["mlflow"]}}, "mlflow"),
        (
            {"method": "simclr+ring", "settings": {"detector.anneal": "knn", "knn.every": 0}},
            r"`knn\.every` \(=0\) must be at least 1",
        ),
        (
            {"method": "simclr+ifnd", "settings": {"detector.num_clusters": [64]}},
            r"`num_clusters` \(=64\) must be .* below .* \(64\)",
        ),
        ({"recipe": "simclr-cpuu"}, "did you mean simclr-cpu"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    more: dict[str, Any], words: str, images: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        tiny(images, tmp_path / "run", **more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_kept_unless_overwritten(images: Path, tmp_path: Path) -> None:
    run = tiny(images, tmp_path / "run")
    (run.path / "notes.txt").write_text("mine")
    before = run.metrics.read_bytes()
    with pytest.raises(UsageError, match="already holds a run"):
        tiny(images, run.path)
    with pytest.raises(UsageError, match="num_clusters"):
        tiny(
            images,
            run.path,
            overwrite=True,
            method="simclr+ifnd",
            settings={"detector.num_clusters": [64]},
        )
    assert run.metrics.read_bytes() == before, "a mistake with overwrite costs nothing"
    tiny(images, run.path, overwrite=True, seed=5)
    assert TrainConfig.load(run.config).seed == 5
    assert len(run.epochs()) == 1
    assert (run.path / "notes.txt").exists()


def test_a_resumed_run_must_be_the_same(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted(images, tmp_path / "run", monkeypatch)
    for more, key in (
        ({"seed": 9}, "seed"),
        ({"batch_size": 16}, "batch_size"),
        ({"settings": {"optimizer.lr": 0.5}}, "optimizer.lr"),
    ):
        with pytest.raises(UsageError, match=rf"`{key}` \(=.*\) was .* when the run began"):
            train(out=run.path, resume=True, progress=False, **more)
    monkeypatch.chdir(tmp_path)
    x = dict(np.load(images))
    x["x_train"][7, 0, 0, 0] ^= 1
    np.savez(tmp_path / "changed.npz", **x)
    with pytest.raises(KinfolkError, match=r"the data has changed.*7"):
        train(data="changed.npz", out=run.path, resume=True, progress=False)
    before = read_checkpoint(run.checkpoint)["kinfolk"]
    assert not before["finished"]
    train(
        out=run.path,
        resume=True,
        progress=False,
        settings={"knn.every": 0, "checkpoint.every_minutes": 1},
    )
    assert read_checkpoint(run.checkpoint)["kinfolk"]["finished"]
    assert [row["epoch"] for row in run.epochs()] == [1, 2]


def interrupted(data: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of two epochs that was interrupted after the first step."""
    import os
    import signal

    calls = []
    forward = TwoViews.forward

    def interrupting(self: TwoViews, views: Tensor, ids: Tensor) -> Tensor:
        calls.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        return forward(self, views, ids)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(TwoViews, "forward", interrupting)
        with pytest.raises(
            InterruptedRunError, match=r"ended by Ctrl-C after step 1 \(epoch 1 of 2\).*resume"
        ):
            tiny(data, out, epochs=2)
    assert len(calls) == 1
    assert signal.getsignal(signal.SIGINT) is before, "signals are given back"
    return Run(out)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = TwoViews.forward, []

    def failing(self: TwoViews, views: Tensor, ids: Tensor) -> Tensor:
        calls.append(ids.tolist())
        return forward(self, views, ids) * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(TwoViews, "forward", failing)
    with pytest.raises(
        NonFiniteLossError, match=r"the loss of sogclr is not finite at step 3 \(epoch 2, batch 2\)"
    ):
        tiny(images, tmp_path / "run", method="sogclr", epochs=3)
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["kinfolk"]["step"] == 2
    monkeypatch.setattr(TwoViews, "forward", forward)
    run = train(out=tmp_path / "run", resume=True, progress=False)
    assert (
        differences(
            run.path, tiny(images, tmp_path / "undisturbed", method="sogclr", epochs=3).path
        )
        == []
    )


def test_accumulation_steps_less_and_says_that_it_adds_no_negatives(
    images: Path, tmp_path: Path
) -> None:
    run = tiny(images, tmp_path / "run", batch_size=16, settings={"trainer.accumulate": 3})
    assert run.epochs()[0]["step"] == 2, "four batches: three, and the last one"
    assert "adds no negatives" in run.log.read_text(encoding="utf-8")


def test_a_queue_as_large_as_the_data_is_warned_of_in_one_line(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny(images, tmp_path / "run", method="moco", progress=True)
    lines = [line for line in run.log.read_text(encoding="utf-8").splitlines() if "WARNING" in line]
    assert len(lines) == 1
    assert lines[0].endswith("choose a smaller queue")
    assert capsys.readouterr().err.count("is not smaller than the data set") == 1
    run = tiny(images, tmp_path / "small", method="moco", settings={"framework.queue_size": 40})
    assert "WARNING" not in run.log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("method", "advice"), [("pcl", "choose a shorter warm-up"), ("la", "of 2; start it earlier")]
)
def test_a_warm_up_as_long_as_the_training_is_warned_of_in_one_line(
    method: str, advice: str, images: Path, tmp_path: Path
) -> None:
    settings = {
        "framework.warmup_epochs": 2,
        **({"framework.queue_size": 0} if method == "pcl" else {}),
    }
    run = tiny(images, tmp_path / "run", method=method, epochs=2, settings=settings)
    lines = [line for line in run.log.read_text(encoding="utf-8").splitlines() if "WARNING" in line]
    assert len(lines) == 1
    assert lines[0].endswith(advice)


def test_refused_files_are_listed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder = tmp_path / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(
            folder / f"{i:02d}.png"
        )
    (folder / "broken.png").write_bytes(b"")
    run = tiny(folder, tmp_path / "run", batch_size=8, progress=True)
    assert "1 of 21 images was refused" in capsys.readouterr().err
    assert "broken.png" in run.quarantine.read_text(encoding="utf-8")


def test_the_rate_warms_up_and_falls(images: Path, tmp_path: Path) -> None:
    settings = {"optimizer.lr": 0.8, "optimizer.lr_scaling": "linear", "optimizer.warmup_epochs": 2}
    rates = [
        row["lr"] for row in tiny(images, tmp_path / "run", epochs=4, settings=settings).epochs()
    ]
    # 0.8·32/256; the rate of the step to come
    assert rates == pytest.approx([0.1 * 0.75, 0.1, 0.05, 0.0])


def test_only_the_buffers_of_norms_are_left_to_ddp() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2))
    module.register_buffer("thresholds", torch.zeros(5))
    module[1].register_buffer("queue", torch.zeros(5))
    assert _buffers_outside_norms(module) == ["thresholds", "1.queue"]


def test_channels_last_is_left_where_it_crashes() -> None:
    for channels in (2, 4, 8, 15):
        assert _crashes_channels_last(
            torch.nn.Sequential(torch.nn.Conv2d(channels, 8, 1, stride=2))
        )
    assert _crashes_channels_last(torch.nn.Conv2d(32, 32, 1, stride=2, groups=4))
    assert not _crashes_channels_last(
        torch.nn.Sequential(torch.nn.Conv2d(16, 8, 1, stride=2), torch.nn.Conv2d(3, 8, 3, stride=2))
    )


def test_metrics_are_json(images: Path, tmp_path: Path) -> None:
    run = tiny(images, tmp_path / "run", settings={"knn.every": 0, "trainer.loggers": []})
    assert not (run.path / "tensorboard").exists()
    (line,) = run.metrics.read_text(encoding="utf-8").splitlines()
    assert "knn" not in json.loads(line)
