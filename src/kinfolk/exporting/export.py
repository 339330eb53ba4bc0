"""Which network of another package an encoder is; what it is not is said in one sentence.

Whether what was written is what the target expects: it is loaded there, and must give the same features.

An encoder as ONNX: pictures (B, 3, H, W) as the run's views leave them in, features (B, F) out; B is free.

The forms that an encoder is written in; each is checked before it takes its name, by its target where that is installed.

Writes the encoder of a run in a form that other software reads.
"""

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

from kinfolk.errors import KinfolkError, UsageError
from kinfolk.exporting.detectron2 import config_lines, write_pickle
from kinfolk.files import write_by_name
from kinfolk.models.weights import load_encoder, plain_state, read_state

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that torchvision, timm and detectron2 share; the first two name their parameters alike."""
PACKAGES = ("torchvision", "timm", "detectron2")
ANYTHING = "safetensors and onnx take any encoder"


def network_in(package: str, config: Mapping[str, Any] | None) -> str:
    """The name `package` has for the encoder that `build_encoder` made from `config`.

    Example:
        >>> network_in("timm", {"name": "torchvision/resnet50"})
        'resnet50'
        >>> network_in("torchvision", {"name": "resnet18", "stem": "cifar", "width": 64})
        Traceback (most recent call last):
        kinfolk.errors.UsageError: the encoder can't be exported to torchvision: its stem is a 3×3 convolution without pooling, for small...
    """
    if config is None:
        raise _refused(package, "it is a module of your own")
    if "towers" in config:
        raise _refused(package, "it is two networks, each of which sees some channels of a picture")
    home, slash, name = str(config["name"]).rpartition("/")
    name = name.partition(".")[0] if home == "timm" else name  # timm's names may say which weights they began from
    if home == package:
        return name
    if slash:
        if name in RESNETS and home in PACKAGES:
            return name
        raise _refused(package, f"it is {config['name']}, which {package} names or builds otherwise")
    faults = [f"there is no {name}"] if name not in RESNETS else []
    if config.get("stem") != "imagenet":
        faults.append("its stem is a 3×3 convolution without pooling, for small pictures, in place of 7×7 with pooling (`model.stem`)")
    if config.get("width") != 64:
        faults.append(f"its first stage is {config.get('width')} channels wide in place of 64 (`model.width`)")
    if config.get("in_channels", 3) != 3:
        faults.append(f"it takes pictures of {config['in_channels']} channels in place of 3")
    if faults:
        raise _refused(package, "; ".join(faults))
    return name


def _refused(package: str, why: str) -> UsageError:
    return UsageError(f"the encoder can't be exported to {package}: {why}; {ANYTHING}")


TOLERANCE = 1e-4
"""Relative to the largest feature. What other software computes in another order agrees to about 1e-6."""


def load_torchvision(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """torchvision's network with the exported weights, and without the classifier, which the file does not have."""
    module: nn.Module = importlib.import_module("torchvision.models").get_model(name, weights=None)
    found = module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=False)
    linear = [part for part, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    missing = [key for key in found.missing_keys if key.rpartition(".")[0] != linear[-1]]
    if missing or found.unexpected_keys:
        raise KinfolkError(f"torchvision's {name} has other parameters than the export: {[*missing, *found.unexpected_keys][0]}")
    parent, _, last = linear[-1].rpartition(".")
    setattr(module.get_submodule(parent), last, nn.Identity())
    return module.eval()


def load_timm(name: str, path: Path) -> Callable[[Tensor], Tensor]:
    """timm's network with the exported weights."""
    module: Any = importlib.import_module("timm").create_model(name, num_classes=0, checkpoint_path=str(path / "model.safetensors"))
    loaded: nn.Module = module.eval()
    return loaded


def agreement(encoder: nn.Module, other: Callable[[Tensor], Tensor], pictures: Tensor) -> float:
    """The largest difference of the features of `pictures`, relative to the largest feature."""
    with torch.no_grad():
        ours, theirs = encoder(pictures), other(pictures)
    if theirs.ndim == 4:
        theirs = theirs.mean((2, 3))
    return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))


def require_agreement(difference: float, where: str) -> None:
    """Refuses an export that gives other features."""
    if not difference <= TOLERANCE:
        raise KinfolkError(f"the export gives other features in {where}: they differ by {difference:.1e} of the largest; it was not kept")


def unavailable(package: str) -> str | None:
    """Why the package can't be used here, or None."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return f"{package} is not installed" if error.name == package else f"{package} can't be imported: {error}"
    except (ImportError, RuntimeError, OSError) as error:
        return f"{package} can't be imported: {str(error).splitlines()[0]}"
    return None


NEEDS = ("onnx", "onnxscript", "onnxruntime")


def require_onnx() -> None:
    """Refuses to begin where a package is missing."""
    missing = next((why for package in NEEDS if (why := unavailable(package)) is not None), None)
    if missing is not None:
        raise UsageError(f"onnx can't be written: {missing}; install it with `pip install 'kinfolk[onnx]'`")


def write_onnx(encoder: nn.Module, pictures: Tensor, path: Path, notes: Mapping[str, Any]) -> None:
    """Writes the encoder with its weights into one file; `notes` go into its metadata, each as JSON."""
    onnx: Any = importlib.import_module("onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            encoder,
            (pictures,),
            input_names=["pictures"],
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


def run_onnx(path: Path, pictures: Tensor) -> Tensor:
    """The features that onnxruntime gives, on the processor."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"pictures": pictures.numpy()})
    return torch.from_numpy(features)


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


FORMATS = {
    "safetensors": "encoder.safetensors",
    "torchvision": "torchvision.pth",
    "timm": "timm",
    "detectron2": "detectron2.pkl",
    "onnx": "encoder.onnx",
}
"""Each with the name it is written under in `RUN/export/`; timm's is a folder."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: the file, or for timm the folder.
        format: one of `FORMATS`.
        checked: how it was checked; or why it could not be.
        use: how the target takes it.
    """

    path: Path
    format: str
    checked: str
    use: str


def export(run: str | os.PathLike[str], format: str, out: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Exported:
    """Writes the encoder of `run` for other software: weights under the names that it expects, without head and classifier.

    Args:
        run: a run folder, or a `model.safetensors` of one.
        format: "safetensors", "torchvision", "timm", "detectron2" or "onnx".
        out: the file to write, for timm the folder; by default in `RUN/export/`.
        overwrite: whether to replace what is there.
    """
    if format not in FORMATS:
        raise UsageError(f"`format` (={format!r}) must be one of {', '.join(FORMATS)}")
    path = Path(run)
    target = (path if path.is_dir() else path.parent) / "export" / FORMATS[format] if out is None else Path(out)
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; give another `out`, or overwrite it")
    if format == "onnx":
        require_onnx()
    module, meta = load_encoder(path)
    encoder = Encoder(module, meta.get("views") or {})
    if format in PACKAGES:
        network_in(format, encoder.config)  # refused before anything is written
    target.parent.mkdir(parents=True, exist_ok=True)
    checked, use = WRITERS[format](encoder, target)
    return Exported(target, format, checked, use)
