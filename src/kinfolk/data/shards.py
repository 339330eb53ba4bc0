"""Webdataset shards: `.tar` files of images, captions (`.txt`, or `.json` with "caption") and labels (`.cls`), read in place.

The first pass reads the archives' headers and captions and notes where each image lies; the images stay where they are. Nothing is unpacked
and nothing in an archive is run.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from kinfolk.data.captions import sort_out
from kinfolk.data.difference import shown
from kinfolk.data.folder import SPLITS
from kinfolk.data.labels import encode_labels
from kinfolk.data.sources import Item, Source
from kinfolk.errors import KinfolkError

_IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20

Refusals = list[tuple[str, str]]


@dataclass
class _Sample:
    """What an archive holds under one key: where the image lies, and the small files' bytes."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes | None] = field(default_factory=dict)
    fault: str | None = None


@final
class ShardSource(Source):
    """Images that lie in archives."""

    def __init__(
        self, name: str, items: list[Item], places: list[tuple[str, int, int]], classes: list[str] | None, refused: Refusals
    ) -> None:
        self.name, self.classes, self.refused, self.native_size = name, classes, refused, None
        self._items, self._places = items, places
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


def find_shards(path: Path) -> dict[str, list[Path]]:
    """The archives of each split: a single `.tar`; or those of a folder, or of its `train/`, `test/` …, if it holds no images besides."""
    if path.is_file():
        return {"train": [path]}
    folders = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")}
    found: dict[str, list[Path]] = {"train": _tars(path)}
    for name, folder in folders.items():
        found.setdefault(SPLITS.get(name, name), []).extend(_tars(folder))
    images = any(entry.suffix.lower().lstrip(".") in _IMAGES for entry in path.iterdir())
    whole = all(name in SPLITS and _tars(folder) for name, folder in folders.items())
    return {split: tars for split, tars in found.items() if tars} if whole and not images else {}


def open_shards(splits: dict[str, list[Path]], name: str) -> ShardSource:
    """The samples of all archives, in the order of archives and of keys within them; keys are `archive/key`.

    A sample without an image, with two of them, or (where any sample has a caption) without a good caption is refused by name; so is an
    archive that can't be read.
    """
    rows: list[tuple[str, str, str, tuple[str, int, int], Any, Any]] = []
    refused: Refusals = []
    names = _names([path for tars in splits.values() for path in tars])
    for split, tars in splits.items():
        for path in tars:
            samples, fault = _index(path)
            if fault is not None:
                refused.append((names[path], fault))
            for key, sample in samples.items():
                full = f"{names[path]}/{key}"
                if sample.fault is not None or sample.image is None:
                    refused.append((full, sample.fault or "there is no image"))
                    continue
                rows.append((full, split, names[path], (os.path.abspath(path), *sample.image), _caption(sample), sample.texts.get("cls")))
    captioned = any(caption is not None for *_, caption, _ in rows)
    labels, classes = encode_labels([None if label is None else label.decode("utf-8", "replace").strip() for *_, label in rows], name)
    items: list[Item] = []
    places: list[tuple[str, int, int]] = []
    for (key, split, _, place, value, _), label in zip(rows, labels, strict=True):
        caption, faults = sort_out(value) if captioned else (None, [])
        refused += [(f"{key}[{number}]" if number else key, fault) for number, fault in faults]
        if captioned and caption is None:
            continue
        items.append(Item(key, label, split, caption))
        places.append(place)
    if not items and not refused:
        raise KinfolkError(f"{name} holds no images")
    return ShardSource(name, items, places, classes, refused)


def _index(path: Path) -> tuple[dict[str, _Sample], str | None]:
    """Every key of one archive, in order of first appearance, and what is wrong with the archive; what stands before a damage is kept."""
    samples: dict[str, _Sample] = {}
    try:
        # "r:" takes no compressed archive: its parts can't be read in place.
        with tarfile.open(path, "r:") as archive, open(path, "rb") as file:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if stem and extension and not member.isdir():  # not hidden, and of some kind
                    name = f"{folder}/{stem}".removeprefix("./").removeprefix("/")
                    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                    _note(samples.setdefault(name, _Sample()), extension.lower(), member, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        text = " ".join(str(error).split())
        return samples, f"cut short or damaged: {text}" if samples else f"not a readable archive: {text}"
    return samples, None


def _note(sample: _Sample, extension: str, member: tarfile.TarInfo, file: Any) -> None:
    if extension not in _IMAGES and extension not in ("txt", "json", "cls"):
        return
    if not member.isreg() or member.sparse is not None:
        sample.fault = f"its .{extension} is not a regular file"
    elif extension in _IMAGES:
        sample.fault = "it has two images" if sample.image is not None else sample.fault
        sample.image = member.offset_data, member.size
    else:
        file.seek(member.offset_data)
        sample.texts[extension] = file.read(member.size) if member.size <= _LONGEST_TEXT else None


def _caption(sample: _Sample) -> Any:
    """The text, or what its JSON calls "caption" (or "captions", a list); None where there is neither."""
    if "txt" in sample.texts:
        text = sample.texts["txt"]
        return "?" * _LONGEST_TEXT if text is None else text.strip()  # refused as too long
    content = sample.texts.get("json")
    if content is None:
        return "" if "json" in sample.texts else None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    found = document.get("caption", document.get("captions")) if isinstance(document, dict) else None
    return found if isinstance(found, str | list) else None


def _tars(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() == ".tar" and not entry.name.startswith("."))


def _names(paths: list[Path]) -> dict[Path, str]:
    """How keys call each archive: by its name, or with its folder where two have one name."""
    names = Counter(path.name for path in paths)
    chosen = {path: path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths}
    return {path: shown(name) for path, name in chosen.items()}
