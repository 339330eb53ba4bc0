"""The features of a guide are matched with the training samples by name."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from kinfolk.cli import main
from kinfolk.clustering import PatchFeatures
from kinfolk.data.images import ImageData
from kinfolk.errors import UsageError
from kinfolk.training import guides
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import fit_to_data, resolve, with_absolute_paths
from kinfolk.training.guides import guide_features
from kinfolk.training.module import TrainingModule
from kinfolk.training.train import train
from tests.faults.inject import differences
from tests.report.synthetic import images
from tests.training.small import BARE


@pytest.fixture(autouse=True)
def few_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clustering into 400 typical patches takes seconds."""
    monkeypatch.setattr(
        PatchFeatures, "fit", partial(PatchFeatures.fit, num_patches=20, samples=2000)
    )


def features_of(path: Path, keys: list[str], named: bool = True) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(len(keys), 4)).astype(np.float32)
    np.save(path, x)
    if named:
        pq.write_table(
            pa.table({"id": range(len(keys)), "key": keys}), path.with_suffix(".parquet")
        )
    return x


def test_rows_in_another_order_are_matched_by_key(tmp_path: Path) -> None:
    data = images(20)
    x = features_of(tmp_path / "x.npy", list(reversed(data.samples.keys)))
    assert np.array_equal(
        guide_features(tmp_path / "x.npy", data).numpy(), x[::-1][: data.num_train]
    )


def test_features_of_other_samples_are_refused(tmp_path: Path) -> None:
    data = images(20)
    features_of(tmp_path / "x.npy", [f"other/{i}.png" for i in range(20)])
    with pytest.raises(
        UsageError,
        match=r"no features of 15 of 15 training samples \(the first is animals/0000.png\)",
    ):
        guide_features(tmp_path / "x.npy", data)


def test_without_keys_rows_are_in_order(tmp_path: Path) -> None:
    data = images(20)
    x = features_of(tmp_path / "x.npy", list(data.samples.keys), named=False)
    assert np.array_equal(guide_features(tmp_path / "x.npy", data).numpy(), x[: data.num_train])
    features_of(tmp_path / "short.npy", list(data.samples.keys)[:7], named=False)
    with pytest.raises(UsageError, match=r"short\.npy` has features of 7 samples"):
        guide_features(tmp_path / "short.npy", data)


class Colours(nn.Module):
    """Stands for a model of timm without its classifier: the mean of each channel."""

    num_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.sides: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.sides.add(x.shape[-1])
        return x.mean((2, 3))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module named timm that has one model."""
    fake: Any = ModuleType("timm")
    fake.made = []

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        fake.made.append((name, pretrained, num_classes))
        fake.model = Colours()
        return fake.model  # type: ignore[no-any-return]

    fake.is_model, fake.list_models, fake.create_model = (
        lambda name: name == "colours",
        lambda: ["colours"],
        create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake


def test_a_pretrained_model_of_timm_embeds_the_training_samples(timm: Any) -> None:
    data = images(20)
    features = guide_features("timm/colours", data)
    assert timm.made == [("colours", True, 0)]
    assert timm.model.sides == {128}  # images of 12 pixels are enlarged
    assert features.shape == (data.num_train, 3)
    assert features.dtype == torch.float16
    assert torch.allclose(features.float().norm(dim=1), torch.ones(data.num_train), atol=1e-3)
    # every fourth has the same colour
    assert (features[1] - features[0]).norm() > (features[4] - features[0]).norm()
    with pytest.raises(UsageError, match=r"timm has no model 'colors'.*did you mean colours"):
        guide_features("timm/colors", data)


def test_training_by_a_model_of_timm_from_the_command_line(tmp_path: Path, timm: Any) -> None:
    np.savez(
        tmp_path / "data.npz",
        images=np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
    )
    words = [
        "train",
        "--data",
        str(tmp_path / "data.npz"),
        "--out",
        str(tmp_path / "run"),
        "--method",
        "simclr+guide",
    ]
    words += ["--guide", "timm/colours", "--epochs", "1", "--batch-size", "8"]
    with pytest.raises(SystemExit) as left:
        main(
            [
                *words,
                *(
                    word
                    for each in ("detector.alpha=0.2", "model.width=8", "views.size=8")
                    for word in ("--set", each)
                ),
            ]
        )
    assert not left.value.code
    assert timm.made == [("colours", True, 0)]  # once, also for the gallery of the report
    assert "features: timm/colours" in (tmp_path / "run" / "config.yaml").read_text()
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["flagged"] == pytest.approx(0.2, abs=0.1)


def test_patches_are_features_of_the_images_alone() -> None:
    data = images(40)
    features_NF = guide_features("patches", data)
    assert features_NF.dtype == torch.float16
    assert len(features_NF) == data.num_train
    torch.testing.assert_close(
        features_NF.float().norm(dim=1), torch.ones(data.num_train), rtol=1e-2, atol=1e-2
    )
    same = images(40)
    assert torch.equal(guide_features("patches", same), features_NF)


def test_features_made_once_are_read_again_for_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run, the other ranks and the report have the same features bit for bit, also with
    other threads or on another device."""
    calls = []

    def made(data: ImageData) -> Tensor:
        calls.append(len(data))
        return torch.randn(data.num_train, 3).half()  # not the same twice

    monkeypatch.setattr(guides, "patch_features", made)
    (tmp_path / "run").mkdir()
    one, same = (
        guide_features("patches", images(20), tmp_path / "run" / "cache") for _ in range(2)
    )
    assert torch.equal(one, same)
    assert calls == [20]
    guide_features("patches", images(24), tmp_path / "run" / "cache")
    assert calls == [20, 24]
    # nothing can be written there
    guide_features("patches", images(20), tmp_path / "missing" / "run" / "cache")
    assert calls == [20, 24, 20]


