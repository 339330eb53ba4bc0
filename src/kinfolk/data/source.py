"""Data sources: samples with keys, splits, labels and images."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from kinfolk.data.decode import Place, read_bytes
from kinfolk.data.labels import (
    Caption,
    Ints,
    encode_labels,
    read_columns,
    same_type,
    split_name,
    usable_captions,
)
from kinfolk.data.sample_table import Samples
from kinfolk.errors import KinfolkError, UsageError, short, unescape_cell, utf8_key

Pixels = npt.NDArray[Any]
Refusals = list[tuple[str, str]]
"""(path or key, reason) of everything that was refused."""
SPLIT_RANK = {"train": 0, "val": 1, "test": 2}


@dataclass(frozen=True)
class Item:
    """One sample: `label` is None if there is none, or known only after `load`; `same_as` is the
    index of the earlier item with its image; `origin` is where the source finds the image."""

    key: str
    label: int | None = None
    split: str = "train"
    caption: Caption | None = None
    group: str | None = None
    same_as: int | None = None
    origin: Any = None


class Source(ABC):
    """Images with keys, splits and perhaps labels. Nothing is read before `load`. `refused`:
    without being read. `native_size`: (height, width) if all images have the same. `samples`: of
    streamed data."""

    has_texts: bool = False
    samples: Samples | None = None

    def __init__(
        self,
        name: str,
        items: Sequence[Item],
        *,
        classes: list[str] | None = None,
        refused: Refusals | None = None,
        native_size: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.classes, self.native_size = name, classes, native_size
        self.refused: Refusals = refused or []
        self._items = items

    @abstractmethod
    def load(self, index: int) -> bytes | Pixels:
        """The bytes of an image file, or pixels (H, W) or (H, W, 1 | 3 | 4), uint8."""

    def items(self) -> Sequence[Item]:
        return self._items

    def label(self, index: int) -> int | None:
        """Called after `load(index)`."""
        label = self._items[index].label
        return None if label is None or label < 0 else label

    def path(self, index: int) -> Place | None:
        """The file, or part of one, that holds an item, for workers to read."""
        return None

    def stat(self, index: int) -> tuple[int, int] | None:
        """(size in bytes, modification time in ns) of the file, if known."""
        return None

    def release(self) -> None:
        self._items = []


@final
class FileSource(Source):
    """The origin of an item is its `Place`."""

    def load(self, index: int) -> bytes:
        return read_bytes(self.path(index))

    def path(self, index: int) -> Place:
        place: Place = self._items[index].origin
        return place

    def stat(self, index: int) -> tuple[int, int] | None:
        place = self.path(index)
        try:
            found = os.stat(place if isinstance(place, str) else place[0])
        except OSError:
            return None
        return found.st_size if isinstance(place, str) else place[2], found.st_mtime_ns


def arrange(items: Sequence[Item]) -> list[int]:
    splits = [item.split for item in items]
    order = range(len(splits))
    return sorted(order, key=lambda index: (SPLIT_RANK.get(splits[index], 3), splits[index]))


def tabulate(
    items: Sequence[Item], classes: list[str] | None, labels: Ints | None = None, **columns: Any
) -> Samples:
    """`items` are in the order of ids. Numbers that are not given are zero, labels the items'."""
    if labels is None:
        labels = np.array([-1 if item.label is None else item.label for item in items])
    nothing = np.zeros(len(items), dtype=np.int64)
    captions = same_type([item.caption for item in items])
    groups = [item.group for item in items]
    numbers = dict.fromkeys(("widths", "heights", "sizes_bytes", "modified_ns"), nothing)
    return Samples(
        ids=np.arange(len(items)),
        keys=[item.key for item in items],
        splits=[item.split for item in items],
        labels=labels if (labels >= 0).any() else None,
        classes=classes,
        captions=captions if any(each is not None for each in captions) else None,
        groups=groups if any(each is not None for each in groups) else None,
        **{**numbers, "digests": [None] * len(items), **columns},
    )


def all_refused(
    name: str, refused: Sequence[tuple[str, str]], what: str = "images"
) -> KinfolkError:
    if not refused:
        return KinfolkError(f"{name} holds no {what}")
    path, reason = refused[0]
    return KinfolkError(
        f"all {len(refused):,} {what} of {name} were refused; the first is {short(path)}: {reason}"
    )


@final
class TableRows:
    def __init__(
        self,
        number: int,
        columns: Mapping[str, Sequence[Any] | None],
        name: str,
        classes: list[str] | None = None,
    ) -> None:
        self.items: list[Item] = []
        self.refused: Refusals = []
        self._columns = columns
        labels = columns["label"] or [None] * number
        self._labels, self.classes = encode_labels(labels, name, classes)

    def add(
        self,
        row: int,
        key: str,
        origin: Any,
        *,
        split: str = "train",
        same_as: int | None = None,
        caption: Caption | None = None,
    ) -> bool:
        """Returns False if the row is refused for its caption."""
        captions, groups, splits = (self._columns[role] for role in ("caption", "group", "split"))
        if captions is not None:
            caption, faults = usable_captions(captions[row])
            self.refused += [(f"{key}[{part}]" if part else key, why) for part, why in faults]
            if caption is None:
                return False
        split = split_name(split if splits is None else str(splits[row] or ""))
        group = None if groups is None or groups[row] is None else as_utf8(str(groups[row]))
        self.items.append(Item(key, self._labels[row], split, caption, group, same_as, origin))
        return True


def as_utf8(text: str) -> str:
    """Text that any table can store: other bytes are written as \\xNN."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# Samples that are left out, such as the marked samples of an audit

AnySource = TypeVar("AnySource", bound=Source)


def exclude(source: AnySource, path: str | None) -> AnySource:
    if path is None:
        return source
    keys, items = {utf8_key(key) for key in read_excluded(Path(path))}, source.items()
    out = {at for at, item in enumerate(items) if utf8_key(item.key) in keys}
    kept = [at for at, item in enumerate(items) if not {at, item.same_as} & out]
    if keys and len(kept) == len(items):
        has = short(items[0].key) if items else "no samples"
        raise UsageError(
            f"none of the {len(keys):,} samples that `{path}` excludes is in {source.name}: it has"
            f" {short(min(keys))}, the data has {has}; give a list of these samples"
        )
    row_of: dict[int | None, int] = {at: row for row, at in enumerate(kept)}
    smaller = copy.copy(source)
    smaller._items = [replace(items[at], same_as=row_of.get(items[at].same_as)) for at in kept]
    return smaller


def read_excluded(path: Path) -> list[str]:
    columns = read_columns(path) if path.is_file() else {}
    if "key" not in columns:
        raise UsageError(
            f"`{path}` has no samples to exclude; give a table (.csv) with the column `key`"
        )
    return [unescape_cell(str(key)) for key in columns["key"] if key]
