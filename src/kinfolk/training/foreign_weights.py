"""Weights of another program as a run folder, so that every command for runs takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kinfolk.errors import KinfolkError, UsageError, short
from kinfolk.files import file_digest, write_text
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.models import build_encoder
from kinfolk.models.encoders import ENCODERS, BasicBlock, Bottleneck
from kinfolk.models.weights import load_state, plain_state, read_state, save_encoder
from kinfolk.training.build import build_views
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import fit_size, with_absolute_paths
from kinfolk.training.load_run import FOREIGN, open_run
from kinfolk.training.run_folder import Run, open_data, read_data
from kinfolk.training.settings import settings_digest

CLASSIFIERS = ("fc.", "linear.", "classifier.", "head.")
"""Prefixes of a classifier or projection, which is left out."""
COPIES = ("_k.", "momentum", "ema", "teacher", "target", "key")
"""Parts of the names of a second, slower copy of an encoder, which is not used."""
ANCHOR = "layer1.0.conv1.weight"
NAME_IT = "name its network with --model, as in --model timm/NAME"


@dataclass(frozen=True)
class Network:
    encoder: nn.Module
    arguments: dict[str, Any]
    used: int
    left_out: int

    def describe(self) -> str:
        name, rest = self.arguments["name"], self.arguments
        how = f", {rest['stem']} stem, width {rest['width']}" if "stem" in rest else ""
        return f"{name}{how}; {self.used} tensors, {self.left_out} others left out"


def find_network(state: Mapping[str, Tensor], source: str, model: str | None = None) -> Network:
    """The encoder of a state dict, without classifier, projection head and momentum copy: a ResNet
    with the names of torchvision and timm after any prefix, or the `model` of `build_encoder`."""
    named = {name.replace(".shortcut.", ".downsample."): value for name, value in state.items()}
    prefix = _prefix(named) if model is None or "resnet" in model else ""
    if prefix is None:
        first = ", ".join(short(name) for name in list(state)[:3])
        raise KinfolkError(
            f"{source} has no ResNet under the names of torchvision or timm ({ANCHOR}); its first"
            f" names are {first}; {NAME_IT}"
        )
    inner = {name[len(prefix) :]: value for name, value in named.items() if name.startswith(prefix)}
    arguments = {"name": model} if model is not None else _resnet(inner, source)
    encoder = build_encoder(**arguments)
    names = plain_state(encoder).keys()
    used = {
        key: value
        for key, value in inner.items()
        if key in names or not key.startswith(CLASSIFIERS)
    }
    load_state(encoder, used, source=source)
    return Network(encoder, arguments, len(used), len(state) - len(used))


def _prefix(state: Mapping[str, Tensor]) -> str | None:
    found = [name.removesuffix(ANCHOR) for name in state if name.endswith(ANCHOR)]
    found = [prefix for prefix in found if not prefix or prefix.endswith(".")]
    originals = [prefix for prefix in found if not any(word in prefix for word in COPIES)]
    return min(originals or found, key=len, default=None)


def _resnet(state: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    places = [re.match(r"layer([1-4])\.(\d+)\.", name) for name in state]
    blocks = {(int(place[1]), int(place[2])) for place in places if place is not None}
    depths = tuple(sum(stage == each for stage, _ in blocks) for each in (1, 2, 3, 4))
    bottleneck = "layer1.0.conv3.weight" in state
    first, sought = state.get("conv1.weight"), (Bottleneck if bottleneck else BasicBlock, depths)
    name = next((each for each, make in ENCODERS.items() if make.args == sought), None)
    if name is None:
        kind = "bottleneck" if bottleneck else "basic"
        raise KinfolkError(
            f"{source} is a ResNet of {depths} {kind} blocks, which is none of"
            f" {', '.join(ENCODERS)}; {NAME_IT}"
        )
    if first is None or first.shape[1:] not in ((3, 3, 3), (3, 7, 7)):
        raise KinfolkError(
            f"{source} has no first convolution (conv1.weight) of 3×3 or 7×7 on three channels;"
            f" {NAME_IT}"
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
    seed: int = 0,
    progress: bool = False,
) -> tuple[Path, Network]:
    """Writes the encoder in `file` as the run folder `out` (None: NAME-eval, next to the file), to
    be measured on `data` or on the data of the run `like`, whose size of views and normalisation
    are used. `seed`: of the training that made the weights."""
    out = file.with_name(f"{file.stem}-eval") if out is None else out
    if data is None and like is None:
        raise UsageError(
            f"{file} names no data to measure it on; give --data, or --like RUN for a run's"
        )
    network, digest = find_network(read_state(file), str(file), model), file_digest(file)
    _require_same_weights(out, file, digest)
    row = name or file.stem
    if row.partition("+")[0] in FRAMEWORKS:  # a row of its own
        row = f"{row} (weights)"
    given: dict[str, Any] = {"method": row, "seed": seed, "model.init": str(file.resolve())}
    given |= {f"model.{key}": value for key, value in network.arguments.items()}
    given |= {"views.preset": "simclr", "data.streaming": False}
    config = TrainConfig()
    if like is not None:
        run = open_run(like).config
        config = config.model_copy(update={"data": run.data, "views": run.views})
        given["views.preset"] = run.views.preset
    if data is not None:
        given |= {"data.source": data, "data.labels_from_folders": labels_from_folders}
    config = with_absolute_paths(config.with_settings(given))
    source = open_data(None, config, Run(out))
    if like is None:
        config = config.with_settings(fit_size(config, source))
    out.mkdir(parents=True, exist_ok=True)
    images = read_data(source, config, Run(out), several=False, progress=progress)
    images.samples.to_parquet(Run(out).samples)
    about = {"name": config.method, "file": str(file.resolve()), "digest": digest}
    write_text(out / FOREIGN, json.dumps(about, indent=2) + "\n")
    meta = {"method": config.method, "seed": seed, "views": build_views(config).config()}
    meta["settings"] = settings_digest(config)
    save_encoder(network.encoder, out, meta)
    write_text(Run(out).config, config.to_yaml())
    return out, network


def _require_same_weights(out: Path, file: Path, digest: str) -> None:
    mark = out / FOREIGN
    if not mark.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is not a folder of results; give another one with --out")
    elif f'"{digest}"' not in mark.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"{out} holds the results of other weights than {file}; give --out")
