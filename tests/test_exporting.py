"""Encoders for other software: names, shapes and features as the target has them; what it has not
is refused."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kinfolk as kf
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.exporting import network_in, unavailable
from kinfolk.models import build_encoder, read_state, save_encoder

NAMES: dict[str, dict[str, list[int]]] = json.loads(
    (Path(__file__).parent / "exporting_names.json").read_text(encoding="utf-8")
)
"""Parameters and buffers with their shapes: as torchvision 0.28 and timm 1.0.30 list them, who
agree; classifiers left out."""
VIEWS = {"size": 32, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.2], "space": "rgb"}


def seldom(module: nn.Module) -> nn.Module:
    """Statistics of BatchNorm that are not those of a new network, so that a mix-up shows."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            nn.init.normal_(layer.running_mean, 0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return module.eval()


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    save_encoder(seldom(build_encoder(request.param, stem="imagenet")), folder, {"views": VIEWS})
    return request.param, folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_encoder(seldom(build_encoder("resnet10", width=4)), folder, {"views": VIEWS})
    return folder


def shapes(state: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items()}


def test_safetensors_has_the_weights_and_the_views(small: Path) -> None:
    found = kf.export(small, "safetensors")
    assert found.path == small / "export" / "encoder.safetensors"
    assert found.checked == "read again and equal"
    kept, state = read_state(small / "model.safetensors"), read_state(found.path)
    assert state.keys() == kept.keys()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    from safetensors import safe_open

    with safe_open(found.path, "pt") as file:
        assert json.loads(file.metadata()["views"]) == VIEWS


def test_torchvision_has_these_names(run: tuple[str, Path]) -> None:
    name, folder = run
    found = kf.export(folder, "torchvision", overwrite=True)
    assert shapes(torch.load(found.path, weights_only=True)) == NAMES[name]
    if unavailable("torchvision") is None:
        assert found.checked.startswith("loaded into torchvision: ")
    else:
        assert found.checked.startswith("not loaded: torchvision ")


def test_timm_has_these_names(run: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = run
    found = kf.export(folder, "timm", tmp_path / "out")
    assert shapes(read_state(found.path / "model.safetensors")) == NAMES[name]
    config = json.loads((found.path / "config.json").read_text(encoding="utf-8"))
    assert (config["architecture"], config["num_classes"]) == (name, 0)
    assert config["pretrained_cfg"]["mean"] == VIEWS["mean"]
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert config["pretrained_cfg"]["classifier"] == "fc", "without it timm can't add a classifier"
    if unavailable("timm") is None:
        assert found.checked.startswith("loaded into timm: ")


@pytest.mark.parametrize(
    ("config", "package", "why"),
    [
        (None, "timm", "a module of your own"),
        (
            {"name": "resnet10", "stem": "imagenet", "width": 64},
            "torchvision",
            "there is no resnet10;",
        ),
        (
            {"name": "resnet18", "stem": "cifar", "width": 64},
            "timm",
            r"its `stem` is cifar instead of imagenet",
        ),
        (
            {"name": "resnet50", "stem": "imagenet", "width": 32},
            "timm",
            r"its `width` is 32 instead of 64",
        ),
        (
            {"name": "resnet18", "stem": "imagenet", "width": 64, "in_channels": 1},
            "torchvision",
            "its `in_channels` is 1 instead of 3",
        ),
        ({"towers": [], "channels": [1, 2]}, "torchvision", "two networks"),
        ({"name": "timm/vit_tiny_patch16_224"}, "torchvision", "it is timm/vit_tiny_patch16_224"),
        ({"name": "open_clip/RN50"}, "timm", "it is open_clip/RN50"),
    ],
)
def test_what_the_target_has_not_is_refused(
    config: dict[str, Any] | None, package: str, why: str
) -> None:
    with pytest.raises(
        UsageError,
        match=(
            f"the encoder can't be exported to {package}: .*{why}.*safetensors and onnx take any"
            " encoder"
        ),
    ):
        network_in(package, config)


def test_networks_of_other_packages_keep_their_names() -> None:
    assert network_in("torchvision", {"name": "torchvision/convnext_tiny"}) == "convnext_tiny"
    assert network_in("timm", {"name": "timm/resnet50.a1_in1k"}) == "resnet50"
    assert network_in("torchvision", {"name": "timm/resnet34"}) == "resnet34"
    assert network_in("timm", {"name": "torchvision/resnet152"}) == "resnet152"


def test_wrong_formats_and_existing_files_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=(r"`format` .='keras'. must be one of safetensors, torchvision, timm, onnx"),
    ):
        kf.export(small, "keras")
    with pytest.raises(
        UsageError, match="can't be exported to torchvision: there is no resnet10; its `stem`"
    ):
        kf.export(small, "torchvision", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
    with pytest.raises(UsageError, match=r"`out` \(=.*\) must end in .safetensors"):
        kf.export(small, "safetensors", tmp_path / "out")
    (tmp_path / "there.safetensors").touch()
    with pytest.raises(UsageError, match=r"there.safetensors exists; choose another `out`"):
        kf.export(small, "safetensors", tmp_path / "there.safetensors")
    with pytest.raises(KinfolkError, match=r"there is no model.safetensors"):
        kf.export(tmp_path, "safetensors")


def test_an_export_with_other_features_is_refused(
    run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is there, and builds another network under the name."""
    name, folder = run
    other = seldom(build_encoder(name, stem="imagenet"))
    monkeypatch.setattr("kinfolk.exporting.unavailable", lambda package: None)
    monkeypatch.setattr("kinfolk.exporting.load_torchvision", lambda name, path: other)
    with pytest.raises(KinfolkError, match="the export returns different features in torchvision"):
        kf.export(folder, "torchvision", tmp_path / "out.pth")
    assert not list(tmp_path.iterdir())


def test_onnx_gives_the_same_features_and_has_the_views_in_its_metadata(
    small: Path, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    found = kf.export(small, "onnx", tmp_path / "encoder.onnx")
    assert found.checked.startswith("run by onnxruntime on batches of 1 and 5")
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.onnx"], "weights included"
    onnx, onnxruntime = (importlib.import_module(package) for package in ("onnx", "onnxruntime"))
    notes = {
        entry.key: json.loads(entry.value)
        for entry in onnx.load(found.path).metadata_props
        if entry.key in VIEWS
    }
    assert notes == VIEWS
    from kinfolk.models import load_encoder

    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    session = onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"images": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(
            features, load_encoder(small)[0](images).numpy(), rtol=1e-3, atol=1e-5
        )


def test_onnx_asks_for_what_is_missing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    hint = (
        r"install it with `pip install onnx onnxscript onnxruntime`, or .*'\.\[onnx\]'` in a clone"
    )
    with pytest.raises(UsageError, match=rf"the format onnx needs the package onnx; {hint}"):
        kf.export(small, "onnx")
