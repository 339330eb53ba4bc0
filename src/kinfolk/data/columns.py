"""The columns of a table file, as they are written: CSV, TSV and Parquet."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from kinfolk.data.captions import decoded
from kinfolk.errors import KinfolkError
from kinfolk.files import first_line

_LONGEST_CELL = 1 << 27


def read_columns(path: Path) -> dict[str, list[Any]]:
    """The columns of a CSV, TSV or Parquet table by name; cells of the first two are text."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    limit = csv.field_size_limit(_LONGEST_CELL)  # of all readers of the process
    try:
        with open(path, "rb") as start:
            if start.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise KinfolkError(f"`{path}` is UTF-16; save it as UTF-8")
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = list(filter(None, map(_cells, file) if path.suffix.lower() == ".tsv" else _comma_rows(file, path)))
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
            raise KinfolkError(f"row {number} of `{path}` has {len(row)} cells, its header has {len(header)}")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(header)}


def _comma_rows(file: TextIO, path: Path) -> Iterator[list[str]]:
    """Cells may be quoted, and then hold line breaks. A quote that does not close where its cell ends is refused: it would take in the rows
    after it."""
    reader = csv.reader(file, strict=True)
    start = 1
    try:
        for row in reader:
            yield row
            start = reader.line_num + 1
    except csv.Error as error:
        raise KinfolkError(
            f"`{path}` is not a readable table: {error}, in the row that begins in line {start}; a cell that begins with a quote must end "
            'with one, and quotes between them are written twice ("")'
        ) from error


def _cells(line: str) -> list[str]:
    """A row of tab-separated cells. One is quoted if its quote closes where it ends; else the line has none, as many programs write it."""
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.rstrip("\r\n").split("\t")


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
        return {name: _values(table[name]) for name in table.column_names}
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` is not a readable table: {first_line(error)}") from error


def _values(column: Any) -> list[Any]:
    """A column as Python values; a text that is not UTF-8 keeps its bytes, as lone surrogates."""
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        several = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        values = column.cast(pa.large_list(pa.large_binary()) if several else pa.large_binary()).to_pylist()
        return [[decoded(each) for each in value] if isinstance(value, list) else decoded(value) for value in values]
