"""The forms that an encoder is written in; each is checked before it takes its name, by its target where that is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kinfolk.errors import KinfolkError
from kinfolk.exporting.detectron2 import config_lines, write_pickle
from kinfolk.exporting.onnx import run_onnx, write_onnx
from kinfolk.exporting.target import network_in
from kinfolk.exporting.verify import agreement, load_timm, load_torchvision, require_agreement, unavailable
from kinfolk.files import write_by_name
from kinfolk.models.weights import plain_state, read_state


@dataclass(frozen=True)
class Encoder:
    """An encoder with what its run says of the pictures it was shown."""

    module: nn.Module
    views: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any] | None:
        config = getattr(self.module, "config", None)
        return config if isinstance(config, dict) else None

    def pictures(self, number: int = 2) -> Tensor:
        size = int(self.views.get("size", 32))
        return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(0))


def _safetensors(encoder: Encoder, path: Path) -> tuple[str, str]:
    state = plain_state(encoder.module)
    _whole(path, lambda partial: save_file(state, partial, {"format": "pt", "views": json.dumps(dict(encoder.views))}))
    again = read_state(path)
    if again.keys() != state.keys() or not all(torch.equal(again[name], state[name]) for name in state):
        raise KinfolkError(f"{path} does not hold what was written; the disk may be full or broken")
    return "read again and equal", f'safetensors.torch.load_file("{path}")'


def _torchvision(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("torchvision", encoder.config), plain_state(encoder.module)

    def write(partial: Path) -> str:
        torch.save(state, partial)
        return _loaded(encoder, "torchvision", lambda: load_torchvision(name, partial))

    return _whole(path, write), f'torchvision.models.{name}().load_state_dict(torch.load("{path}"), strict=False)'


def _timm(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("timm", encoder.config), plain_state(encoder.module)
    size = int(encoder.views.get("size", 224))
    pixels = {key: encoder.views[key] for key in ("mean", "std") if key in encoder.views}
    # With these names timm can put a classifier of any size on top, or change the number of channels.
    own = getattr(getattr(encoder.module, "module", None), "pretrained_cfg", {"classifier": "fc", "first_conv": "conv1"})
    layers = {key: own[key] for key in ("classifier", "first_conv") if key in own}
    described = {
        "architecture": name,
        "num_classes": 0,
        "num_features": getattr(encoder.module, "output_size", None),
        "pretrained_cfg": {**layers, "input_size": [3, size, size], **pixels, "num_classes": 0},
    }
    path.mkdir(exist_ok=True)
    _whole(path / "model.safetensors", lambda partial: save_file(state, partial, {"format": "pt"}))
    _whole(path / "config.json", lambda partial: partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8"))
    return _loaded(encoder, "timm", lambda: load_timm(name, path)), f'timm.create_model("local-dir:{path}", pretrained=True)'


def _detectron2(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("detectron2", encoder.config), plain_state(encoder.module)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            write_pickle(state, file)

    _whole(path, write)
    mean, std = (encoder.views.get(key, usual) for key, usual in (("mean", (0.485, 0.456, 0.406)), ("std", (0.229, 0.224, 0.225))))
    lines = config_lines(int(name.removeprefix("resnet")), mean, std)
    return "names as detectron2's own converter gives them; not loaded", f"MODEL.WEIGHTS {path}, with the configuration\n{lines}"


def _onnx(encoder: Encoder, path: Path) -> tuple[str, str]:
    def write(partial: Path) -> str:
        notes = {key: encoder.views[key] for key in ("size", "mean", "std", "space") if key in encoder.views}
        write_onnx(encoder.module, encoder.pictures(), partial, notes)
        differences = [agreement(encoder.module, lambda x: run_onnx(partial, x), encoder.pictures(number)) for number in (1, 5)]
        require_agreement(max(differences), "onnxruntime")
        return f"run by onnxruntime on batches of 1 and 5: {_in_words(max(differences))}"

    return _whole(path, write), f'onnxruntime.InferenceSession("{path}").run(["features"], {{"pictures": …}})'


WRITERS: dict[str, Callable[[Encoder, Path], tuple[str, str]]] = {
    "safetensors": _safetensors,
    "torchvision": _torchvision,
    "timm": _timm,
    "detectron2": _detectron2,
    "onnx": _onnx,
}


def _loaded(encoder: Encoder, package: str, load: Callable[[], Callable[[Tensor], Tensor]]) -> str:
    """Loads it where the package is installed, and says what came of it."""
    if (why := unavailable(package)) is not None:
        return f"not loaded: {why} here"
    difference = agreement(encoder.module, load(), encoder.pictures())
    require_agreement(difference, package)
    return f"loaded into {package}: {_in_words(difference)}"


def _in_words(difference: float) -> str:
    return "the same features" if difference == 0 else f"features differ by {difference:.0e} of the largest"


def _whole(path: Path, write: Callable[[Path], Any]) -> Any:
    """Writes beside `path`, which is replaced only when all went well."""
    results: list[Any] = []
    write_by_name(path, lambda unfinished: results.append(write(unfinished)))
    return results[0]
