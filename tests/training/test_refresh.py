"""The once-per-epoch step: which features it is given, when, and that a resumed training refreshes
neither twice nor too little."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.detectors import IFND, Ring
from kinfolk.embedding import embed, embed_in_parts
from kinfolk.evaluation.detection import label_nmi
from kinfolk.frameworks import SimCLR
from kinfolk.frameworks.base import Framework
from kinfolk.training import checkpoint, epoch_end
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.load_run import load_framework, open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.children import few_images, run_child, run_ranks, training
from tests.training.small import BARE, assert_same

CLUSTERED: dict[str, Any] = {
    "method": "simclr+ifnd",
    "settings": {"detector.num_clusters": [8, 20], "optimizer.name": "sgd"},
}
BANK: dict[str, Any] = {
    "method": "simclr+ifnd",
    "settings": {"detector.num_clusters": [8, 20], "detector.source": "bank"},
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return few_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(few: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: train(**training(folder / name, **few, **more))
        for name, more in (("pass", CLUSTERED), ("bank", BANK))
    }


@pytest.mark.parametrize(
    ("source", "moment", "each_step"),
    [
        # the checkpoint is at the beginning of an epoch: it is refreshed again
        ("pass", "kill step 8", False),
        ("pass", "kill step 8", True),  # the checkpoint is within an epoch: it is not
        ("pass", "kill line 2", True),
        ("bank", "kill step 8", False),
        ("bank", "kill step 8", True),  # what was collected so far is in the checkpoint
    ],
)
def test_killed_and_resumed_is_the_same(
    tmp_path: Path,
    few: dict[str, Any],
    whole: dict[str, Run],
    source: str,
    moment: str,
    each_step: bool,
) -> None:
    more = {**few, **{"pass": CLUSTERED, "bank": BANK}[source]}
    assert run_child(tmp_path / "run", moment, each_step=each_step, **more) == -signal.SIGKILL
    run = train(**training(tmp_path / "run", each_step=each_step, resume=True, **more))
    assert_same(run, whole[source])
    assert ["refresh_seconds" in row for row in run.epochs()] == [False, True, True]


def test_two_ranks_resumed_at_the_end_of_an_epoch_are_the_same(
    tmp_path: Path, few: dict[str, Any]
) -> None:
    """Ranks count their own statistics of BatchNorm; all must embed with those that the checkpoint
    holds."""
    whole, out, more = Run(tmp_path / "whole"), Run(tmp_path / "run"), {**few, **CLUSTERED}
    assert run_ranks(whole.path, "", "", **more) == [0, 0]
    assert run_ranks(out.path, "", "terminate step 5", **more) == [1, 1]
    assert read_checkpoint(out.checkpoint)["kinfolk"]["epoch"] == 1
    assert run_ranks(out.path, "", "", resume=True, **more) == [0, 0]
    assert_same(out, whole)


def test_all_training_samples_are_embedded_as_they_are(
    tmp_path: Path, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In data-set order, without augmentation, in evaluation mode, which is put back."""
    seen: list[tuple[int, Tensor, float]] = []

    def embedded(
        framework: Framework, data: ImageData, views: Any, number: int, **options: Any
    ) -> Tensor:
        before = {name: value.clone() for name, value in framework.state_dict().items()}
        found = original(framework, data, views, number, **options)
        assert number == data.num_train < len(data), "the test images are left alone"
        alike = {name: options[name] for name in ("autocast", "projected")}
        assert torch.equal(found, embed(framework, data, views, torch.arange(number), **alike))
        assert framework.encoder.training
        assert all(
            torch.equal(value, before[name]) for name, value in framework.state_dict().items()
        )
        return found

    def remember(self: IFND, features: Tensor, progress: float) -> None:
        seen.append((self.epoch, features, progress))

    original = embed_in_parts
    monkeypatch.setattr(epoch_end, "embed_in_parts", embedded)
    monkeypatch.setattr(IFND, "refresh", remember)
    for space, size in (("projected", 16), ("features", 64)):
        seen.clear()
        train(
            **training(
                tmp_path / space, method="simclr+ifnd", settings={"detector.space": space}, **few
            )
        )
        assert [(epoch, progress) for epoch, _, progress in seen] == [
            (1, 1 / 3),
            (2, 2 / 3),
            (2, 1.0),
        ]
        assert all(features.shape[1] == size for _, features, _ in seen)


