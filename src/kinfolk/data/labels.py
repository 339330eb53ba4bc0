"""Labels as a user writes them, as class indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kinfolk.errors import KinfolkError
from kinfolk.foreign import shown

_MOST = 1 << 31


def encode_labels(values: Sequence[Any], what: str, classes: list[str] | None = None) -> tuple[list[int | None], list[str] | None]:
    """(labels, class names).

    Whole numbers (also as text) are class indices and stay; −1, None, NaN and "" mean unlabelled. Anything else is a name: the
    classes are the sorted names, or `classes` where given.
    """
    strange = next((value for value in values if isinstance(value, list | tuple | dict | set | np.ndarray)), None)
    if strange is not None:
        raise KinfolkError(f"{what} has the label {shown(repr(strange))}, of several values; a label must be one number or one text")
    present = {value for value in values if not _is_missing(value)}
    numbers = {value: number for value in present if (number := _as_int(value)) is not None}
    if len(numbers) == len(present):
        for value, number in numbers.items():
            if number < -1 or number >= (_MOST if classes is None else len(classes)):
                limit = f"0 … {len(classes) - 1} ({len(classes)} classes)" if classes is not None else f"0 … {_MOST - 1}"
                raise KinfolkError(f"{what} has the label {value!r}; labels must be {limit}, or -1 for unlabelled")
        index = {value: number for value, number in numbers.items() if number >= 0}
    else:
        names = sorted({str(value) for value in present}) if classes is None else classes
        position = {name: number for number, name in enumerate(names)}
        unknown = sorted({str(value) for value in present} - set(position))
        if unknown:
            raise KinfolkError(f"{what} has the label {unknown[0]!r}, which is not among its classes")
        index, classes = {value: position[str(value)] for value in present}, names
    return [None if _is_missing(value) else index.get(value) for value in values], classes


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value


def _as_int(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
    if isinstance(value, int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None
