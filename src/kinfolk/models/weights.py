"""Weights on disk: `model.safetensors` of an encoder, with `model.json`, also in its header, on how
to build it; `towers.safetensors` of two encoders with heads. Loading never runs code."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import KinfolkError, warn
from kinfolk.files import (
    DamagedFileError,
    check_safetensors,
    explain_read_errors,
    first_line,
    write_safetensors,
    write_text,
)
from kinfolk.models.encoders import Adapted, build_encoder
from kinfolk.models.heads import SplitEncoder
from kinfolk.models.text import OpenClipText

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
# what a file may set of an encoder; `pretrained` would download weights
_BUILT_BY = frozenset(("name", "stem", "width", "in_channels"))
_NESTED = ("state_dict", "model_state_dict", "model", "net")  # keys of checkpoints
TOWERS = "towers.safetensors"
PARTS = ("encoder", "head", "text_encoder", "text_head")


def save_encoder(
    encoder: nn.Module, directory: Path | str, meta: Mapping[str, Any] | None = None
) -> Path:
    """Writes `model.safetensors` and `model.json`, with `meta`; returns the path of the former."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = plain_state(encoder)
    description = {
        "format": 1,
        "encoder": getattr(encoder, "config", None),
        "output_size": getattr(encoder, "output_size", None),
        "parameters": sum(parameter.numel() for parameter in encoder.parameters()),
        "meta": dict(meta or {}),
    }
    text = json.dumps(description, indent=2)
    path = directory / WEIGHTS
    write_safetensors(path, state, {"kinfolk": text})
    write_text(directory / DESCRIPTION, text + "\n")
    return path


def plain_state(encoder: nn.Module) -> dict[str, Tensor]:
    """Contiguous copies under the encoder's own names."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _inner(encoder).state_dict().items()
    }


def load_encoder(
    path: Path | str, encoder: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Loads an encoder from a run folder or a `model.safetensors`; returns it in evaluation mode,
    with its `meta`. `encoder`: the module to load into, if `build_encoder` did not make the saved
    one."""
    path = Path(path)
    file = path / WEIGHTS if path.is_dir() else path
    if not file.is_file():
        raise KinfolkError(
            f"there is no {WEIGHTS} at {path}; give a finished run's folder or the file itself"
        )
    description = _describe(file)
    config = description.get("encoder")
    if encoder is None:
        if not isinstance(config, dict):
            raise KinfolkError(
                f"{file} does not describe its encoder; pass the module as `load_encoder(path,"
                " encoder=module)`"
            )
        with explain_read_errors(str(file), "description of an encoder"):
            encoder = _build(config)
    load_state(encoder, read_state(file), source=str(file))
    meta = description["meta"]
    epoch, epochs = meta.get("epoch"), meta.get("epochs")
    if isinstance(epoch, int) and isinstance(epochs, int) and epoch < epochs:
        reached = f"after epoch {epoch} of {epochs} (step {meta.get('step')})"
        warn(f"the training was interrupted: {file} is the encoder {reached}")
    return encoder.eval(), meta


def meta_of(file: Path) -> dict[str, Any]:
    return dict(_describe(file)["meta"])


def load_weights(encoder: nn.Module, path: Path | str) -> None:
    """Loads a `.safetensors` file or a file of `torch.save`; see `load_state`."""
    load_state(encoder, read_state(path), source=str(path))


