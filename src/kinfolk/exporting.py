"""Writes the encoder of a run for other software. The target package loads each file, if it is
installed, and must return the same features."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kinfolk.errors import KinfolkError, UsageError, import_optional, require_choice
from kinfolk.files import first_line, write_by_name
from kinfolk.models.encoders import build_encoder
from kinfolk.models.weights import (
    WEIGHTS,
    load_encoder,
    load_weights,
    meta_of,
    plain_state,
    read_state,
)
from kinfolk.seeding import generator

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that torchvision and timm share."""
PACKAGES = ("torchvision", "timm")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
"""Relative to the largest feature; rounding alone causes about 1e-6."""


@dataclass(frozen=True)
class Exported:
    """The file, or for timm the folder; how it was checked; code that loads it."""

    path: Path
    format: str
    checked: str
    use: str


@dataclass(frozen=True)
class ExportedEncoder:
    module: nn.Module
    views: Mapping[str, Any]

    def example_images(self, number: int = 2) -> Tensor:
        size = int(self.views.get("size", 32))
        return torch.randn(number, 3, size, size, generator=generator(0, "export"))

    def name_in(self, package: str) -> str:
        config = getattr(self.module, "config", None)
        return network_in(package, config if isinstance(config, dict) else None)

    @torch.no_grad()
    def check(self, where: str, other: Callable[[Tensor], Tensor], *sizes: int) -> str:
        """How far the features of `other` differ; an error if it is more than rounding."""
        found = [0.0]
        for images in map(self.example_images, sizes or (2,)):
            ours, theirs = self.module(images), other(images)
            found.append(float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12)))
        difference = max(found)
        if not difference <= TOLERANCE:
            raise KinfolkError(
                f"the export returns different features in {where}: they differ by"
                f" {difference:.1e} of the largest; it was not kept"
            )
        same = difference == 0
        return (
            "the same features" if same else f"features differ by {difference:.0e} of the largest"
        )

    def check_in(self, package: str, load: Callable[[], Callable[[Tensor], Tensor]]) -> str:
        if (why := unavailable(package)) is not None:
            return f"not loaded: {why} here"
        return f"loaded into {package}: {self.check(package, load())}"


