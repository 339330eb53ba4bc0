"""What lies where in a webdataset shard, and files that remember it, so that a shard is read through once.

An index file belongs to its shard as long as that has the same size and time of modification.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from kinfolk.files import write_text

IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20
_VERSION = 3


class Entry(NamedTuple):
    """What a shard holds under one key.

    Args:
        image: offset and length of the image within the shard.
        caption: a text, with lone surrogates for what is not UTF-8, or a list; None where there is none.
        label: the text of its `.cls`.
        fault: what is wrong with it.
    """

    key: str
    image: tuple[int, int] | None
    caption: Any
    label: str | None
    fault: str | None


class Shard(NamedTuple):
    """The entries of an archive in order of first appearance, and what is wrong with it; what stands before a damage is kept."""

    entries: list[Entry]
    fault: str | None


@final
class ShardIndex:
    """Entries by shard: from the index files in `folder`, or by reading the shard.

    Args:
        folder: where index files may lie; None: nowhere.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._new: dict[Path, tuple[list[int], Shard]] = {}

    def of(self, path: Path) -> Shard:
        """What the archive holds."""
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

    def keep(self, folder: str | Path) -> None:
        """Writes index files for the shards that had to be read."""
        for path, (state, shard) in self._new.items():
            place = _place(Path(folder), path)
            place.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps([_VERSION, state, shard.fault, shard.entries])
            write_text(place, f"{_digest(text)}\n{text}")
        self._new.clear()


def read_shard(path: Path) -> Shard:
    """Reads the headers of an archive and the small files beside the images."""
    found: dict[str, _Files] = {}
    fault = None
    try:
        # "r:" takes no compressed archive: its parts can't be read in place.
        with tarfile.open(path, "r:") as archive, open(path, "rb") as file:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # of millions of headers none is wanted twice
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if stem and extension and not member.isdir():  # not hidden, and of some kind
                    name = f"{folder}/{stem}".removeprefix("./").removeprefix("/")
                    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                    _note(found.setdefault(name, _Files()), extension.lower(), member, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        text = " ".join(str(error).split())
        fault = f"cut short or damaged: {text}" if found else f"not a readable archive: {text}"
    return Shard([_entry(key, files) for key, files in found.items()], fault)


@dataclass
class _Files:
    """The files of one key: where the image lies, and the small ones' bytes; None for one that is too long."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes | None] = field(default_factory=dict)
    fault: str | None = None


def _note(files: _Files, extension: str, member: tarfile.TarInfo, archive: Any) -> None:
    if extension not in IMAGES and extension not in ("txt", "json", "cls"):
        return
    if not member.isreg() or member.sparse is not None:
        files.fault = f"its .{extension} is not a regular file"
    elif extension in IMAGES:
        files.fault = "it has two images" if files.image is not None else files.fault
        files.image = member.offset_data, member.size
    else:
        files.fault = f"it has two .{extension}" if extension in files.texts else files.fault
        archive.seek(member.offset_data)
        files.texts[extension] = archive.read(member.size) if member.size <= _LONGEST_TEXT else None


def _entry(key: str, files: _Files) -> Entry:
    """With the text as its caption, or what its JSON calls "caption" (or "captions", a list), or None where there is neither."""
    caption, fault = None, files.fault
    if "txt" in files.texts:
        text = files.texts["txt"]
        caption = "?" * _LONGEST_TEXT if text is None else text.strip().decode("utf-8", "surrogateescape")  # refused as too long
    elif "json" in files.texts:
        try:
            document = json.loads(files.texts["json"] or b"")
            caption = document.get("caption", document.get("captions")) if isinstance(document, dict) else None
        except (ValueError, RecursionError):
            fault = fault or "its .json can't be read"
        if not isinstance(caption, str | list | None):
            caption, fault = None, fault or f"its caption is not a text but {type(caption).__name__}"
    return Entry(key, files.image, caption, _label(files), fault)


def _label(files: _Files) -> str | None:
    text = files.texts.get("cls")
    return None if text is None else text.decode("utf-8", "replace").strip()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _place(folder: Path, shard: Path) -> Path:
    name = hashlib.blake2b(os.path.abspath(shard).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return folder / "shards" / f"{name}.json"


def _read(place: Path, state: list[int]) -> Shard | None:
    """What an index file says, if it is whole and of this state of the shard."""
    try:
        digest, _, text = place.read_text(encoding="utf-8").partition("\n")
        if digest != _digest(text):
            return None
        version, of, fault, entries = json.loads(text)
        if (version, of) != (_VERSION, state):
            return None
        return Shard([Entry(key, None if image is None else tuple(image), *rest) for key, image, *rest in entries], fault)
    except (OSError, ValueError, TypeError):
        return None
