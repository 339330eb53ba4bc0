"""Several encoders that share a picture: each sees some of its channels, and their features are joined.

Dimension key: B batch, C channels, F features, T towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.models.heads import embedding_size


class SplitEncoder(nn.Module):
    """An encoder for each group of channels, (B, C, H, W) → (B, F): the features of all, one after the other.

    Args:
        encoders: one for each group, with `output_size` each; their parameters are those of `towers.0`, `towers.1`, ….
        channels: how many channels each sees, in order: (1, 2) for lightness and colour of Lab.

    Example:
        >>> from kinfolk.models import build_encoder
        >>> towers = [build_encoder("resnet10", in_channels=number) for number in (1, 2)]
        >>> SplitEncoder(towers, (1, 2))(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 256])
    """

    def __init__(self, encoders: Sequence[nn.Module], channels: Sequence[int]) -> None:
        super().__init__()
        if len(encoders) != len(channels) or not encoders:
            raise ValueError(f"`channels` (={tuple(channels)}) must name a number for each of the {len(encoders)} encoders")
        if min(channels) < 1:
            raise ValueError(f"`channels` (={tuple(channels)}) must be at least 1 each")
        self.towers, self.channels = nn.ModuleList(encoders), tuple(channels)
        self.output_sizes = tuple(int(encoder.output_size) for encoder in encoders)  # type: ignore[arg-type]
        self.output_size = sum(self.output_sizes)
        configs = [getattr(encoder, "config", None) for encoder in encoders]
        self.config: dict[str, Any] | None = None if None in configs else {"channels": list(channels), "towers": configs}
        """How to build the same again, where every tower says it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != sum(self.channels):
            raise ValueError(f"the pictures (={x.shape[1]} channels) must have {sum(self.channels)}: `channels` are {self.channels}")
        parts = x.split_with_sizes(self.channels, 1)
        return torch.cat([tower(part) for tower, part in zip(self.towers, parts, strict=True)], 1)


class SplitHead(nn.Module):
    """A head for each tower of a `SplitEncoder`, (B, F) → (B, D): their outputs, one after the other.

    Args:
        heads: one for each tower.
        sizes: the features each of them reads, in order: `SplitEncoder.output_sizes`.
    """

    def __init__(self, heads: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        super().__init__()
        if len(heads) != len(sizes) or not heads:
            raise ValueError(f"`sizes` (={tuple(sizes)}) must name a number for each of the {len(heads)} heads")
        self.heads, self.sizes = nn.ModuleList(heads), tuple(sizes)
        given = zip(heads, sizes, strict=True)
        self.output_size = sum(size if isinstance(head, nn.Identity) else embedding_size(nn.Identity(), head) for head, size in given)

    def forward(self, features: Tensor) -> Tensor:
        parts = features.split_with_sizes(self.sizes, 1)
        return torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)], 1)
