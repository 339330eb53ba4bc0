"""Webdataset shards: `.tar` files of images, captions (`.txt`, or `.json` with "caption") and
labels (`.cls`), read in place.

The first pass reads the archives' headers and captions and records where each image is stored.
Nothing is unpacked and nothing in an archive is run. `ShardIndex` keeps the result in index files,
so that a shard is read through only once; an index file is valid while its shard has the same size
and modification time. Several shards can be named by a pattern: `shards/{000..331}.tar`,
`shards/*.tar`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

from kinfolk.data.captions import usable_captions
from kinfolk.data.labels import SPLITS, encode_labels
from kinfolk.data.prepare import Refusals, one_writer
from kinfolk.data.source import Item, Source
from kinfolk.errors import KinfolkError, shown
from kinfolk.files import read_sealed_text, remove_unfinished, write_sealed_text

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(pattern: str) -> list[Path]:
    """The `.tar` files of a pattern, in order; empty if it is not a pattern. A file of a range need
    not exist: it is reported later."""
    if not pattern.lower().endswith(".tar"):
        return []
    if (found := _RANGE.search(pattern)) is not None:
        first, last = found.groups()
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        names = [pattern[: found.start()] + number + pattern[found.end() :] for number in numbers]
        return [
            path
            for name in names
            for path in (expand(name) if _RANGE.search(name) else [Path(name)])
        ]
    return (
        [Path(name) for name in sorted(glob.glob(pattern))]
        if "*" in pattern or "?" in pattern
        else []
    )


@final
class ShardSource(Source):
    """Images inside archives."""

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
        self._times = {
            path: os.stat(path).st_mtime_ns for path in dict.fromkeys(path for path, *_ in places)
        }

    def load(self, index: int) -> bytes:
        path, offset, length = self._places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def path(self, index: int) -> tuple[str, int, int]:
        return self._places[index]

    def stat(self, index: int) -> tuple[int, int]:
        path, _, length = self._places[index]
        return length, self._times[path]

    def keep(self, folder: str | Path) -> None:
        self._index.keep(folder)

    def release(self) -> None:
        super().release()
        self._places = []


def find_shards(path: Path) -> dict[str, list[Path]]:
    """The archives of each split: a single `.tar`, or those of a folder or of its `train/`, `test/`
    …, if it contains no image files."""
    if path.is_file():
        return {"train": [path]}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise KinfolkError(
            f"the folder `{shown(str(path))}` can't be read: {error.strerror}"
        ) from error
    folders = {
        entry.name: entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")
    }
    found: dict[str, list[Path]] = {"train": _tars(path)}
    for name, folder in folders.items():
        found.setdefault(SPLITS.get(name, name), []).extend(_tars(folder))
    images = any(entry.suffix.lower().lstrip(".") in IMAGES for entry in entries)
    whole = all(name in SPLITS and _tars(folder) for name, folder in folders.items())
    return {split: tars for split, tars in found.items() if tars} if whole and not images else {}


def open_shards(
    splits: dict[str, list[Path]], name: str, index_dir: str | Path | None = None
) -> ShardSource:
    """The samples of all archives, in the order of archives and of keys within them; keys are
    `archive/key`.

    A sample without an image, with two images, or (if any sample has a caption) without a usable
    caption is refused by name, and so is an archive that can't be read. Archives that have not
    changed since their index was written to `index_dir` are not read.
    """
    rows: list[tuple[str, str, tuple[str, int, int], Entry]] = []
    refused: Refusals = []
    names = shard_names([path for tars in splits.values() for path in tars])
    index = ShardIndex(index_dir)
    for split, tars in splits.items():
        for path in tars:
            for key, entry in index.usable(path, names[path], refused):
                assert entry.image is not None
                rows.append((key, split, (os.path.abspath(path), *entry.image), entry))
    captioned = any(entry.caption is not None for *_, entry in rows)
    labels, classes = encode_labels([entry.label for *_, entry in rows], name)
    items: list[Item] = []
    places: list[tuple[str, int, int]] = []
    for (key, split, place, entry), label in zip(rows, labels, strict=True):
        caption, faults = usable_captions(entry.caption) if captioned else (None, [])
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
        return sorted(
            entry
            for entry in folder.iterdir()
            if entry.suffix.lower() == ".tar" and not entry.name.startswith(".")
        )
    except OSError:  # treated like an archive that can't be read, which is refused by name
        return [folder]


def shard_names(paths: list[Path]) -> dict[Path, str]:
    """The name of each archive in keys: its file name, with its folder if two have the same
    name."""
    names = Counter(path.name for path in paths)
    chosen = {
        path: path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}"
        for path in paths
    }
    return {path: shown(name) for path, name in chosen.items()}


IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20
_VERSION = 4


class Entry(NamedTuple):
    """The files of one key in a shard.

    Args:
        image: offset and length of the image within the shard.
        caption: a text (with lone surrogates for bytes that are not UTF-8) or a list; None if there
            is none.
        label: the text of its `.cls`.
        fault: why it can't be used.
    """

    key: str
    image: tuple[int, int] | None
    caption: Any
    label: str | None
    fault: str | None


class Shard(NamedTuple):
    """The entries of an archive in order of first appearance, and what is wrong with it; entries
    before a damaged part are kept."""

    entries: list[Entry]
    fault: str | None


@final
class ShardIndex:
    """The entries of shards, from index files in `folder` or by reading the shard.

    Args:
        folder: of the index files; None: there are none.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._new: dict[Path, tuple[list[int], Shard]] = {}

    def of(self, path: Path) -> Shard:
        """The entries of an archive."""
        try:
            status = path.stat()
        except OSError as error:
            return Shard([], f"not a readable archive: {error}")
        state = [status.st_size, status.st_mtime_ns]
        known = None if self._folder is None else _read(_place(self._folder, path), state)
        if known is None:
            known = read_shard(path)
            self._new[path] = state, known
        return known

    def usable(self, path: Path, name: str, refused: Refusals) -> list[tuple[str, Entry]]:
        """The entries of an archive that have an image, with their keys; adds the others to
        `refused`."""
        shard, found = self.of(path), []
        if shard.fault is not None:
            refused.append((name, shard.fault))
        for entry in shard.entries:
            if entry.fault is not None or entry.image is None:
                refused.append((f"{name}/{entry.key}", entry.fault or "there is no image"))
            else:
                found.append((f"{name}/{entry.key}", entry))
        return found

    def keep(self, folder: str | Path) -> None:
        """Writes index files for the shards that had to be read, and forgets them."""
        if not self._new:
            return
        with one_writer(Path(folder) / "shards"):
            remove_unfinished(Path(folder) / "shards")
            for path, (state, shard) in self._new.items():
                text = json.dumps([_VERSION, state, shard.fault, shard.entries])
                write_sealed_text(_place(Path(folder), path), text)
        self._new.clear()


