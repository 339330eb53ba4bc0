"""Encoders by name, from other packages, and any module as an encoder."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.models.encoders import Adapted, ResNet, adapt, build_encoder


def test_builds_by_name_and_remembers_how() -> None:
    encoder = build_encoder("resnet10", stem="imagenet", width=8)
    assert isinstance(encoder, ResNet)
    assert encoder.config == {
        "name": "resnet10",
        "stem": "imagenet",
        "width": 8,
    }
    default = build_encoder("resnet10")
    assert default.config is not None
    assert default.config["width"] == 16
    assert build_encoder("resnet18", width=8).output_size == 64


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no encoder 'resnet81'; did you mean .*resnet18"):
        build_encoder("resnet81")
    with pytest.raises(UsageError, match=r"no encoder 'foo/bar'"):
        build_encoder("foo/bar")


def test_pretrained_of_our_own_is_refused() -> None:
    with pytest.raises(UsageError, match="load_weights"):
        build_encoder("resnet18", pretrained=True)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("kinfolk.models.text.importlib.import_module", missing)
    with pytest.raises(UsageError, match=f"pip install {package}"):
        build_encoder(f"{package}/resnet18")


def test_a_broken_package_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("kinfolk.models.text.importlib.import_module", broken)
    with pytest.raises(KinfolkError, match=r"installed but can't be imported.*nms"):
        build_encoder("torchvision/resnet18")


class TwoLayers(nn.Module):
    """Stands for a model of torchvision: a trunk and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 6, 3)
        self.classifier = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1000))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.trunk(x).mean((2, 3)))
        return out


def test_torchvision_models_lose_their_last_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("torchvision.models")
    fake.list_models = lambda module: ["two_layers", "no_linear"]
    fake.get_model = lambda name, weights: (
        TwoLayers() if name == "two_layers" else nn.Conv2d(3, 4, 1)
    )
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", fake)
    encoder = build_encoder("torchvision/two_layers")
    assert encoder.output_size == 5
    assert encoder(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert encoder.config == {"name": "torchvision/two_layers"}
    with pytest.raises(UsageError, match="did you mean two_layers"):
        build_encoder("torchvision/two_layer")
    with pytest.raises(UsageError, match="does not end in one linear classifier"):
        build_encoder("torchvision/no_linear")
    with pytest.raises(UsageError, match="`width`"):
        build_encoder("torchvision/two_layers", width=32)


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvision_models_are_built_by_name(name: str) -> None:
    encoder = build_encoder(f"torchvision/{name}").eval()
    assert encoder(torch.randn(1, 3, 224, 224)).shape == (1, encoder.output_size)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_timm_models_are_built_by_name(name: str) -> None:
    encoder = build_encoder(f"timm/{name}").eval()
    assert encoder(torch.randn(1, 3, 224, 224)).shape == (1, encoder.output_size)
    with pytest.raises(UsageError, match=r"did you mean .*resnet18"):
        build_encoder("timm/resnet118")


def test_adapt_measures_in_evaluation_mode_and_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Dropout(0.5))
    module[2].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    encoder = adapt(module)
    assert isinstance(encoder, Adapted)
    assert encoder.output_size == 7
    assert [part.training for part in module] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_adapt_averages_maps_and_checks_sizes() -> None:
    module = nn.Conv2d(3, 7, 3)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(adapt(module)(x), module(x).mean((2, 3)))
    with pytest.raises(KinfolkError, match=r"`output_size` \(=9\).*which is 7"):
        adapt(module, 9)(x)
    with pytest.raises(KinfolkError, match="returns tuple"):
        adapt(nn.LSTM(8, 4), 4)(torch.randn(2, 3, 8))
    with pytest.raises(KinfolkError, match="does not accept images"):
        adapt(nn.Linear(5, 4))


def test_adapt_leaves_encoders_alone() -> None:
    encoder = build_encoder("resnet10", width=4)
    assert adapt(encoder) is encoder
    assert adapt(encoder, 32) is encoder
