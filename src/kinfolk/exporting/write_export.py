"""Writes the encoder of a run for other software: safetensors, torchvision, timm, detectron2 and
ONNX.

Each file is checked before it replaces an older one: the target package loads it, if it is
installed, and must return the same features. The ONNX model takes normalised images (B, 3, H, W),
as the run's views produce them, and returns features (B, F); B is free. The file for detectron2 is
a pickle of arrays under the names of detectron2's own converter. It is only written, never read,
because reading a pickle can run code.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kinfolk.errors import KinfolkError, UsageError, install_hint
from kinfolk.files import write_by_name
from kinfolk.models.weights import WEIGHTS, load_encoder, meta_of, plain_state, read_state
from kinfolk.seeding import generator

FORMATS = {
    "safetensors": "encoder.safetensors",
    "torchvision": "torchvision.pth",
    "timm": "timm",
    "detectron2": "detectron2.pkl",
    "onnx": "encoder.onnx",
}
"""Formats with their default names in `RUN/export/`; timm's is a folder."""


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Args:
        path: the file, or for timm the folder.
        format: one of `FORMATS`.
        checked: how it was checked, or why it could not be.
        use: code or configuration that loads it.
    """

    path: Path
    format: str
    checked: str
    use: str


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
        format: "safetensors", "torchvision", "timm", "detectron2" or "onnx".
        out: the file to write, for timm the folder; by default in `RUN/export/`.
        overwrite: replace an existing export.
    """
    if format == "open_clip":
        raise UsageError(
            "there is no export for open_clip: its towers have other layers than those of a run."
            " Train in open_clip's own loop with kinfolk.integrations.open_clip; the result is an"
            " open_clip model already"
        )
    if format not in FORMATS:
        raise UsageError(f"`format` (={format!r}) must be one of {', '.join(FORMATS)}")
    path = Path(run)
    target = (
        (path if path.is_dir() else path.parent) / "export" / FORMATS[format]
        if out is None
        else Path(out)
    )
    if target.exists() and not overwrite:
        raise UsageError(
            f"{target} exists; choose another `out` (--out), or pass `overwrite=True` (--overwrite)"
            " to replace it"
        )
    weights = path / WEIGHTS if path.is_dir() else path
    if weights.is_file() and str(meta_of(weights).get("method")).partition("+")[0] == "pairs":
        raise UsageError(
            f"{path} was trained on texts, and exports are of image encoders; use `kf.load`, or,"
            " trained from st/NAME, its folder sentence-transformer"
        )
    if format == "onnx":
        require_onnx()
    module, meta = load_encoder(path)
    encoder = Encoder(module, meta.get("views") or {})
    if format in PACKAGES:
        network_in(format, encoder.config)  # refused before anything is written
    _require_finite(encoder, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    checked, use = WRITERS[format](encoder, target)
    return Exported(target, format, checked, use)


@dataclass(frozen=True)
class Encoder:
    """An encoder with the size and normalisation of its input images."""

    module: nn.Module
    views: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any] | None:
        config = getattr(self.module, "config", None)
        return config if isinstance(config, dict) else None

    def example_images(self, number: int = 2) -> Tensor:
        """Random images of the right size, to compare features on."""
        size = int(self.views.get("size", 32))
        return torch.randn(number, 3, size, size, generator=generator(0, "export"))


@torch.no_grad()
def _require_finite(encoder: Encoder, path: Path) -> None:
    """Refuses an encoder of a training that diverged: its weights may be finite and its features
    not."""
    parts = list(plain_state(encoder.module).values())
    if "size" in encoder.views:  # the size of an image that the encoder accepts is known
        parts.append(encoder.module(encoder.example_images()))
    if not all(bool(part.isfinite().all()) for part in parts if part.is_floating_point()):
        raise KinfolkError(
            f"the encoder of {path} gives features that are not finite, so it is not exported; the "
            "training has diverged, so train again "
            "with a lower learning rate"
        )


