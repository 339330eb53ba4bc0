"""What an array of images means: where its channels are, and how its values become 0 … 255."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinfolk.data.source import Pixels
from kinfolk.errors import KinfolkError

_CHANNELS = (1, 3, 4)
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Scale:
    """Values become uint8 by `round(value * factor)`; `factor` 1 on integers only casts."""

    factor: float

    def __call__(self, image: Pixels) -> Pixels:
        if image.dtype == np.uint8:
            return np.asarray(image)
        if self.factor == 1:
            return image.astype(np.uint8)
        return np.rint(image.astype(np.float64) * self.factor).astype(np.uint8)


def find_layout(images: Pixels, what: str) -> Pixels:
    """A view of the shape (N, H, W) or (N, H, W, C)."""
    shape = images.shape
    if images.ndim == 4:
        last, second = shape[3] in _CHANNELS, shape[1] in _CHANNELS
        if second and not last:
            images = np.moveaxis(images, 1, 3)
        elif second == last:
            reason = (
                "channels may be the second or the last axis" if last else "neither the second nor the last axis has 1, 3 or 4 channels"
            )
            raise KinfolkError(f"{what} has the shape {shape}: {reason}; give (N, H, W, 3)")
    elif images.ndim != 3 or shape[2] in _CHANNELS:
        raise KinfolkError(f"{what} has the shape {shape}; images must be (N, H, W), (N, H, W, 3) or (N, 3, H, W)")
    if 0 in images.shape[1:]:
        raise KinfolkError(f"{what} has the shape {shape}: its images have no pixels")
    return images


def find_scale(images: Pixels, what: str) -> Scale:
    """How the values of all images become uint8: one rule for all, so that no image is stretched on its own.

    uint8 stays; bool and floats in [0, 1] are × 255; integers in 0 … 255 are cast; uint16 above 255 is × 255 / 65535.
    """
    kind = images.dtype.kind
    if images.dtype == np.uint8 or len(images) == 0:
        return Scale(1)
    if kind == "b":
        return Scale(255)
    if kind not in "iuf":
        raise KinfolkError(f"{what} has the type {images.dtype}; images must be numbers, best uint8")
    low, high = _value_range(images, what)
    if kind == "f":
        if low < 0 or high > 1:
            raise KinfolkError(f"{what} has {images.dtype} values in [{low:g}, {high:g}]; floats must be in [0, 1], or convert to uint8")
        return Scale(255)
    if low >= 0 and high <= 255:
        return Scale(1)
    if images.dtype == np.uint16:
        return Scale(255 / 65535)
    raise KinfolkError(f"{what} has {images.dtype} values in [{low:g}, {high:g}]; integers must be in [0, 255], or convert to uint8")


def _value_range(images: Pixels, what: str) -> tuple[float, float]:
    """Least and greatest value, in pieces so that a memory-mapped array is never held at once. Not-a-number is refused."""
    step = max(1, _CHUNK_BYTES // max(1, images[0].nbytes))
    low, high = np.inf, -np.inf
    for start in range(0, len(images), step):
        piece = images[start : start + step]
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            bad = start + int(np.flatnonzero(~np.isfinite(piece).reshape(len(piece), -1).all(1))[0])
            raise KinfolkError(f"{what} holds NaN or infinite values, first in image {bad}; remove them")
        low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    return low, high