def export(
    run: str | os.PathLike[str],
    format: str,
    out: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> Exported:
    """Writes the encoder of `run` for other software, under the parameter names it expects, without
    projection head and classifier.

    Args:
        run: a run folder, or the `model.safetensors` of one.
        format: "safetensors", "torchvision", "timm" or "onnx".
        out: the file to write, for timm the folder; by default in `RUN/export/`.
    """
    if format == "open_clip":
        raise UsageError(
            "there is no export for open_clip, whose towers have other layers; train in its own"
            " loop with kinfolk.integrations.open_clip"
        )
    require_choice("format", format, list(FORMATS))
    default, write = FORMATS[format]
    path = Path(run)
    folder, weights = (path, path / WEIGHTS) if path.is_dir() else (path.parent, path)
    target = folder / "export" / default if out is None else Path(out)
    if format == "safetensors" and target.suffix != ".safetensors":
        raise UsageError(f"`out` (={target}) must end in .safetensors")
    if target.exists() and not overwrite:
        raise UsageError(
            f"{target} exists; choose another `out` (--out), or pass `overwrite=True` (--overwrite)"
            " to replace it"
        )
    if weights.is_file() and str(meta_of(weights).get("method")).partition("+")[0] == "pairs":
        raise UsageError(
            f"{path} was trained on texts, and exports are of image encoders; use `kf.load`, or"
            " the folder sentence-transformer that a run with --model st/NAME has"
        )
    if format == "onnx":
        for package in ONNX_PACKAGES:
            import_optional(package, " ".join(ONNX_PACKAGES), "onnx", "the format onnx")
    module, meta = load_encoder(path)
    encoder = ExportedEncoder(module, meta.get("views") or {})
    if format in PACKAGES:
        encoder.name_in(format)  # refused before anything is written
    _require_finite(encoder, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    checked, use = write(encoder, target)
    return Exported(target, format, checked, use)


@torch.no_grad()
def _require_finite(encoder: ExportedEncoder, path: Path) -> None:
    """Finite weights may give infinite features."""
    parts = list(plain_state(encoder.module).values())
    if "size" in encoder.views:  # otherwise the size of its images is unknown
        parts.append(encoder.module(encoder.example_images()))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise KinfolkError(
            f"the encoder of {path} gives features that are not finite, so it is not exported; the"
            " training has diverged, so train again with a lower learning rate"
        )


# One writer for each format; each returns how the file was checked, and code that loads it.


def _safetensors(encoder: ExportedEncoder, path: Path) -> tuple[str, str]:
    state = plain_state(encoder.module)
    metadata = {"format": "pt", "views": json.dumps(dict(encoder.views))}

    def write(unfinished: Path) -> None:
        save_file(state, unfinished, metadata)
        again = read_state(unfinished)
        if again.keys() != state.keys() or not all(torch.equal(again[k], state[k]) for k in state):
            raise KinfolkError(f"{path} cannot be read again as written; the disk may be broken")

    write_by_name(path, write)
    return "read again and equal", f'safetensors.torch.load_file("{path}")'


def _torchvision(encoder: ExportedEncoder, path: Path) -> tuple[str, str]:
    name, state = encoder.name_in("torchvision"), plain_state(encoder.module)

    def write(unfinished: Path) -> str:
        torch.save(state, unfinished)
        return encoder.check_in("torchvision", lambda: load_torchvision(name, unfinished))

    checked = write_by_name(path, write)
    layer = "fc" if name in RESNETS else "CLASSIFIER"  # its last linear layer
    return checked, (
        f"model = torchvision.models.{name}()\n"
        f"model.{layer} = torch.nn.Identity()  # the file has no classifier; add one after"
        " loading\n"
        f'model.load_state_dict(torch.load("{path}"))'
    )


def _timm(encoder: ExportedEncoder, path: Path) -> tuple[str, str]:
    name, state = encoder.name_in("timm"), plain_state(encoder.module)
    size = int(encoder.views.get("size", 224))
    # by these names timm can add a classifier, or change the number of channels
    resnet = {"classifier": "fc", "first_conv": "conv1"}
    layers = getattr(getattr(encoder.module, "module", None), "pretrained_cfg", resnet)
    views = encoder.views
    config = {
        "architecture": name,
        "num_classes": 0,
        "num_features": getattr(encoder.module, "output_size", None),
        "pretrained_cfg": {
            **{key: layers[key] for key in resnet if key in layers},
            **{key: views[key] for key in ("mean", "std") if key in views},
            "input_size": [3, size, size],
            "num_classes": 0,
        },
    }
    path.mkdir(exist_ok=True)
    write_by_name(path / "model.safetensors", lambda file: save_file(state, file, {"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    write_by_name(path / "config.json", lambda file: file.write_text(text, encoding="utf-8"))
    checked = encoder.check_in("timm", lambda: load_timm(name, path))
    return checked, f'timm.create_model("local-dir:{path}", pretrained=True)'


def _onnx(encoder: ExportedEncoder, path: Path) -> tuple[str, str]:
    views = encoder.views
    notes = {key: views[key] for key in ("size", "mean", "std", "space") if key in views}

    def write(unfinished: Path) -> str:
        write_onnx(encoder.module, encoder.example_images(), unfinished, notes)
        words = encoder.check("onnxruntime", lambda x: run_onnx(unfinished, x), 1, 5)
        return f"run by onnxruntime on batches of 1 and 5: {words}"

    use = f'onnxruntime.InferenceSession("{path}").run(["features"], {{"images": …}})'
    return write_by_name(path, write), use


FORMATS: dict[str, tuple[str, Callable[[ExportedEncoder, Path], tuple[str, str]]]] = {
    "safetensors": ("encoder.safetensors", _safetensors),
    "torchvision": ("torchvision.pth", _torchvision),
    "timm": ("timm", _timm),
    "onnx": ("encoder.onnx", _onnx),
}
"""The default names in `RUN/export/`, a folder for timm, and the writers."""


def unavailable(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return f"{package} is not installed"
        return f"{package} can't be imported: {first_line(error)}"
    return None


def network_in(package: str, config: Mapping[str, Any] | None) -> str:
    """The name in `package` of the encoder that `build_encoder` made from `config`; an error if
    there is none."""
    found = {"name": "", "stem": None, "width": None, "in_channels": 3, **(config or {})}
    home, _, name = str(found["name"]).rpartition("/")
    if home == "timm":  # its names may end in a tag of the pretrained weights
        name = name.partition(".")[0]
    faults = []
    if not name:
        faults = ["it is a module of your own, or two networks"]
    elif home and home != package and not (name in RESNETS and home in PACKAGES):
        faults = [f"it is {found['name']}, which {package} names or builds differently"]
    elif not home:
        faults = [f"there is no {name}"] if name not in RESNETS else []
        for key, right in (("stem", "imagenet"), ("width", 64), ("in_channels", 3)):
            if found[key] != right:
                faults.append(f"its `{key}` is {found[key]} instead of {right}")
    if faults:
        raise UsageError(
            f"the encoder can't be exported to {package}: {'; '.join(faults)}; safetensors and onnx"
            " take any encoder"
        )
    return name


def load_torchvision(name: str, path: Path) -> nn.Module:
    encoder = build_encoder(f"torchvision/{name}")
    load_weights(encoder, path)
    return encoder.eval()


def load_timm(name: str, path: Path) -> nn.Module:
    module: nn.Module = importlib.import_module("timm").create_model(
        name, num_classes=0, checkpoint_path=str(path / "model.safetensors")
    )
    return module.eval()


def write_onnx(encoder: nn.Module, images: Tensor, path: Path, notes: Mapping[str, Any]) -> None:
    """`notes` go into the metadata of the file, each as JSON."""
    onnx: Any = importlib.import_module("onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(
            encoder,
            (images,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for key, value in notes.items():
        model.metadata_props.append(onnx.StringStringEntryProto(key=key, value=json.dumps(value)))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def run_onnx(path: Path, images: Tensor) -> Tensor:
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"images": images.numpy()})
    return torch.from_numpy(features)
