"""How a data set differs from what it was: the first difference, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.foreign import shown

if TYPE_CHECKING:
    from kinfolk.data.samples import Samples


def first_difference(was: Samples, now: Samples) -> str | None:
    """The first difference between two tables of samples: order and presence first, then classes, then row by row."""
    if (found := key_difference(was.keys, now.keys)) is not None:
        return found
    if was.classes != now.classes:
        return f"the classes were {_shorten(was.classes)}, are now {_shorten(now.classes)}"
    columns: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("split", was.splits, now.splits),
        ("label", _labels(was), _labels(now)),
        ("caption", was.captions or [None] * len(was), now.captions or [None] * len(now)),
        ("group", was.groups or [None] * len(was), now.groups or [None] * len(now)),
        ("bytes", was.sizes_bytes, now.sizes_bytes),  # type: ignore[list-item]
        ("width", was.widths, now.widths),  # type: ignore[list-item]
        ("height", was.heights, now.heights),  # type: ignore[list-item]
        ("digest", was.digests, now.digests),
    ]
    differing = [(row, name, a[row], b[row]) for name, a, b in columns if (row := first_unequal(a, b)) is not None]
    if not differing:
        return None
    row, name, before, after = min(differing, key=lambda found: found[0])
    return value_difference(row, was.keys[row], name, before, after)


def key_difference(was: Sequence[str], now: Sequence[str]) -> str | None:
    """A sample that is missing, was added, or stands elsewhere."""
    row = first_unequal(was, now)
    if row is None and len(was) == len(now):
        return None
    row = min(len(was), len(now)) if row is None else row
    if row < len(was) and was[row] not in set(now):
        return f"sample {row} ({shown(was[row])}) is missing now"
    if row < len(now) and now[row] not in set(was):
        return f"{shown(now[row])} was not there before and is sample {row} now"
    if row < len(was) and row < len(now):
        return f"the order has changed: sample {row} was {shown(was[row])}, is now {shown(now[row])}"
    return f"there were {len(was):,} samples, there are now {len(now):,}"


def value_difference(row: int, key: str, name: str, before: object, after: object) -> str:
    """The sentence for one column of one sample."""
    subject = f"sample {row} ({shown(key)})"
    if name == "bytes":
        return f"{subject} was {before:,} bytes, is now {after:,}"
    if name == "digest":
        return f"{subject} has the same size as before but other content"
    return f"{subject} had {name} {_shorten(before)}, has now {_shorten(after)}"


def first_unequal(was: Sequence[Any], now: Sequence[Any]) -> int | None:
    """The first position, within the shorter of both, where they differ."""
    if isinstance(was, np.ndarray):
        places = np.flatnonzero(was[: len(now)] != now[: len(was)])
        return int(places[0]) if len(places) else None
    if was == now:
        return None
    return next((row for row, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)


def _labels(samples: Samples) -> list[int | None]:
    return [None] * len(samples) if samples.labels is None else [None if label < 0 else label for label in samples.labels.tolist()]


def _shorten(value: object) -> str:
    text = "none" if value is None else repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 80 else f"{text[:79]}…"
