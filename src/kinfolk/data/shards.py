"""Webdataset shards: `.tar` files of images, captions (`.txt`, or `.json` with "caption") and labels (`.cls`), read in place.

The first pass reads the archives' headers and captions and notes where each image lies (`shard_index.py`); the images stay where they are.
Nothing is unpacked and nothing in an archive is run.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import final

from kinfolk.data.captions import sort_out
from kinfolk.foreign import shown
from kinfolk.data.labels import encode_labels
from kinfolk.data.shard_index import IMAGES, Entry, ShardIndex
from kinfolk.data.source import Item, Source
from kinfolk.data.splits import SPLITS
from kinfolk.errors import KinfolkError

Refusals = list[tuple[str, str]]


@final
class ShardSource(Source):
    """Images that lie in archives."""

    def __init__(
        self,
        name: str,
        items: list[Item],
        places: list[tuple[str, int, int]],
        classes: list[str] | None,
        refused: Refusals,
        index: ShardIndex,
    ) -> None:
        self.name, self.classes, self.refused, self.native_size = name, classes, refused, None
        self._items, self._places, self._index = items, places, index
        self._times = {path: os.stat(path).st_mtime_ns for path in dict.fromkeys(path for path, *_ in places)}

    def items(self) -> list[Item]:
        return self._items

    def load(self, index: int) -> bytes:
        path, offset, length = self._places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def label(self, index: int) -> int | None:
        return self._items[index].label

    def path(self, index: int) -> tuple[str, int, int]:
        return self._places[index]

    def stat(self, index: int) -> tuple[int, int]:
        path, _, length = self._places[index]
        return length, self._times[path]

    def keep(self, folder: str | Path) -> None:
        self._index.keep(folder)

    def release(self) -> None:
        self._items, self._places = [], []


def find_shards(path: Path) -> dict[str, list[Path]]:
    """The archives of each split: a single `.tar`; or those of a folder, or of its `train/`, `test/` …, if it holds no images besides."""
    if path.is_file():
        return {"train": [path]}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise KinfolkError(f"the folder `{shown(str(path))}` can't be read: {error.strerror}") from error
    folders = {entry.name: entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    found: dict[str, list[Path]] = {"train": _tars(path)}
    for name, folder in folders.items():
        found.setdefault(SPLITS.get(name, name), []).extend(_tars(folder))
    images = any(entry.suffix.lower().lstrip(".") in IMAGES for entry in entries)
    whole = all(name in SPLITS and _tars(folder) for name, folder in folders.items())
    return {split: tars for split, tars in found.items() if tars} if whole and not images else {}


def open_shards(splits: dict[str, list[Path]], name: str, index_dir: str | Path | None = None) -> ShardSource:
    """The samples of all archives, in the order of archives and of keys within them; keys are `archive/key`.

    A sample without an image, with two of them, or (where any sample has a caption) without a good caption is refused by name; so is an
    archive that can't be read. Archives that have not changed since their index was kept in `index_dir` are not read.
    """
    rows: list[tuple[str, str, tuple[str, int, int], Entry]] = []
    refused: Refusals = []
    names = shard_names([path for tars in splits.values() for path in tars])
    index = ShardIndex(index_dir)
    for split, tars in splits.items():
        for path in tars:
            shard = index.of(path)
            if shard.fault is not None:
                refused.append((names[path], shard.fault))
            for entry in shard.entries:
                key = f"{names[path]}/{entry.key}"
                if entry.fault is not None or entry.image is None:
                    refused.append((key, entry.fault or "there is no image"))
                    continue
                rows.append((key, split, (os.path.abspath(path), *entry.image), entry))
    captioned = any(entry.caption is not None for *_, entry in rows)
    labels, classes = encode_labels([entry.label for *_, entry in rows], name)
    items: list[Item] = []
    places: list[tuple[str, int, int]] = []
    for (key, split, place, entry), label in zip(rows, labels, strict=True):
        caption, faults = sort_out(entry.caption) if captioned else (None, [])
        refused += [(f"{key}[{number}]" if number else key, fault) for number, fault in faults]
        if captioned and caption is None:
            continue
        items.append(Item(key, label, split, caption))
        places.append(place)
    if not items and not refused:
        raise KinfolkError(f"{name} holds no images")
    return ShardSource(name, items, places, classes, refused, index)


def _tars(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() == ".tar" and not entry.name.startswith("."))
    except OSError:  # taken for an archive that can't be read, among others that can, it is refused by its name
        return [folder]


def shard_names(paths: list[Path]) -> dict[Path, str]:
    """How keys call each archive: by its name, or with its folder where two have one name."""
    names = Counter(path.name for path in paths)
    chosen = {path: path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths}
    return {path: shown(name) for path, name in chosen.items()}