def _safetensors(encoder: Encoder, path: Path) -> tuple[str, str]:
    state = plain_state(encoder.module)
    _write_checked(
        path,
        lambda partial: save_file(
            state, partial, {"format": "pt", "views": json.dumps(dict(encoder.views))}
        ),
    )
    again = read_state(path)
    if again.keys() != state.keys() or not all(
        torch.equal(again[name], state[name]) for name in state
    ):
        raise KinfolkError(f"{path} does not hold what was written; the disk may be full or broken")
    return "read again and equal", f'safetensors.torch.load_file("{path}")'


def _torchvision(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("torchvision", encoder.config), plain_state(encoder.module)

    def write(partial: Path) -> str:
        torch.save(state, partial)
        return _loaded(encoder, "torchvision", lambda: load_torchvision(name, partial))

    return _write_checked(path, write), (
        f"model = torchvision.models.{name}()\n"
        f"model.{_classifier(name)} = torch.nn.Identity()  # the file has no classifier; add your"
        " own after loading\n"
        f'model.load_state_dict(torch.load("{path}"))'
    )


def _classifier(name: str) -> str:
    """The attribute of torchvision's network that holds its last linear layer, as it is written in
    Python."""
    if name in RESNETS:
        return "fc"
    module: nn.Module = importlib.import_module("torchvision.models").get_model(name, weights=None)
    parts = [part for part, layer in module.named_modules() if isinstance(layer, nn.Linear)][
        -1
    ].split(".")
    return str(parts[0]) + "".join(
        f"[{part}]" if part.isdecimal() else f".{part}" for part in parts[1:]
    )


def _timm(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("timm", encoder.config), plain_state(encoder.module)
    size = int(encoder.views.get("size", 224))
    pixels = {key: encoder.views[key] for key in ("mean", "std") if key in encoder.views}
    # With these names timm can put a classifier of any size on top, or change the number of
    # channels.
    own = getattr(
        getattr(encoder.module, "module", None),
        "pretrained_cfg",
        {"classifier": "fc", "first_conv": "conv1"},
    )
    layers = {key: own[key] for key in ("classifier", "first_conv") if key in own}
    described = {
        "architecture": name,
        "num_classes": 0,
        "num_features": getattr(encoder.module, "output_size", None),
        "pretrained_cfg": {**layers, "input_size": [3, size, size], **pixels, "num_classes": 0},
    }
    path.mkdir(exist_ok=True)
    _write_checked(
        path / "model.safetensors", lambda partial: save_file(state, partial, {"format": "pt"})
    )
    _write_checked(
        path / "config.json",
        lambda partial: partial.write_text(
            json.dumps(described, indent=2) + "\n", encoding="utf-8"
        ),
    )
    return (
        _loaded(encoder, "timm", lambda: load_timm(name, path)),
        f'timm.create_model("local-dir:{path}", pretrained=True)',
    )


def _detectron2(encoder: Encoder, path: Path) -> tuple[str, str]:
    name, state = network_in("detectron2", encoder.config), plain_state(encoder.module)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            write_pickle(state, file)

    _write_checked(path, write)
    mean, std = (
        encoder.views.get(key, default)
        for key, default in (("mean", (0.485, 0.456, 0.406)), ("std", (0.229, 0.224, 0.225)))
    )
    lines = config_lines(int(name.removeprefix("resnet")), mean, std)
    return (
        "names as detectron2's own converter gives them; not loaded",
        f"MODEL.WEIGHTS {path}, with the configuration\n{lines}",
    )


def _onnx(encoder: Encoder, path: Path) -> tuple[str, str]:
    def write(partial: Path) -> str:
        notes = {
            key: encoder.views[key]
            for key in ("size", "mean", "std", "space")
            if key in encoder.views
        }
        write_onnx(encoder.module, encoder.example_images(), partial, notes)
        differences = [
            agreement(
                encoder.module, lambda x: run_onnx(partial, x), encoder.example_images(number)
            )
            for number in (1, 5)
        ]
        require_agreement(max(differences), "onnxruntime")
        return f"run by onnxruntime on batches of 1 and 5: {_in_words(max(differences))}"

    return (
        _write_checked(path, write),
        f'onnxruntime.InferenceSession("{path}").run(["features"], {{"images": …}})',
    )


WRITERS: dict[str, Callable[[Encoder, Path], tuple[str, str]]] = {
    "safetensors": _safetensors,
    "torchvision": _torchvision,
    "timm": _timm,
    "detectron2": _detectron2,
    "onnx": _onnx,
}


def _loaded(encoder: Encoder, package: str, load: Callable[[], Callable[[Tensor], Tensor]]) -> str:
    """Loads the export if the package is installed, and returns the result in words."""
    if (why := unavailable(package)) is not None:
        return f"not loaded: {why} here"
    difference = agreement(encoder.module, load(), encoder.example_images())
    require_agreement(difference, package)
    return f"loaded into {package}: {_in_words(difference)}"


def _in_words(difference: float) -> str:
    return (
        "the same features"
        if difference == 0
        else f"features differ by {difference:.0e} of the largest"
    )


def _write_checked(path: Path, write: Callable[[Path], Any]) -> Any:
    """Writes and checks a temporary file, which replaces `path` only if there was no error; returns
    what `write` returned."""
    results: list[Any] = []
    write_by_name(path, lambda unfinished: results.append(write(unfinished)))
    return results[0]


RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that torchvision, timm and detectron2 share; the first two use the same parameter
names."""
PACKAGES = ("torchvision", "timm", "detectron2")
ANYTHING = "safetensors and onnx take any encoder"


def network_in(package: str, config: Mapping[str, Any] | None) -> str:
    """The name in `package` of the encoder that `build_encoder` made from `config`; an error if
    there is none.

    Example:
        >>> network_in("timm", {"name": "torchvision/resnet50"})
        'resnet50'
        >>> network_in("torchvision", {"name": "resnet18", "stem": "cifar", "width": 64})
        Traceback (most recent call last):
        kinfolk.errors.UsageError: the encoder can't be exported to torchvision: its stem is a 3×3
        convolution without pooling, for small...
    """
    if config is None:
        raise _refused(package, "it is a module of your own")
    if "towers" in config:
        raise _refused(package, "it is two networks, each for some channels of an image")
    home, slash, name = str(config["name"]).rpartition("/")
    # timm's names may end in a tag of the pretrained weights
    name = name.partition(".")[0] if home == "timm" else name
    if home == package:
        return name
    if slash:
        if name in RESNETS and home in PACKAGES:
            return name
        raise _refused(
            package, f"it is {config['name']}, which {package} names or builds differently"
        )
    faults = [f"there is no {name}"] if name not in RESNETS else []
    if config.get("stem") != "imagenet":
        faults.append(
            "its stem is a 3×3 convolution without pooling, for small images, instead of 7×7 with"
            " pooling (`model.stem`)"
        )
    if config.get("width") != 64:
        faults.append(
            f"its first stage has {config.get('width')} channels instead of 64 (`model.width`)"
        )
    if config.get("in_channels", 3) != 3:
        faults.append(f"it takes images of {config['in_channels']} channels instead of 3")
    if faults:
        raise _refused(package, "; ".join(faults))
    return name


def _refused(package: str, why: str) -> UsageError:
    return UsageError(f"the encoder can't be exported to {package}: {why}; {ANYTHING}")


TOLERANCE = 1e-4
"""Relative to the largest feature. A different order of operations causes differences of about
1e-6."""


def load_torchvision(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """torchvision's network with the exported weights and without the classifier, which the file
    does not contain."""
    module: nn.Module = importlib.import_module("torchvision.models").get_model(name, weights=None)
    found = module.load_state_dict(
        torch.load(path, map_location="cpu", weights_only=True), strict=False
    )
    linear = [part for part, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    missing = [key for key in found.missing_keys if key.rpartition(".")[0] != linear[-1]]
    if missing or found.unexpected_keys:
        raise KinfolkError(
            f"torchvision's {name} has other parameters than the export:"
            f" {[*missing, *found.unexpected_keys][0]}"
        )
    parent, _, last = linear[-1].rpartition(".")
    setattr(module.get_submodule(parent), last, nn.Identity())
    return module.eval()


def load_timm(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """timm's network with the exported weights."""
    module: Any = importlib.import_module("timm").create_model(
        name, num_classes=0, checkpoint_path=str(path / "model.safetensors")
    )
    loaded: nn.Module = module.eval()
    return loaded


def agreement(encoder: nn.Module, other: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The largest difference of the features of `images`, relative to the largest feature."""
    with torch.no_grad():
        ours, theirs = encoder(images), other(images)
    if theirs.ndim == 4:
        theirs = theirs.mean((2, 3))
    return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))


def require_agreement(difference: float, where: str) -> None:
    """Refuses an export that returns different features."""
    if not difference <= TOLERANCE:
        raise KinfolkError(
            f"the export gives other features in {where}: they differ by {difference:.1e} of the"
            " largest; it was not kept"
        )


def unavailable(package: str) -> str | None:
    """The reason why the package can't be used here, or None."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return (
            f"{package} is not installed"
            if error.name == package
            else f"{package} can't be imported: {error}"
        )
    except (ImportError, RuntimeError, OSError) as error:
        return f"{package} can't be imported: {str(error).splitlines()[0]}"
    return None


NEEDS = ("onnx", "onnxscript", "onnxruntime")


def require_onnx() -> None:
    """Refuses to start if a package is missing."""
    missing = next((why for package in NEEDS if (why := unavailable(package)) is not None), None)
    if missing is not None:
        raise UsageError(
            f"onnx can't be written: {missing}; {install_hint(' '.join(NEEDS), 'onnx')}"
        )


def write_onnx(encoder: nn.Module, images: Tensor, path: Path, notes: Mapping[str, Any]) -> None:
    """Writes the encoder with its weights into one file; `notes` go into its metadata, each as
    JSON."""
    onnx: Any = importlib.import_module("onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
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
    """The features that onnxruntime computes on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"images": images.numpy()})
    return torch.from_numpy(features)


_RENAMED = (
    (r"^(?!layer)", "stem."),
    (r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}"),
    (r"\bbn(\d)", r"conv\1.norm"),
    (r"\bdownsample\.0", "shortcut"),
    (r"\bdownsample\.1", "shortcut.norm"),
)


def detectron2_name(name: str) -> str:
    """detectron2's name of a parameter of torchvision's ResNet.

    Example:
        >>> detectron2_name("bn1.weight"), detectron2_name("layer2.0.bn3.bias")
        ('stem.conv1.norm.weight', 'res3.0.conv3.norm.bias')
        >>> detectron2_name("layer1.0.downsample.1.running_mean")
        'res2.0.shortcut.norm.running_mean'
    """
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def write_pickle(state: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Writes the arrays as `model`, with `__author__` and the flag that makes detectron2 match
    names from their ends."""
    arrays = {detectron2_name(name): value.detach().cpu().numpy() for name, value in state.items()}
    _PlainPickler(file, protocol=4).dump(
        {"model": arrays, "__author__": "kinfolk", "matching_heuristics": True}
    )


def config_lines(depth: int, mean: Sequence[float], std: Sequence[float]) -> str:
    """The detectron2 configuration for a network trained with this mean and standard deviation of
    RGB values in [0, 1]."""
    pixels = [", ".join(f"{255 * value:.3f}" for value in values) for values in (mean, std)]
    narrow = "\n    RES2_OUT_CHANNELS: 64" if depth < 50 else ""
    return (
        f"MODEL:\n  PIXEL_MEAN: [{pixels[0]}]\n  PIXEL_STD: [{pixels[1]}]\n"
        f"  RESNETS:\n    DEPTH: {depth}\n    STRIDE_IN_1X1: False{narrow}\nINPUT:\n  FORMAT: RGB"
    )


class _PlainPickler(pickle.Pickler):
    """Pickles arrays by shape, type and bytes, which all versions of numpy can read; numpy's own
    format names modules that some lack."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            return np.ndarray, (
                obj.shape,
                obj.dtype.str,
                bytearray(np.ascontiguousarray(obj).tobytes()),
            )
        return NotImplemented
