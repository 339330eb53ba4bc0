"""Weights of another program as a run folder, so that every command for runs takes them. Only
tensors are read from the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kinfolk.data.open_source import typical_side
from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import write_text
from kinfolk.models import build_encoder
from kinfolk.models.weights import load_state, plain_state, read_state, save_encoder
from kinfolk.training.build import build_views
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import LARGEST, SMALLEST, with_absolute_paths
from kinfolk.training.load_run import FOREIGN, open_run
from kinfolk.training.run_folder import Run, open_data, read_data
from kinfolk.training.settings import digest_of, result_settings, settings_digest

DEPTHS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (1, 1, 1, 1)): "resnet10",
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
"""ResNets by whether their blocks are bottlenecks, and the number of blocks in each stage."""
CLASSIFIERS = ("fc.", "linear.", "classifier.", "head.")
"""Prefixes of a classifier or a projection on top of the encoder, which is left out."""
COPIES = ("_k.", "momentum", "ema", "teacher", "target", "key")
"""Parts of the names of a second, slower copy of an encoder. The other one is taken."""
ANCHOR = "layer1.0.conv1.weight"


@dataclass(frozen=True)
class Network:
    """An encoder, the arguments of `build_encoder` that made it, and the number of tensors that
    were used and left out."""

    encoder: nn.Module
    arguments: dict[str, Any]
    used: int
    left_out: int

    def describe(self) -> str:
        name, rest = self.arguments["name"], self.arguments
        how = f", {rest['stem']} stem, width {rest['width']}" if "stem" in rest else ""
        return f"{name}{how}; {self.used} tensors, {self.left_out} others left out"


def find_network(state: Mapping[str, Tensor], source: str, model: str | None = None) -> Network:
    """The encoder of a state dict, without classifier, projection head and momentum copy. A ResNet
    has the names of torchvision and timm, after any prefix; of another network give the `model` for
    `build_encoder`."""
    named = {name.replace(".shortcut.", ".downsample."): value for name, value in state.items()}
    prefix = _prefix(named) if model is None or "resnet" in model else ""
    if prefix is None:
        first = ", ".join(short(name) for name in list(state)[:3])
        raise KinfolkError(
            f"{source} has no ResNet under the names of torchvision or timm ({ANCHOR}); its first"
            f" names are {first}; name its network with --model, as in --model timm/NAME"
        )
    inner = {name[len(prefix) :]: value for name, value in named.items() if name.startswith(prefix)}
    arguments = {"name": model} if model is not None else _resnet(inner, source)
    encoder = build_encoder(**arguments)
    own = plain_state(encoder).keys()
    used = {
        key: value for key, value in inner.items() if key in own or not key.startswith(CLASSIFIERS)
    }
    load_state(encoder, used, source=source)
    return Network(encoder, arguments, len(used), len(state) - len(used))


def _prefix(state: Mapping[str, Tensor]) -> str | None:
    """What the names of the encoder begin with; None if there is no ResNet."""
    found = [name.removesuffix(ANCHOR) for name in state if name.endswith(ANCHOR)]
    found = [prefix for prefix in found if not prefix or prefix.endswith(".")]
    own = [prefix for prefix in found if not any(word in prefix for word in COPIES)]
    return min(own or found, key=len, default=None)


def _resnet(state: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """The arguments of `build_encoder` for a ResNet with these tensors."""
    places = [re.match(r"layer([1-4])\.(\d+)\.", name) for name in state]
    blocks = {(int(place[1]), int(place[2])) for place in places if place is not None}
    depths = tuple(sum(stage == each for stage, _ in blocks) for each in (1, 2, 3, 4))
    bottleneck = "layer1.0.conv3.weight" in state
    first = state.get("conv1.weight")
    name = DEPTHS.get((bottleneck, depths))
    if name is None:
        kind = "bottleneck" if bottleneck else "basic"
        raise KinfolkError(
            f"{source} is a ResNet of {depths} {kind} blocks, which is none of "
            f"{', '.join(DEPTHS.values())}; name its network with --model, as in --model timm/NAME"
        )
    if first is None or first.ndim != 4 or first.shape[1] != 3 or first.shape[-1] not in (3, 7):
        size = "missing" if first is None else f"of the shape {tuple(first.shape)}"
        raise KinfolkError(
            f"the first convolution of {source} (conv1.weight) is {size}, and must be 3×3 or 7×7 on"
            " three channels; name its network with --model, as in --model timm/NAME"
        )
    stem = "imagenet" if first.shape[-1] == 7 else "cifar"
    return {"name": name, "stem": stem, "width": int(state[ANCHOR].shape[0])}


def import_weights(
    file: Path,
    out: Path | None = None,
    *,
    data: str | None = None,
    labels_from_folders: bool = False,
    like: Path | None = None,
    name: str | None = None,
    model: str | None = None,
    image_size: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Path, Network]:
    """Writes the encoder in `file` as a run folder and returns the folder, with what was found.

    Args:
        file: a .safetensors file, or a .pt or .pth file of tensors.
        out: the folder; None: next to the file, called NAME-eval.
        data, labels_from_folders: the samples that it is measured on; None: those of `like`.
        like: a run folder whose data, size of views and normalisation are used.
        name: the row in `kinfolk compare`; None: the name of the file.
        image_size: None: that of `like`, or of the images up to 224.
        seed: of the training that made the weights.
    """
    out = file.with_name(f"{file.stem}-eval") if out is None else out
    if data is None and like is None:
        raise UsageError(
            f"{file} names no data to measure it on; give --data, or --like RUN for a run's"
        )
    network = find_network(read_state(file), str(file), model)
    digest = digest_of(file)
    _require_same_weights(out, file, digest)
    config = _config(file, network, data, labels_from_folders, like, name, image_size, seed)
    run = Run(out)
    source = open_data(None, config, run)
    if config.views.size is None:
        side = typical_side(source) or LARGEST
        size = min(max(side, SMALLEST), LARGEST)
        kept = config.data.image_size or min(math.ceil(size * 8 / 7), side)
        config = config.with_settings({"views.size": size, "data.image_size": kept})
    out.mkdir(parents=True, exist_ok=True)
    read_data(source, config, run, several=False, progress=progress).samples.to_parquet(run.samples)
    about = {"name": config.method, "file": str(file.resolve()), "digest": digest}
    write_text(out / FOREIGN, json.dumps(about, indent=2) + "\n")
    meta = {"method": config.method, "seed": seed, "views": build_views(config).config()}
    meta["settings"] = settings_digest(result_settings(config))
    save_encoder(network.encoder, out, meta)
    write_text(run.config, config.to_yaml())
    return out, network


def _config(
    file: Path,
    network: Network,
    data: str | None,
    labels_from_folders: bool,
    like: Path | None,
    name: str | None,
    image_size: int | None,
    seed: int,
) -> TrainConfig:
    """Data, views and the network. The settings of the training are unknown."""
    given: dict[str, Any] = {"method": _row_name(name or file.stem), "seed": seed}
    given |= {f"model.{key}": value for key, value in network.arguments.items()}
    given["model.init"] = str(file.resolve())
    config = TrainConfig().with_settings({"views.preset": "simclr"})
    if like is not None:
        run = open_run(like).config
        size = run.views.size if image_size is None else image_size
        views = run.views.model_copy(update={"size": size})
        config = config.model_copy(update={"data": run.data, "views": views})
    elif image_size is not None:
        given |= {"views.size": image_size, "data.image_size": math.ceil(image_size * 8 / 7)}
    if data is not None:
        given |= {"data.source": data, "data.labels_from_folders": labels_from_folders}
    return with_absolute_paths(config.with_settings({**given, "data.streaming": False}))


def _row_name(name: str) -> str:
    """The name of a row that no method of this library has."""
    from kinfolk.frameworks.registry import parse

    try:
        parse(name)
    except ValueError:
        return name
    return f"{name} (weights)"


def _require_same_weights(out: Path, file: Path, digest: str) -> None:
    """Refuses a folder with other things, or with results of other weights."""
    if not out.exists():
        return
    mark = out / FOREIGN
    if not out.is_dir() or (any(out.iterdir()) and not mark.is_file()):
        raise UsageError(f"{out} exists and holds other things; give another folder with --out")
    if not mark.is_file():
        return
    try:
        known = json.loads(mark.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if known != digest:
        raise UsageError(f"{out} holds the results of other weights than {file}; give --out")
