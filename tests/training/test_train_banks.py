"""Trainings of cmc and la: resumed to the same bits, evaluated, exported."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.cli import main
from kinfolk.data.views import Views
from kinfolk.errors import UsageError
from kinfolk.models import SplitEncoder, load_encoder
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.load_run import open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.children import run_child, training
from tests.training.small import assert_same

METHODS: dict[str, dict[str, Any]] = {
    "cmc": {
        "method": "cmc+glofnd",
        "settings": {
            "framework.num_negatives": 50,
            "detector.alpha": 0.05,
            "detector.init": "quantile",
        },
    },
    "la": {
        "method": "la",
        "settings": {
            "framework.warmup_epochs": 1,
            "framework.num_background": 40,
            "framework.num_clusterings": 2,
        },
    },
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of colours, 96 images for training and 24 for testing."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "images.npz"
    y = np.arange(120) % 3
    x = np.clip(
        np.eye(3)[y][:, None, None] * 120 + rng.integers(0, 120, (120, 8, 8, 3)), 0, 255
    ).astype(np.uint8)
    np.savez(path, x_train=x[:96], y_train=y[:96], x_test=x[96:], y_test=y[96:])
    return path


def arguments(name: str, images: Path) -> dict[str, Any]:
    """Five steps an epoch, fifteen in all."""
    return {"data": str(images), "batch_size": 19, **METHODS[name]}


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {
        name: train(**training(tmp_path_factory.mktemp("whole") / name, **arguments(name, images)))
        for name in METHODS
    }


@pytest.mark.parametrize("name", METHODS)
def test_killed_and_resumed_is_the_same(
    tmp_path: Path, images: Path, whole: dict[str, Run], name: str
) -> None:
    out = tmp_path / "run"
    assert (
        run_child(out, "kill step 8", each_step=True, **arguments(name, images)) == -signal.SIGKILL
    )
    assert_same(
        train(**training(out, each_step=True, resume=True, **arguments(name, images))), whole[name]
    )
    kept = {
        "cmc": {
            "light_bank.features",
            "colour_bank.features",
            "draw.count",
            "colour_objective.detector.store.threshold",
        },
        "la": {"bank.features", "objective.detector.detector.clusters.labels"},
    }
    assert {f"framework.{key}" for key in kept[name]} <= read_checkpoint(whole[name].checkpoint)[
        "state_dict"
    ].keys()


def test_la_clusters_after_its_warm_up(whole: dict[str, Run]) -> None:
    shares = [row["flagged"] for row in whole["la"].epochs()]
    assert shares[0] == 0 < min(shares[1:])


def test_the_joined_features_are_evaluated(whole: dict[str, Run]) -> None:
    run = whole["cmc"]
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(run.path), "--protocol", "knn,linear", "--k", "5"])
    assert not caught.value.code
    assert json.loads((run.path / "eval" / "knn.json").read_text())["accuracy"] > 0.5
    opened = open_run(run.path)
    assert opened.views().space == "lab"
    assert opened.features(opened.data()).shape == (120, 128), "64 of lightness, 64 of colour"


def test_the_exported_model_is_enough(whole: dict[str, Run], images: Path) -> None:
    run = whole["cmc"]
    encoder, meta = load_encoder(run.path)
    assert isinstance(encoder, SplitEncoder)
    views, pixels = Views(**meta["views"]), torch.from_numpy(np.load(images)["x_train"])
    with torch.no_grad():
        features = encoder(views.evaluate(pixels))
    opened = open_run(run.path)
    torch.testing.assert_close(
        features, torch.from_numpy(opened.features(opened.data())[:96]), atol=1e-5, rtol=1e-4
    )
    state = read_checkpoint(run.checkpoint)["state_dict"]
    assert all(
        torch.equal(value, state[f"framework.encoder.{name}"])
        for name, value in encoder.state_dict().items()
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"views.options": {"space": "rgb"}},
            r"`views\.options\.space` \(='rgb'\) must be 'lab' for cmc",
        ),
        (
            {"model.name": "torchvision/resnet18", "model.width": None},
            "'torchvision/resnet18' takes images of 3 channels",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, images: Path, setting: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        train(
            **training(
                tmp_path / "run", data=str(images), batch_size=32, method="cmc", settings=setting
            )
        )
