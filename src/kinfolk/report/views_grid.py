"""The sample grid: a few pictures beside the augmented views the training made of them.

Dimension key: S samples, V views, H, W picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kinfolk.report.map import data_uri

NUM_SAMPLES = 6
NUM_VIEWS = 6
GAP = 0.12
"""Distance between the pictures of a strip, as a share of their width."""


@dataclass(frozen=True)
class Strip:
    """One sample: the original, a gap, its views; as one picture."""

    key: str
    label: str
    uri: str
    width: int
    height: int
    pixelated: bool


def strip(key: str, label: str, original_HW3: NDArray[np.uint8], views_VHW3: NDArray[np.uint8]) -> Strip:
    """Puts the original and its views in a row on a transparent ground."""
    from PIL import Image

    size = int(views_VHW3.shape[1])
    gap = max(1, round(size * GAP))
    num_views = len(views_VHW3)
    width = size * (num_views + 1) + gap * (num_views + 1)
    sheet = Image.new("RGBA", (width, size), (0, 0, 0, 0))
    first = Image.fromarray(original_HW3)
    if first.size != (size, size):
        first = first.resize((size, size), Image.Resampling.BICUBIC)
    sheet.paste(first, (0, 0))
    for i, view in enumerate(views_VHW3):
        sheet.paste(Image.fromarray(view), (size + 2 * gap + i * (size + gap), 0))
    return Strip(key, label, data_uri(sheet, quality=88), width, size, pixelated=size <= 64)
