"""Projection and prediction heads, and encoders and heads whose parts see some of the channels.

Dimension key: B batch, C channels, F features, T towers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.errors import require, require_at_least


def projection_head(
    in_size: int,
    hidden_size: int,
    out_size: int,
    *,
    layers: int = 2,
    norm: bool = True,
    last_norm: bool = False,
    last_affine: bool = True,
    bias: bool | None = None,
) -> nn.Sequential:
    """Linear, norm, ReLU, …, linear: (B, in_size) → (B, out_size).

    Args:
        layers: number of linear layers.
        norm, last_norm: whether BatchNorm follows each hidden layer, and the last.
        last_affine: whether that last BatchNorm has weight and bias.
        bias: of all linear layers. None: only where no BatchNorm with a bias follows.
    """
    require_at_least(1, in_size=in_size, hidden_size=hidden_size, out_size=out_size, layers=layers)
    sizes = [in_size, *[hidden_size] * (layers - 1), out_size]
    modules: list[nn.Module] = []
    for layer in range(layers):
        last = layer == layers - 1
        has_norm = last_norm if last else norm
        modules.append(
            nn.Linear(sizes[layer], sizes[layer + 1], bias=not has_norm if bias is None else bias)
        )
        if has_norm:
            modules.append(nn.BatchNorm1d(sizes[layer + 1], affine=last_affine or not last))
        if not last:
            modules.append(nn.ReLU(inplace=True))
    return nn.Sequential(*modules)


def prediction_head(size: int, hidden_size: int) -> nn.Sequential:
    """The predictor of BYOL, SimSiam, NNCLR and RCL."""
    return projection_head(size, hidden_size, size)


@torch.no_grad()
def embeddings(head: nn.Module, features: Tensor, rows: int = 4096) -> Tensor:
    weight = next(head.parameters())
    with evaluating(head):
        parts = [
            F.normalize(head(part.to(weight)), dim=1).to(features)
            for part in torch.split(features, rows)
        ]
    return torch.cat(parts)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Within, `model` is in evaluation mode."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        yield model.eval()
    finally:
        for part, training in modes:
            part.training = training


def embedding_size(encoder: nn.Module, head: nn.Module) -> int:
    """D: the size of the last layer of `head` that has one, or of the encoder."""
    layers = [head, *reversed(list(head.modules()))]
    for module in (*layers, encoder, *reversed(list(encoder.modules()))):
        for name in ("output_size", "out_features", "num_features"):
            if isinstance(size := getattr(module, name, None), int):
                return size
    raise ValueError(
        f"`head` (={type(head).__name__}) must have an attribute `output_size`, the length of its"
        " vectors, or end in a linear layer"
    )


class SplitEncoder(nn.Module):
    """Encoders that each see some `channels`, such as (1, 2) for lightness and colour of Lab: (B,
    C, H, W) → (B, F), their features concatenated."""

    def __init__(self, encoders: Sequence[nn.Module], channels: Sequence[int]) -> None:
        super().__init__()
        self.towers, self.channels = nn.ModuleList(encoders), tuple(channels)
        rule = f"a number for each of the {len(encoders)} encoders, at least 1"
        fits = len(encoders) == len(channels) and min(channels, default=0) >= 1
        require(fits, "channels", self.channels, rule)
        self.output_sizes = tuple(int(encoder.output_size) for encoder in encoders)  # type: ignore[arg-type]
        self.output_size = sum(self.output_sizes)
        configs = [getattr(encoder, "config", None) for encoder in encoders]
        self.config: dict[str, Any] | None = (
            None if None in configs else {"channels": list(channels), "towers": configs}
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != sum(self.channels):
            must = f"must have {sum(self.channels)}: `channels` are {self.channels}"
            raise ValueError(f"the images (={x.shape[1]} channels) {must}")
        parts = x.split_with_sizes(self.channels, 1)
        return torch.cat([tower(part) for tower, part in zip(self.towers, parts, strict=True)], 1)


class SplitHead(nn.Module):
    """One head for each tower of a `SplitEncoder`, (B, F) → (B, D). `sizes`: features that each
    reads."""

    def __init__(self, heads: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        super().__init__()
        self.heads, self.sizes = nn.ModuleList(heads), tuple(sizes)
        rule = f"a number for each of the {len(heads)} heads"
        require(len(heads) == len(sizes), "sizes", self.sizes, rule)
        given = zip(heads, sizes, strict=True)
        self.output_size = sum(
            size if isinstance(head, nn.Identity) else embedding_size(nn.Identity(), head)
            for head, size in given
        )

    def forward(self, features: Tensor) -> Tensor:
        parts = features.split_with_sizes(self.sizes, 1)
        return torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)], 1)
