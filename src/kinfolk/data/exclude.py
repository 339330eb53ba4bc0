"""Samples that are left out by a list of their keys, such as the marked samples of an audit."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from kinfolk.data.decode import Place
from kinfolk.data.source import Item, Pixels, Source
from kinfolk.errors import KinfolkError, UsageError, shown, unescaped, utf8_key
from kinfolk.files import first_line


def exclude(source: Source, path: str | None) -> Source:
    """The source without the samples that a file names in its column `key`; unchanged without a
    file. An image that is left out takes all its captions with it."""
    return source if path is None else Excluding(source, Path(path))


@final
class Excluding(Source):
    """A source without some of its samples. Everything else is passed through."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        keys, items = {utf8_key(key) for key in read_excluded(path)}, source.items()
        out = {at for at, item in enumerate(items) if utf8_key(item.key) in keys}
        self._kept = [
            at for at, item in enumerate(items) if at not in out and item.same_as not in out
        ]
        if keys and len(self._kept) == len(items):
            raise UsageError(
                f"none of the {len(keys):,} samples that `{path}` excludes is in {source.name}: it"
                f" has {shown(min(keys))}, the data has"
                f" {shown(items[0].key) if items else 'no samples'}; give a list of these samples"
            )
        place = {at: row for row, at in enumerate(self._kept)}
        self._items = [
            item if item.same_as is None else replace(item, same_as=place[item.same_as])
            for item in (items[at] for at in self._kept)
        ]
        self.name, self.classes = source.name, source.classes
        self.refused, self.native_size = source.refused, source.native_size

    def items(self) -> Sequence[Item]:
        return self._items

    def load(self, index: int) -> bytes | Pixels:
        return self._source.load(self._kept[index])

    def label(self, index: int) -> int | None:
        return self._source.label(self._kept[index])

    def path(self, index: int) -> Place | None:
        return self._source.path(self._kept[index])

    def stat(self, index: int) -> tuple[int, int] | None:
        return self._source.stat(self._kept[index])

    def keep(self, folder: str | Path) -> None:
        self._source.keep(folder)

    def release(self) -> None:
        self._source.release()


def read_excluded(path: Path) -> list[str]:
    """The keys in the column `key` of a .csv file or in the lines of a .txt file."""
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of samples to exclude; give a .csv with the column `key`,"
            " such as marked.csv of an audit, or a .txt with a key in each line"
        )
    try:
        if path.suffix.lower() == ".txt":
            return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line]
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if "key" not in (rows.fieldnames or ()):
                raise UsageError(
                    f"`{path}` has no column `key` with the samples to exclude; its columns are"
                    f" {', '.join(rows.fieldnames or ()) or 'none'}"
                )
            return [unescaped(row["key"]) for row in rows if row["key"]]
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise KinfolkError(
            f"`{path}` is not a readable list of samples ({first_line(error)})"
        ) from error
