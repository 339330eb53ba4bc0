"""Annotations of samples: the names of splits, labels as class indices, and groups of known
positives.

Samples that share an image, a caption or a group given by the user form one group and are never
negatives of each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.data.captions import Caption, captions_of, normalised
from kinfolk.errors import KinfolkError, shown

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""Names of folders or archives at the top of a source, and the splits they are."""
_ALIASES = {**SPLITS, "dev": "val", "": "train"}
VALIDATION_SPLITS = ("val", "valid", "validation")
"""Names of a validation split, the only other split that may influence training."""
TEST_SPLITS = ("test", *VALIDATION_SPLITS)
"""The splits that accuracy is measured on, in order of preference."""


def split_name(given: str) -> str:
    """The split with the name `given` in a table or a mapping: "train", "val" or "test"; other
    names stay, in lower case.

    Example:
        >>> split_name(" Validation "), split_name("dev"), split_name("test-2017")
        ('val', 'val', 'test-2017')
    """
    name = given.strip().lower()
    return _ALIASES.get(name, name)


_MOST = 1 << 31


def encode_labels(
    values: Sequence[Any], what: str, classes: list[str] | None = None
) -> tuple[list[int | None], list[str] | None]:
    """Converts labels as users write them to class indices; returns (labels, class names).

    Whole numbers (also as text) are class indices; −1, None, NaN and "" mean unlabelled. Anything
    else is the name of a class: the classes are the sorted names, or `classes` if given.
    """
    strange = next(
        (value for value in values if isinstance(value, list | tuple | dict | set | np.ndarray)),
        None,
    )
    if strange is not None:
        raise KinfolkError(
            f"{what} has the label {shown(repr(strange))}, which has several values; a label must"
            " be one number or one text"
        )
    present = {value for value in values if not _is_missing(value)}
    numbers = {value: number for value in present if (number := _as_int(value)) is not None}
    if len(numbers) == len(present):
        for value, number in numbers.items():
            if number < -1 or number >= (_MOST if classes is None else len(classes)):
                limit = (
                    f"0 … {len(classes) - 1} ({len(classes)} classes)"
                    if classes is not None
                    else f"0 … {_MOST - 1}"
                )
                raise KinfolkError(
                    f"{what} has the label {value!r}; labels must be {limit}, or -1 for unlabelled"
                )
        index = {value: number for value, number in numbers.items() if number >= 0}
    else:
        names = sorted({str(value) for value in present}) if classes is None else classes
        position = {name: number for number, name in enumerate(names)}
        unknown = sorted({str(value) for value in present} - set(position))
        if unknown:
            raise KinfolkError(
                f"{what} has the label {unknown[0]!r}, which is not among its classes"
            )
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


Ints = npt.NDArray[np.int64]


def group_ids(
    digests: Sequence[str],
    captions: Sequence[Caption | None] | None,
    groups: Sequence[str | None] | None,
) -> Ints:
    """(N,) the group of each sample, which is the id of its first member.

    Two samples are in one group if their images have the same bytes, if they share a caption
    (compared in composed Unicode, lower case, with single spaces), or if the user gave them the
    same group; the relation is transitive.

    Args:
        digests: (N,) of the images.
        captions, groups: (N,) if there are any.

    Example:
        >>> group_ids(["a", "b", "a", "c"], ["x", "y", "z", "y"], None).tolist()
        [0, 1, 0, 1]
    """
    parents = list(range(len(digests)))
    _join(parents, ((digest,) for digest in digests))
    if captions is not None:
        _join(
            parents, ({normalised(text) for text in captions_of(caption)} for caption in captions)
        )
    if groups is not None:
        _join(parents, (() if group is None or group == "" else (group,) for group in groups))
    return np.array([_root(parents, sample) for sample in range(len(parents))], dtype=np.int64)


def _join(parents: list[int], keys: Iterable[Iterable[Hashable]]) -> None:
    """Joins all samples that share a key."""
    first: dict[Hashable, int] = {}
    for sample, own in enumerate(keys):
        for key in own:
            a, b = _root(parents, sample), _root(parents, first.setdefault(key, sample))
            parents[max(a, b)] = min(a, b)  # the first member stays the root


def _root(parents: list[int], sample: int) -> int:
    while parents[sample] != sample:
        parents[sample] = parents[parents[sample]]
        sample = parents[sample]
    return sample
