"""Thumbnails of samples for the page of an audit, decoded from the original images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kinfolk.data.decode import RefusedError, decode
from kinfolk.errors import KinfolkError

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.data.source import Source

TILE = 112
_PIXEL_CAP = 500_000_000


class Thumbnails:
    """Square thumbnails of single samples.

    Args:
        images: the samples; their cached pixels are used where an original can't be read.
        source: where the originals are; None uses the cached pixels.
        size: largest side of a thumbnail; small images keep their size.
    """

    def __init__(self, images: ImageData, source: Source | None = None, size: int = TILE) -> None:
        self.images, self.source = images, source
        longest = int(max(images.samples.widths.max(initial=1), images.samples.heights.max(initial=1)))
        self.size = min(size, longest if source is not None else max(images.height, images.width))

    def squares(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """(size, size, 3) for each of `ids`: the whole image on a black square."""
        from kinfolk.report.maps import square_images

        place = {} if self.source is None else {item.key: at for at, item in enumerate(self.source.items())}
        squares = []
        for sample in ids:
            original = self._original(sample, place)
            if original is None:
                (original,) = square_images(self.images, np.asarray([sample], dtype=np.int64), self.size)
            height, width = original.shape[:2]
            square = np.zeros((max(self.size, height, width),) * 2 + (3,), dtype=np.uint8)
            top, left = (len(square) - height) // 2, (len(square) - width) // 2
            square[top : top + height, left : left + width] = original
            squares.append(square)
        return squares

    def _original(self, sample: int, place: dict[str, int]) -> NDArray[np.uint8] | None:
        samples = self.images.samples
        at = place.get(samples.keys[sample])
        if at is None or self.source is None:
            return None
        width, height = int(samples.widths[sample]), int(samples.heights[sample])
        scale = self.size / max(width, height, 1)
        try:
            found = decode(self.source.load(at), max(1, round(height * scale)), max(1, round(width * scale)), _PIXEL_CAP)
        except (RefusedError, KinfolkError, OSError):
            return None
        return found.pixels
