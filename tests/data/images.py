"""Images for the tests, drawn from a seed, and a stand-in for prepared data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

Bytes = npt.NDArray[np.uint8]


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> Bytes:
    """Uniform noise (H, W, C)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> Bytes:
    """Gradients: red to the right, green downwards, blue both. Survives JPEG and resizing nearly
    unchanged."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    pixels: Bytes = np.stack((x, y, (x + y) / 2), -1).round().astype(np.uint8)
    return pixels


def save(path: Path, pixels: Bytes) -> Path:
    """Writes `pixels` in the format of the extension, making folders as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


class PixelData:
    """Stands for prepared data in memory: (N, H, W, 3) uint8 pixels of square images."""

    def __init__(self, pixels: Tensor) -> None:
        self.all = pixels

    def __len__(self) -> int:
        return len(self.all)

    def pixels(self, ids: Tensor) -> Tensor:
        return self.all[ids]

    def aspect(self, ids: Tensor) -> Tensor:
        return torch.ones(len(ids))
