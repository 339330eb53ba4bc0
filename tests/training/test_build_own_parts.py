"""Encoders and detectors of the user: as objects, and as plugins that are found again when a run is
opened."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kinfolk as kf
from kinfolk.detectors import DETECTORS
from kinfolk.detectors.base import Detector
from kinfolk.errors import UsageError
from kinfolk.pairs import Block, Kin
from kinfolk.plugins import register_detector
from kinfolk.training.config import TrainConfig
from kinfolk.training.load_run import open_run
from kinfolk.training.settings import check_arguments
from kinfolk.training.train import train

PLUGIN = Path(__file__).with_name("my_plugin.py")
SMALL: dict[str, Any] = {
    "head.out_size": 8,
    "views.preset": "mild",
    "knn.every": 0,
    "trainer.loggers": (),
    "trainer.precision": "32",
}


class Threshold(Detector):
    """Flags candidates above a similarity."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def find(self, block: Block) -> Kin:
        return Kin(block.sim_RC > self.threshold)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.conv(images)
        return features


@pytest.fixture
def images() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 255, (32, 8, 8, 3), dtype=np.uint8)


def test_a_module_is_trained_saved_and_loaded(tmp_path: Path, images: Any) -> None:
    model = Tiny()
    before = model.conv.weight.detach().clone()
    run = train(
        images,
        tmp_path / "run",
        model=model,
        epochs=1,
        lr=0.5,
        image_size=16,
        settings=SMALL,
        progress=False,
    )
    assert not torch.equal(model.conv.weight, before), "it is trained in place"
    config = TrainConfig.load(run.config)
    assert (config.python.model, config.optimizer.lr, config.views.size) == ("Tiny", 0.5, 16)
    encoder = kf.load(run, model=Tiny())
    batch = encoder.preprocess(images[:4])
    assert batch.shape == (4, 3, 16, 16)
    torch.testing.assert_close(encoder(batch), model.eval()(batch).mean((2, 3)))
    assert kf.embed(run, images, model=Tiny()).shape == (32, 6)
    with pytest.raises(
        UsageError,
        match=r"was trained with a Tiny passed from Python; .*`kf.load\(run, model=module\)`",
    ):
        kf.load(run.path)
    with pytest.raises(
        UsageError,
        match=r"the model of this run \(Tiny\) was passed from Python; pass it again as `model`",
    ):
        train(images, run.path, resume=True, epochs=2, progress=False)