def test_the_last_clustering_is_of_the_finished_encoder(whole: dict[str, Run]) -> None:
    """It is in the checkpoint and in the last line of the metrics log, and has all labels."""
    run = whole["pass"]
    opened = open_run(run.path)
    data = opened.data()
    framework = load_framework(opened.config, run, data)
    (detector,) = framework.detectors
    assert isinstance(detector, IFND)
    found = embed(framework, data, opened.views(), torch.arange(data.num_train), projected=True)
    distance = torch.cdist(found, detector.clusters.level(0))
    assert (distance.argmin(1) == detector.clusters.labels[0]).float().mean() > 0.99
    assert (detector.labels < torch.tensor([[8], [20]])).all()
    assert data.labels is not None
    assert run.epochs()[-1]["nmi"] == pytest.approx(
        label_nmi(detector.clusters.labels[0], data.labels[: data.num_train])
    )


@pytest.mark.parametrize("which", ["query", "momentum"])
def test_moco_clusters_what_the_chosen_encoder_embeds(
    tmp_path: Path, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    models: list[Any] = []

    def embedded(model: Any, *others: Any, **options: Any) -> Tensor:
        models.append(type(model).__name__)
        return original(model, *others, **options)

    original = embed_in_parts
    monkeypatch.setattr(epoch_end, "embed_in_parts", embedded)
    settings = {
        **CLUSTERED["settings"],
        "framework.queue_size": 96,
        "framework.cluster_encoder": which,
    }
    train(**training(tmp_path / which, method="moco+ifnd", epochs=2, settings=settings, **few))
    assert set(models) == {"MoCo" if which == "query" else "MomentumCopy"}


def test_features_that_are_known_are_not_computed(
    tmp_path: Path, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a bank and what was collected need no pass over the data")

    monkeypatch.setattr(epoch_end, "embed_in_parts", never)
    for name, more in (("bank", {"method": "ir+ifnd"}), ("collected", BANK)):
        # the batch divides the 170 samples: all of them were seen after an epoch
        given = {**few, **more, "batch_size": 34}
        rows = train(**training(tmp_path / name, epochs=2, **given)).epochs()
        assert rows[1]["flagged"] > 0


def test_the_measured_knn_is_passed_on_before_the_checkpoint(
    tmp_path: Path, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    save = checkpoint.CheckpointSaver._save

    def saved(self: checkpoint.CheckpointSaver, *args: Any, **more: Any) -> None:
        events.append("saved")
        save(self, *args, **more)

    monkeypatch.setattr(Ring, "on_metric", lambda self, name, value: events.append((name, value)))
    monkeypatch.setattr(checkpoint.CheckpointSaver, "_save", saved)
    run = train(
        **training(
            tmp_path / "run",
            method="simclr+ring",
            settings={"knn.every": 2, "detector.anneal": "knn"},
            **few,
        )
    )
    knn = [row["steering_knn"] for row in run.epochs() if "steering_knn" in row]
    assert events == ["saved", ("knn", knn[0]), "saved", ("knn", knn[1]), "saved"]


def test_a_training_that_diverged_says_so(
    tmp_path: Path, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        epoch_end,
        "embed_in_parts",
        lambda framework, data, *others, **options: torch.full((data.num_train, 16), torch.nan),
    )
    with pytest.raises(ValueError, match="the features of sample 0 are not finite"):
        train(**training(tmp_path / "run", **few, **CLUSTERED))


def test_the_epoch_is_set_once_per_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    original = SimCLR.set_progress

    def noted(self: SimCLR, epoch: float, num_epochs: int) -> None:
        calls.append(epoch)
        original(self, epoch, num_epochs)

    monkeypatch.setattr(SimCLR, "set_progress", noted)
    images = np.random.default_rng(0).integers(0, 256, (48, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images)
    train(
        data=tmp_path / "images.npz",
        out=tmp_path / "run",
        method="simclr+fnc",
        epochs=2,
        batch_size=8,
        settings=BARE,
        progress=False,
    )
    assert set(calls) == {0, 1}
    assert calls.count(1) == 1, "an epoch has six steps"
