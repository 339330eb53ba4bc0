"""Tables of image paths or of text pairs (CSV, TSV, Parquet), with columns for captions, labels,
groups and splits."""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kinfolk.data.captions import decoded, usable_captions
from kinfolk.data.folder import FileSource
from kinfolk.data.labels import encode_labels, split_name
from kinfolk.data.source import Item
from kinfolk.data.text_pairs import PairSource, open_pairs, require_both, text_columns
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import first_line

_LONGEST_CELL = 1 << 27
_NAMED = (
    "; a table of text pairs has the columns anchor and positive, or names them (--set"
    " data.anchor_column=NAME, data.positive_column=NAME)"
)


def read_columns(path: Path) -> dict[str, list[Any]]:
    """The columns of a table by name; cells of CSV and TSV are texts."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    limit = csv.field_size_limit(_LONGEST_CELL)  # a setting of the whole process
    try:
        with open(path, "rb") as start:
            if start.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise KinfolkError(f"`{path}` is UTF-16; save it as UTF-8")
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = list(
                filter(
                    None,
                    map(_cells, file) if path.suffix.lower() == ".tsv" else _comma_rows(file, path),
                )
            )
    except OSError as error:
        raise KinfolkError(f"`{path}` is not a readable table: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise KinfolkError(f"`{path}` is empty; its first line must name the columns")
    header = rows[0]
    if len(set(header)) < len(header):
        raise KinfolkError(f"`{path}` names a column twice: {', '.join(map(repr, header))}")
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise KinfolkError(
                f"row {number} of `{path}` has {len(row)} cells, its header has {len(header)}"
            )
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(header)}


def _comma_rows(file: TextIO, path: Path) -> Iterator[list[str]]:
    """Rows of comma-separated cells. Quoted cells may contain line breaks. A quote that is not
    closed at the end of its cell is refused, because the cell would swallow the following rows."""
    reader = csv.reader(file, strict=True)
    start = 1
    try:
        for row in reader:
            yield row
            start = reader.line_num + 1
    except csv.Error as error:
        raise KinfolkError(
            f"`{path}` is not a readable table: {error}, in the row that begins in line {start}; a"
            " cell that begins with a quote must end with one, and quotes between them are written"
            ' twice ("")'
        ) from error


def _cells(line: str) -> list[str]:
    """A row of tab-separated cells. If the quotes do not match, the line is taken as unquoted, as
    many programs write it."""
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.rstrip("\r\n").split("\t")


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
        return {name: column_values(table[name]) for name in table.column_names}
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` is not a readable table: {first_line(error)}") from error


def column_values(column: Any) -> list[Any]:
    """A column as Python values; bytes of texts that are not UTF-8 become lone surrogates."""
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        several = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        values = column.cast(
            pa.large_list(pa.large_binary()) if several else pa.large_binary()
        ).to_pylist()
        return [
            [decoded(each) for each in value] if isinstance(value, list) else decoded(value)
            for value in values
        ]


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None: the column with the default name, if it exists."""

    image: str = "image"
    caption: str | None = None
    label: str | None = None
    group: str | None = None
    split: str | None = None
    anchor: str | None = None
    positive: str | None = None


def open_table(path: Path, columns: Columns | None = None) -> FileSource | PairSource:
    """Opens a CSV, TSV or Parquet table: of images, whose paths are relative to it, or of text
    pairs, if it has the columns `anchor` and `positive` and none of images (see `text_pairs`).

    Rows with the same image share it: it is decoded once, their keys are `path`, `path#2`, `path#3`
    …, and they form a group if the table has no group column. A row is refused by name if its image
    does not exist or if its caption is empty, not UTF-8 or too long. A list of captions in Parquet
    gives one sample several captions.
    """
    name = f"`{path}`"
    rows, columns = read_columns(path), columns or Columns()
    for role in ("anchor", "positive"):
        _pick(rows, role, getattr(columns, role), name)
    texts = text_columns(list(rows), columns.anchor, columns.positive)
    if texts is not None and columns.image not in rows:
        return open_pairs(
            path, rows, texts, lambda role: _pick(rows, role, getattr(columns, role), name)
        )
    if columns.image not in rows:
        require_both(name, list(rows), columns.image, columns.anchor, columns.positive)
    found = {
        role: _pick(rows, role, getattr(columns, role), name)
        for role in ("image", "caption", "label", "group", "split")
    }
    images = found["image"]
    assert images is not None
    if not images:
        raise KinfolkError(f"{name} has no rows")
    bad_type = next(
        (value for value in images if value is not None and not isinstance(value, str)), None
    )
    if bad_type is not None:
        raise KinfolkError(
            f"the image column of {name} holds {type(bad_type).__name__}; it must hold file paths,"
            " or (in Parquet) the bytes of image files"
        )
    labels, classes = encode_labels(found["label"] or [None] * len(images), name)
    captions, groups = found["caption"], found["group"]
    if groups is None and len(set(images)) < len(images):
        groups = images
    items: list[Item] = []
    paths: list[str] = []
    refused: list[tuple[str, str]] = []
    first: dict[str, int] = {}
    seen: dict[str, int] = {}
    for row, image in enumerate(images):
        seen[image] = number = seen.get(image, 0) + 1
        key = _text(image or f"(row {row + 1})") + (f"#{number}" if number > 1 else "")
        file = os.path.join(path.parent, image or "")
        reason = _why_missing(image, file)
        caption, faults = (
            (None, []) if captions is None or reason is not None else usable_captions(captions[row])
        )
        refused += (
            [(key, reason)]
            if reason is not None
            else [(f"{key}[{number}]" if number else key, fault) for number, fault in faults]
        )
        if reason is not None or (captions is not None and caption is None):
            continue
        split = split_name(_cell(found["split"], row) or "")
        group = _cell(groups, row)
        items.append(
            Item(
                key,
                labels[row],
                split,
                caption,
                None if group is None else _text(group),
                first.get(image),
            )
        )
        first.setdefault(image, len(items) - 1)
        paths.append(file)
    return FileSource(name, items, paths, classes, refused)


def _pick(rows: dict[str, list[Any]], role: str, wanted: str | None, name: str) -> list[Any] | None:
    column = wanted or role
    if column in rows:
        return rows[column]
    if wanted is None:
        return None
    parted = (
        "; its cells must be separated by commas"
        if len(rows) == 1 and ";" in next(iter(rows))
        else ""
    )
    raise UsageError(
        f"{name} has no column {column!r} for `{role}_column`; its columns are"
        f" {', '.join(map(repr, rows))}{parted}; another is chosen by `{role}_column` (--set"
        f" data.{role}_column=NAME)" + (_NAMED if role == "image" else "")
    )


def _why_missing(image: str | None, file: str) -> str | None:
    if not image:
        return "the image column is empty"
    if "\0" in image:
        return "not a valid path"
    if os.path.isfile(file):
        return None
    return "not a file" if os.path.lexists(file) else "there is no such file"


def _cell(column: list[Any] | None, row: int) -> str | None:
    return None if column is None or column[row] is None else str(column[row])


def _text(value: str) -> str:
    """Text that any table can store: bytes that are not UTF-8 are written as \\xNN."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