def test_a_detector_object_is_used_with_its_action(tmp_path: Path, images: Any) -> None:
    settings = {**SMALL, "model.width": 4}
    run = train(
        images,
        tmp_path / "run",
        detector=Threshold(-2.0),
        action="attract",
        epochs=1,
        settings=settings,
        progress=False,
    )
    (row,) = run.epochs()
    assert row["flagged"] == 1, "every candidate is above −2"
    config = TrainConfig.load(run.config)
    assert (config.method, config.python.detector, config.python.action) == (
        "simclr",
        "Threshold",
        "attract",
    )
    assert kf.embed(run, images).shape == (32, 32), "the encoder needs no detector"
    with pytest.raises(
        UsageError, match=r"the detector of this run \(Threshold\) was passed from Python"
    ):
        kf.evaluate(run, images, "kin")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"detector": "glofnd"}, "`detector` .* must be a kf.Detector"),
        ({"action": "attract"}, "`action` .* belongs to a `detector` object"),
        (
            {"detector": kf.Guide(torch.ones(31, 3), alpha=0.1)},
            "the guide has features of 31 samples; it must have one row for each of the",
        ),
        ({"detector": Threshold(0.5), "method": "simclr+fnc"}, "has a detector already"),
        ({"model": Tiny(), "method": "cmc"}, "takes no module as `model`"),
        (
            {"settings": {"plugins": "no_such_module"}},
            "the plugin `no_such_module` cannot be imported",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, images: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(images, tmp_path / "run", epochs=1, progress=False, **{"settings": SMALL, **given})
    assert not (tmp_path / "run" / "config.yaml").exists()


def forget_plugin() -> None:
    DETECTORS.pop("nearest_of_test", None)
    sys.modules.pop("kinfolk_plugin_my_plugin", None)


def test_arguments_without_annotation_can_be_set() -> None:
    def detector(num_samples, margin=0.3):  # type: ignore[no-untyped-def]
        pass

    parameters = {"margin": inspect.signature(detector).parameters["margin"]}
    assert check_arguments(detector, parameters, {"margin": 0.2}, "detector", "mine") == {
        "margin": 0.2
    }


@pytest.fixture(autouse=True)
def without_plugin() -> Iterator[None]:
    yield
    forget_plugin()


class Wrong(Detector):
    """Answers with a row for each sample instead of one for each view."""

    def find(self, block: Block) -> Kin:
        return Kin(block.sim_RC[:: block.num_views] > 0.5)


def test_a_detector_with_wrong_answers_ends_the_training_with_a_sentence(
    tmp_path: Path, images: Any
) -> None:
    """All wrong answers are in tests/test_contrast_weights.py."""
    sentence = (
        r"`degree` of `Kin` \(=torch.bool \(16, 32\)\) must be bool or float of the shape \(32,"
        r" 32\)"
    )
    with pytest.raises(ValueError, match=sentence):
        train(images, tmp_path / "run", detector=Wrong(), epochs=1, settings=SMALL, progress=False)


def test_a_detector_that_flags_nothing_is_reported_once(tmp_path: Path, images: Any) -> None:
    settings = {**SMALL, "model.width": 4}
    run = train(
        images,
        tmp_path / "run",
        detector=Threshold(1.5),
        epochs=4,
        settings=settings,
        progress=False,
    )
    log = run.log.read_text(encoding="utf-8")
    assert log.count("flagged nothing in epoch") == 1
    assert "flagged nothing in epoch 2; check its settings" in log


def test_a_plugin_is_imported_again_when_the_run_is_opened(tmp_path: Path, images: Any) -> None:
    settings = {**SMALL, "model.width": 4, "plugins": str(PLUGIN), "detector.threshold": 0.2}
    run = train(
        images,
        tmp_path / "run",
        method="simclr+nearest_of_test",
        epochs=1,
        settings=settings,
        progress=False,
    )
    assert run.epochs()[0]["flagged"] > 0
    assert TrainConfig.load(run.config).plugins == (str(PLUGIN),)
    forget_plugin()
    assert "nearest_of_test" not in DETECTORS
    assert open_run(run.path).encoder() is not None
    assert "nearest_of_test" in DETECTORS


def test_names_of_the_library_cannot_be_taken() -> None:
    with pytest.raises(UsageError, match="already taken"):
        register_detector("fnc", Threshold)
    with pytest.raises(UsageError, match="must be a lower-case identifier"):
        register_detector("My Detector", Threshold)
    with pytest.raises(UsageError, match="must be a subclass"):
        register_detector("mine", nn.Linear)


def test_load_embed_and_evaluate_a_run(tmp_path: Path) -> None:
    settings = {**SMALL, "model.width": 4}
    run = train(
        "digits", tmp_path / "run", epochs=1, batch_size=512, settings=settings, progress=False
    )
    encoder = kf.load(run)
    assert not encoder.training
    assert encoder.output_size == kf.embed(run).shape[1]
    assert 0 < kf.evaluate(run)["accuracy"] <= 1
    with pytest.raises(UsageError, match=r"`protocol` .='liner'. must be one of knn, linear"):
        kf.evaluate(run, protocol="liner")
    with pytest.raises(UsageError, match=r"`pixels` \(=torch.float32"):
        encoder.preprocess(torch.zeros(1, 8, 8, 3))


def test_opening_a_run_never_runs_code_that_came_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for name in ("evil.py", str(tmp_path / "evil.py")):
        (tmp_path / "config.yaml").write_text(f"method: simclr\nplugins: [{name}]\n")
        with pytest.raises(UsageError, match="is not imported"):
            TrainConfig.load(tmp_path / "config.yaml")
    assert not mark.exists()
