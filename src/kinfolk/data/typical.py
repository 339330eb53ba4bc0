"""How large the pictures of a source are, from a few of them: what a training's resolution is chosen by where the user names none."""

from __future__ import annotations

import io
import statistics

from kinfolk.data.source import Source

_LOOKED_AT = 16


def typical_side(source: Source) -> int | None:
    """The median of the shorter side over up to 16 pictures spread over the source; None where none of them can be read."""
    if source.native_size is not None:
        return min(source.native_size)
    number = len(source.items())
    looked_at = [_side(source, index) for index in range(0, number, max(1, number // _LOOKED_AT))]
    sides = [side for side in looked_at if side is not None]
    return round(statistics.median(sides)) if sides else None


def _side(source: Source, index: int) -> int | None:
    """The shorter side of one picture; None for a bad file, which reading the data will name."""
    from PIL import Image

    try:
        loaded = source.load(index)
        if not isinstance(loaded, bytes):
            return int(min(loaded.shape[:2]))
        with Image.open(io.BytesIO(loaded)) as picture:
            return int(min(picture.size))
    except Exception:
        return None