def read_state(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a state dict that `torch.save` wrote."""
    path = Path(path)
    if not path.is_file():
        raise KinfolkError(f"there is no file of weights at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            check_safetensors(path, _metadata(path))
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader has its own errors, and pickle any
        raise _refuse(path, error) from error
    if isinstance(state, dict):
        nested = (state[key] for key in _NESTED if isinstance(state.get(key), dict))
        state = next(nested, state)
        if all(isinstance(value, Tensor) for value in state.values()):
            return dict(state)
    raise KinfolkError(f"{path} is not a state dict; it must map names to tensors")


def _refuse(path: Path, error: Exception) -> KinfolkError:
    return KinfolkError(f"{path} can't be read as weights: {why_unreadable(error)}")


def why_unreadable(error: Exception) -> str:
    """A sentence, because torch's message advises to disable its check."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds Python objects besides tensors, which could run code, or is damaged"
    if isinstance(error, DamagedFileError):
        return f"{error}; restore it from a copy"
    return f"it is damaged or of another kind ({first_line(error)})"


def load_state(
    encoder: nn.Module, state: Mapping[str, Tensor], *, source: str = "the state dict"
) -> None:
    """Loads `state` into `encoder`: every tensor must be present, be used and have the right shape,
    except for torchvision's classifier (`fc.*`) and BatchNorm's counter, which it may lack."""
    inner = _inner(encoder)
    needed = inner.state_dict()
    counters = {name: x for name, x in needed.items() if name.endswith("num_batches_tracked")}
    known = {name: x for name, x in state.items() if name in needed or not name.startswith("fc.")}
    given = counters | known
    faults = {
        "missing": [name for name in needed if name not in given],
        "not of this network": [name for name in given if name not in needed],
        "of another shape": [
            f"{name} is {tuple(given[name].shape)} and must be {tuple(value.shape)}"
            for name, value in needed.items()
            if name in given and value.shape != given[name].shape
        ],
    }
    listed = "; ".join(
        f"{len(names)} {what} ({', '.join(names[:2])}{', …' if len(names) > 2 else ''})"
        for what, names in faults.items()
        if names
    )
    if listed:
        hint = "; the stems may differ, try the other `stem`" if "conv1.weight" in listed else ""
        config = getattr(encoder, "config", None) or type(inner).__name__
        raise KinfolkError(f"the weights of {source} don't fit {config}: {listed}{hint}")
    inner.load_state_dict(given)


def _build(config: dict[str, Any]) -> nn.Module:
    """The encoder that a file describes; it must not be able to cause a download."""
    if "towers" in config:
        return SplitEncoder([_build(tower) for tower in config["towers"]], config["channels"])
    name = config["name"]
    # a setting of earlier versions, without effect on weights that are loaded
    config = {key: value for key, value in config.items() if key != "zero_init_residual"}
    if foreign := config.keys() - _BUILT_BY:
        raise KeyError(f"it has the setting {min(foreign)!r}")
    if not isinstance(name, str) or ":" in name or name.count("/") > 1:
        raise KeyError(f"its name {name!r} is not that of a network")
    if "/" not in name:
        return build_encoder(**config)
    with _offline():
        return build_encoder(**config)


@contextmanager
def _offline() -> Iterator[None]:
    """Keeps the Hugging Face hub offline, from which some networks of open_clip download."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:  # no network that is built could use it
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _inner(encoder: nn.Module) -> nn.Module:
    return encoder.module if isinstance(encoder, Adapted) else encoder


def _describe(file: Path) -> dict[str, Any]:
    sidecar, text = file.with_suffix(".json"), ""
    try:
        if file.suffix == ".safetensors":
            text = _metadata(file).get("kinfolk", "")
    except Exception as error:
        raise _refuse(file, error) from error
    with explain_read_errors(f"the description of {file}", "document of JSON"):
        if not text and sidecar.is_file():
            text = sidecar.read_text(encoding="utf-8")
        description = json.loads(text or "{}")
    description = description if isinstance(description, dict) else {}
    meta = description.get("meta")
    return {**description, "meta": meta if isinstance(meta, dict) else {}}


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


# Two towers with one embedding space


class Pair(nn.Module):
    def __init__(
        self, encoder: nn.Module, head: nn.Module, text_encoder: nn.Module, text_head: nn.Module
    ) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.text_encoder, self.text_head = text_encoder, text_head

    def features(self, images: Tensor) -> Tensor:
        out: Tensor = self.encoder(images)
        return out

    def embed(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.encoder(images)), dim=-1)

    def embed_text(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.text_head(self.text_encoder(tokens)), dim=-1)


def save_towers(
    model: nn.Module, directory: Path | str, meta: Mapping[str, Any] | None = None
) -> Path:
    path = Path(directory) / TOWERS
    state = _parts_of(plain_state(model))
    text = json.dumps({"format": 1, "kind": "towers", "meta": dict(meta or {})})
    write_safetensors(path, state, {"kinfolk": text})
    return path


def load_parts(model: nn.Module, path: Path | str) -> list[str]:
    """Loads weights of two towers, of a checkpoint, of a whole open_clip model or of an encoder;
    returns the names of the loaded `PARTS`."""
    state = _strip_prefixes(read_state(path))
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        found.setdefault(part, {})[rest] = value
    if found.keys() & {"text_encoder", "encoder"}:
        chosen = {part: found[part] for part in PARTS if part in found and hasattr(model, part)}
    elif "visual" in found and isinstance(getattr(model, "text_encoder", None), OpenClipText):
        text = (name for name in state if not name.startswith(("visual.", "logit_")))
        others = {f"model.{name}": state[name] for name in text}
        chosen = {"encoder": found["visual"], "text_encoder": others}
    else:
        chosen = {"encoder": found.get("visual", state)}
    for part, weights in chosen.items():
        load_state(getattr(model, part), weights, source=f"{part} in {path}")
    if not chosen:
        raise KinfolkError(f"{path} has no weights for {', '.join(PARTS)}")
    return list(chosen)


def _strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the prefixes that training adds; of a checkpoint only the `PARTS`."""
    for prefix in ("framework.", "module."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            state = _parts_of(state) if prefix == "framework." else state
    return dict(state)


def _parts_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.partition(".")[0] in PARTS}