def read_shard(path: Path) -> Shard:
    """Reads the headers of an archive and its small files."""
    found: dict[str, _Files] = {}
    fault = None
    try:
        # "r:" refuses compressed archives, whose parts can't be read in place.
        with open(path, "rb") as file, tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # there may be millions
                if not member.isdir():
                    _add_member(found, member, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        text = " ".join(str(error).split())
        fault = f"cut short or damaged: {text}" if found else f"not a readable archive: {text}"
    return Shard([_entry(key, files) for key, files in found.items()], fault)


@dataclass
class _Files:
    """The files of one key: the location of the image and the bytes of the small files (None for
    one that is too long)."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes | None] = field(default_factory=dict)
    fault: str | None = None


def _add_member(found: dict[str, _Files], member: tarfile.TarInfo, file: BinaryIO) -> None:
    """Adds a file to the entry of its name, unless it is hidden or of no use."""
    folder, _, base = member.name.rpartition("/")
    stem, _, extension = base.partition(".")
    extension = extension.lower()
    if not stem or extension not in (*IMAGES, "txt", "json", "cls"):
        return
    name = f"{folder}/{stem}".removeprefix("./").removeprefix("/")
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    files = found.setdefault(name, _Files())
    if not member.isreg() or member.sparse is not None:
        files.fault = f"its .{extension} is not a regular file"
    elif extension in IMAGES:
        files.fault = "it has two images" if files.image is not None else files.fault
        files.image = member.offset_data, member.size
    else:
        files.fault = f"it has two .{extension}" if extension in files.texts else files.fault
        file.seek(member.offset_data)
        files.texts[extension] = file.read(member.size) if member.size <= _LONGEST_TEXT else None


def _entry(key: str, files: _Files) -> Entry:
    """The entry of one key. Its caption is the text, or "caption" (or "captions", a list) in its
    JSON, or None."""
    caption, fault = None, files.fault
    if "txt" in files.texts:
        text = files.texts["txt"]
        if text is None:
            text = b"?" * _LONGEST_TEXT  # refused as too long
        caption = text.strip().decode("utf-8", "surrogateescape")
    elif "json" in files.texts:
        try:
            document = json.loads(files.texts["json"] or b"")
            if isinstance(document, dict):
                caption = document.get("caption", document.get("captions"))
        except (ValueError, RecursionError):
            fault = fault or "its .json can't be read"
        if not isinstance(caption, str | list | None):
            fault = fault or f"its caption is not a text but {type(caption).__name__}"
            caption = None
    raw = files.texts.get("cls")
    label = None if raw is None else raw.decode("utf-8", "replace").strip()
    return Entry(key, files.image, caption, label, fault)


def _place(folder: Path, shard: Path) -> Path:
    name = hashlib.blake2b(
        os.path.abspath(shard).encode("utf-8", "surrogateescape"), digest_size=8
    ).hexdigest()
    return folder / "shards" / f"{name}.json"


def _read(place: Path, state: list[int]) -> Shard | None:
    """The contents of an index file, if it is intact and belongs to this state of the shard."""
    try:
        version, of, fault, entries = json.loads(read_sealed_text(place))
        if (version, of) != (_VERSION, state):
            return None
        return Shard(
            [
                Entry(key, None if image is None else tuple(image), *rest)
                for key, image, *rest in entries
            ],
            fault,
        )
    except (KinfolkError, OSError, ValueError, TypeError):
        return None
