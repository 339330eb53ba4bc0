"""Annotations of samples: splits, labels, captions, groups; and tables."""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.errors import KinfolkError, short
from kinfolk.files import explain_read_errors

Ints = npt.NDArray[np.int64]
Caption = str | tuple[str, ...]
"""One caption of a sample, or several, of which one is drawn each time."""

VALIDATION_SPLITS = ("val", "valid", "validation")
TEST_SPLITS = ("test", *VALIDATION_SPLITS)
"""Splits to measure accuracy on, in order of preference."""
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(VALIDATION_SPLITS, "val")
"""Names of folders at the top of a source, and the splits they are."""
_ALIASES = {**SPLITS, "dev": "val", "": "train"}


def split_name(given: str) -> str:
    """ "train", "val" or "test" for "Validation" or "dev"; other names stay."""
    name = given.strip().lower()
    return _ALIASES.get(name, name)


# Labels

_MOST = 1 << 31


def encode_labels(
    values: Sequence[Any], what: str, classes: list[str] | None = None
) -> tuple[list[int | None], list[str] | None]:
    """Class indices and class names. Whole numbers (also as text) are class indices; −1, None, NaN
    and "" mean unlabelled; anything else is the name of a class, of the sorted names or
    `classes`."""
    if odd := [x for x in values if isinstance(x, list | tuple | dict | set | np.ndarray)]:
        raise KinfolkError(
            f"{what} has the label {short(repr(odd[0]))}, which has several values; a label must be"
            " one number or one text"
        )
    present = {value for value in values if not _is_missing(value)}
    numbers = {value: number for value in present if (number := as_int(value)) is not None}
    if len(numbers) == len(present):
        end = _MOST if classes is None else len(classes)
        if wrong := [value for value, number in numbers.items() if not -1 <= number < end]:
            raise KinfolkError(
                f"{what} has the label {wrong[0]!r}; labels must be 0 … {end - 1}, or -1 for"
                " unlabelled"
            )
        index = {value: number for value, number in numbers.items() if number >= 0}
    else:
        classes = sorted({str(value) for value in present}) if classes is None else classes
        position = {name: number for number, name in enumerate(classes)}
        if unknown := {str(value) for value in present} - position.keys():
            raise KinfolkError(
                f"{what} has the label {min(unknown)!r}, which is not among its classes"
            )
        index = {value: position[str(value)] for value in present}
    return [None if _is_missing(value) else index.get(value) for value in values], classes


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value


def as_int(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
    if isinstance(value, int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


# Captions

LONGEST = 10_000  # a caption of this many characters is a document or a mistake


def captions_of(caption: Caption | None) -> tuple[str, ...]:
    return () if caption is None else (caption,) if isinstance(caption, str) else caption


def same_type(captions: Sequence[Caption | None]) -> list[Caption | None]:
    """If any sample has several captions, a single one becomes a tuple too."""
    if not any(isinstance(caption, tuple) for caption in captions):
        return list(captions)
    return [None if caption is None else captions_of(caption) for caption in captions]


def normalise_caption(caption: str) -> str:
    return " ".join(unicodedata.normalize("NFC", caption).lower().split())


def to_text(value: Any) -> str | None:
    """Bytes that are not UTF-8 become lone surrogates."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return None if value is None or value != value else str(value)


def why_refused(
    text: str | None, what: str = "the caption", longest: int | None = LONGEST
) -> str | None:
    if text is None or not text.strip():
        return f"{what} is empty"
    if longest is not None and len(text) >= longest:
        return f"{what} has {len(text):,} characters; it must have fewer than {longest:,}"
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return f"{what} is not valid UTF-8"
    if not any(letter.isprintable() and not letter.isspace() for letter in text):
        return f"{what} is empty: it has no visible characters"
    return None


def usable_captions(value: Any) -> tuple[Caption | None, list[tuple[int, str]]]:
    """The usable captions of a cell, and (number, reason) of the others; number 0 is the whole
    cell."""
    if not isinstance(value, list | tuple):
        text = to_text(value)
        reason = why_refused(text)
        return (text, []) if reason is None else (None, [(0, reason)])
    texts = [to_text(text) for text in value]
    reasons = [why_refused(text) for text in texts]
    faults = [(number, reason) for number, reason in enumerate(reasons, 1) if reason is not None]
    good = tuple(str(text) for text, why in zip(texts, reasons, strict=True) if why is None)
    return (good, faults) if good else (None, [*faults, (0, "it has no caption")])


# Groups


def group_ids(
    digests: Sequence[str],
    captions: Sequence[Caption | None] | None,
    groups: Sequence[str | None] | None,
) -> Ints:
    """(N,) the known positives: the id of the first sample of the group, whose samples share, also
    through others, the image's bytes, a caption or a group of the user."""
    return linked_rows(
        len(digests),
        ((digest,) for digest in digests),
        ({normalise_caption(text) for text in captions_of(caption)} for caption in captions or ()),
        (() if not group else (group,) for group in groups or ()),
    )


def linked_rows(number: int, *columns: Iterable[Iterable[Hashable]]) -> Ints:
    """(N,) the first row that shares a key with this one in any column, also through other rows."""
    parents = list(range(number))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    for column in columns:
        first: dict[Hashable, int] = {}
        for row, shared in enumerate(column):
            for key in shared:
                a, b = root(row), root(first.setdefault(key, row))
                parents[max(a, b)] = min(a, b)
    return np.array([root(row) for row in range(number)], dtype=np.int64)


# Tables

_LONGEST_CELL = 1 << 27


def read_columns(path: Path) -> dict[str, list[Any]]:
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    limit = csv.field_size_limit(_LONGEST_CELL)  # a setting of the whole process
    is_tsv, lines = path.suffix.lower() == ".tsv", list[list[str]]()
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            # strict: a quote that is not closed would swallow the next rows
            for row in map(_split_tabs, file) if is_tsv else csv.reader(file, strict=True):
                lines += [row] if row else []
    except (OSError, csv.Error) as error:
        raise KinfolkError(
            f"`{path}` is not a readable table: {error}, in row {len(lines)}; quotes within a"
            ' quoted cell are written twice ("")'
        ) from error
    finally:
        csv.field_size_limit(limit)
    header, *rows = lines or [[]]
    if not header:
        raise KinfolkError(f"`{path}` is empty; its first line must name the columns")
    if len(set(header)) < len(header):
        raise KinfolkError(f"`{path}` names a column twice: {', '.join(map(repr, header))}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise KinfolkError(
                f"row {number} of `{path}` has {len(row)} cells, its header has {len(header)}"
            )
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _split_tabs(line: str) -> list[str]:
    """If the quotes do not match, the line is taken as unquoted."""
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.rstrip("\r\n").split("\t")


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    with explain_read_errors(f"`{path}`", "table"):
        table = pq.read_table(path, partitioning=None)
        return {name: list(table[name].to_pylist()) for name in table.column_names}