def test_patches_are_drawn_from_the_whole_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(20)  # 15 of them for training
    seen: list[Tensor] = []
    pixels = data.pixels

    def watched(ids: Tensor) -> Tensor:
        seen.append(ids)
        return pixels(ids)

    monkeypatch.setattr(guides, "PATCHES_IMAGES", 10)
    monkeypatch.setattr(data, "pixels", watched)
    guide_features("patches", data)
    assert seen[0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13]


def test_images_that_do_not_differ_make_no_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(12)
    monkeypatch.setattr(
        data, "pixels", lambda ids: torch.full((len(ids), 12, 12, 3), 7, dtype=torch.uint8)
    )
    with pytest.raises(
        UsageError,
        match=(
            "do not differ enough for a guide made from their patches; name another one with"
            " --guide"
        ),
    ):
        guide_features("patches", data)


def test_a_folder_named_patches_is_not_taken_for_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patches").mkdir()
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.of({"method": "simclr+guide", "detector": {"features": "patches"}})
    assert with_absolute_paths(config).detector["features"] == "patches"
    assert guide_features("patches", images(8)).shape[0] == 6
    with pytest.raises(UsageError, match=r"patches/config.yaml cannot be read"):
        guide_features("./patches", images(8))


def test_a_guide_that_is_not_named_is_made_from_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(
        tmp_path / "data.npz",
        images=np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
    )
    words = [
        "train",
        "--data",
        str(tmp_path / "data.npz"),
        "--out",
        str(tmp_path / "run"),
        "--method",
        "simclr+guide",
        "--no-report",
    ]
    with pytest.raises(SystemExit) as left:
        main(
            [
                *words,
                "--epochs",
                "1",
                "--batch-size",
                "8",
                "--set",
                "model.width=8",
                "--set",
                "views.size=8",
            ]
        )
    assert not left.value.code
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "features: patches" in written
    assert "alpha: 0.1" in written
    assert ["detector.features", "patches"] in [
        line.split() for line in capsys.readouterr().err.splitlines()
    ]


def test_a_run_by_patches_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "data": np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
        "method": "simclr+guide",
    }
    given |= {"epochs": 2, "batch_size": 8, "settings": BARE, "progress": False}
    whole = train(out=tmp_path / "whole", **given)
    start = TrainingModule.on_train_epoch_start

    def stopped(module: TrainingModule) -> None:
        if module.current_epoch == 1:
            raise OSError("stopped")
        start(module)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "on_train_epoch_start", stopped)
        with pytest.raises(Exception, match="stopped"):
            train(out=tmp_path / "run", **given)
    monkeypatch.setattr(PatchFeatures, "fit", None)  # the features are not made again
    run = train(out=tmp_path / "run", resume=True, **given)
    assert differences(run.path, whole.path) == []


def test_a_run_that_eliminated_by_default_still_does(tmp_path: Path) -> None:
    """Until attracting became the usual action of a guide, config.yaml did not name `eliminate`."""
    data = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    given: dict[str, Any] = {"batch_size": 8, "settings": BARE, "progress": False}
    run = train(data, tmp_path / "run", method="simclr+guide:eliminate", epochs=1, **given)
    run.config.write_text(run.config.read_text().replace("simclr+guide:eliminate", "simclr+guide"))
    train(data, run.path, epochs=2, resume=True, **given)
    assert TrainConfig.load(run.config).method == "simclr+guide:eliminate"
    assert len(run.epochs()) == 2
    with pytest.raises(
        UsageError, match=r"`method` \(='simclr\+guide:attract'\) was 'simclr\+guide'"
    ):
        train(data, run.path, method="simclr+guide", epochs=3, resume=True, **given)


@pytest.mark.parametrize(
    "method", ["clip+guide", "siglip+guide:reweight", "simclr", "simclr+known", "moco+guide"]
)
def test_only_a_guide_of_images_is_made_from_patches(method: str) -> None:
    source: Any = SimpleNamespace(native_size=(8, 8), has_texts=False)
    config = TrainConfig.of(
        {"method": method, "detector": {"pairs": "x.csv"} if "known" in method else {}}
    )
    assert (fit_to_data(resolve(config), source).detector.get("features") == "patches") == (
        method == "moco+guide"
    )
