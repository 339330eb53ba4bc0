"""Two towers that meet in one space: pictures and texts, each with an encoder and a head; and their weights on disk.

Dimension key: B batch, T tokens, F features, D embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import KinfolkError
from kinfolk.files import write_safetensors
from kinfolk.models.text import OpenClipText
from kinfolk.models.weights import load_state, read_state

TOWERS = "towers.safetensors"
PARTS = ("encoder", "head", "text_encoder", "text_head")


class Pair(nn.Module):
    """A picture tower and a text tower.

    Args:
        encoder, head: (B, 3, H, W) → (B, F) → (B, D).
        text_encoder, text_head: (B, T) token ids → (B, F') → (B, D).
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, text_encoder: nn.Module, text_head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.text_encoder, self.text_head = encoder, head, text_encoder, text_head

    def features(self, images: Tensor) -> Tensor:
        """(B, F) what the picture tower's encoder makes of (B, 3, H, W)."""
        out: Tensor = self.encoder(images)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """(B, D), unit norm, of pictures."""
        return F.normalize(self.head(self.encoder(images)), dim=-1)

    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D), unit norm, of texts (B, T)."""
        return F.normalize(self.text_head(self.text_encoder(tokens)), dim=-1)


def save_towers(model: nn.Module, directory: Path | str, meta: Mapping[str, Any] | None = None) -> Path:
    """Writes `towers.safetensors`, whole or not at all: the four parts of `model`, under their names; `meta` is kept in the header."""
    state = {name: value for name, value in model.state_dict().items() if name.partition(".")[0] in PARTS}
    tensors = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    path = Path(directory) / TOWERS
    write_safetensors(path, tensors, {"kinfolk": json.dumps({"format": 1, "kind": "towers", "meta": dict(meta or {})})})
    return path


def begin_from(model: nn.Module, path: Path | str) -> list[str]:
    """Fills what `path` has weights for, and returns the names of these parts; the others stay as they are.

    Args:
        model: with some of the parts `encoder`, `head`, `text_encoder`, `text_head`.
        path: `.safetensors`, or a state dict of `torch.save`, read without running code. Of two towers (`towers.safetensors`, a checkpoint
            of a run), of a whole open_clip model, or of the encoder alone.
    """
    state = _bare(read_state(path))
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        found.setdefault(part, {})[rest] = value
    if set(found) & {"text_encoder", "encoder"}:
        chosen = {part: found[part] for part in PARTS if part in found and hasattr(model, part)}
    elif "visual" in found and isinstance(getattr(model, "text_encoder", None), OpenClipText):
        others = {f"model.{name}": value for name, value in state.items() if not name.startswith(("visual.", "logit_"))}
        chosen = {"encoder": found["visual"], "text_encoder": others}
    else:
        chosen = {"encoder": found.get("visual", state)}
    for part, weights in chosen.items():
        load_state(getattr(model, part), weights, source=f"{part} in {path}")
    if not chosen:
        raise KinfolkError(f"{path} has no weights for {type(model).__name__}; it must hold an encoder, or the parts {', '.join(PARTS)}.")
    return list(chosen)


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what a training wraps around the names; of a training's checkpoint the four parts alone."""
    for wrap in ("framework.", "module."):
        if all(name.startswith(wrap) for name in state):
            state = {name.removeprefix(wrap): value for name, value in state.items()}
            if wrap == "framework.":
                state = {name: value for name, value in state.items() if name.partition(".")[0] in PARTS}
    return dict(state)
