"""Two towers with one embedding space, for images and texts, each with an encoder and a head; and
their weights on disk.

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
    """An image tower and a text tower.

    Args:
        encoder, head: (B, 3, H, W) → (B, F) → (B, D).
        text_encoder, text_head: (B, T) token ids → (B, F') → (B, D).
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, text_encoder: nn.Module, text_head: nn.Module
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.text_encoder, self.text_head = (
            encoder,
            head,
            text_encoder,
            text_head,
        )

    def features(self, images: Tensor) -> Tensor:
        """(B, F) features of images (B, 3, H, W)."""
        out: Tensor = self.encoder(images)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of images."""
        return F.normalize(self.head(self.encoder(images)), dim=-1)

    def embed_text(self, tokens: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of texts (B, T)."""
        return F.normalize(self.text_head(self.text_encoder(tokens)), dim=-1)


def save_towers(
    model: nn.Module, directory: Path | str, meta: Mapping[str, Any] | None = None
) -> Path:
    """Writes the four parts of `model` to `towers.safetensors` atomically; `meta` is stored in the
    header."""
    state = {
        name: value for name, value in model.state_dict().items() if name.partition(".")[0] in PARTS
    }
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }
    path = Path(directory) / TOWERS
    write_safetensors(
        path,
        tensors,
        {"kinfolk": json.dumps({"format": 1, "kind": "towers", "meta": dict(meta or {})})},
    )
    return path


def begin_from(model: nn.Module, path: Path | str) -> list[str]:
    """Loads the parts that `path` has weights for, and returns their names; the other parts stay
    unchanged.

    Args:
        model: has some of the parts `encoder`, `head`, `text_encoder`, `text_head`.
        path: a `.safetensors` file or a state dict of `torch.save`, read without running code, of
            two towers (`towers.safetensors`, a checkpoint of a run), of a whole open_clip model, or
            of an encoder.
    """
    state = _bare(read_state(path))
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        found.setdefault(part, {})[rest] = value
    if set(found) & {"text_encoder", "encoder"}:
        chosen = {part: found[part] for part in PARTS if part in found and hasattr(model, part)}
    elif "visual" in found and isinstance(getattr(model, "text_encoder", None), OpenClipText):
        others = {
            f"model.{name}": value
            for name, value in state.items()
            if not name.startswith(("visual.", "logit_"))
        }
        chosen = {"encoder": found["visual"], "text_encoder": others}
    else:
        chosen = {"encoder": found.get("visual", state)}
    for part, weights in chosen.items():
        load_state(getattr(model, part), weights, source=f"{part} in {path}")
    if not chosen:
        raise KinfolkError(
            f"{path} has no weights for {type(model).__name__}; it must hold an encoder, or the"
            f" parts {', '.join(PARTS)}."
        )
    return list(chosen)


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the prefixes that training adds; of a checkpoint only the four parts."""
    for wrap in ("framework.", "module."):
        if all(name.startswith(wrap) for name in state):
            state = {name.removeprefix(wrap): value for name, value in state.items()}
            if wrap == "framework.":
                state = {
                    name: value for name, value in state.items() if name.partition(".")[0] in PARTS
                }
    return dict(state)
