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

from kinfolk.errors import KinfolkError
from kinfolk.files import read_sealed_text, write_sealed_text

IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20
_VERSION = 4
_BLOCK = 512
_END = bytes(_BLOCK)
_HARMLESS = frozenset((b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"comment"))


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
            write_sealed_text(place, text)
        self._new.clear()


def read_shard(path: Path) -> Shard:
    """Reads the headers of an archive and the small files beside the images."""
    found: dict[str, _Files] = {}
    fault = None
    try:
        with open(path, "rb") as file:
            members = plain_members(file.fileno())
            if members is not None:
                for name, offset, size in members:
                    _place_member(found, name, True, offset, size, file)
                return Shard([_entry(key, files) for key, files in found.items()], None)
            # "r:" takes no compressed archive: its parts can't be read in place.
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # of millions of headers none is wanted twice
                    if not member.isdir():
                        regular = member.isreg() and member.sparse is None
                        _place_member(found, member.name, regular, member.offset_data, member.size, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        text = " ".join(str(error).split())
        fault = f"cut short or damaged: {text}" if found else f"not a readable archive: {text}"
    return Shard([_entry(key, files) for key, files in found.items()], fault)


def plain_members(handle: int) -> list[tuple[str, int, int]] | None:
    """(name, offset, size) of every file of a whole, ordinary archive, several times as fast as by `tarfile`; None for one that holds
    anything else than regular files and folders, is damaged or is cut: `tarfile` then says what."""
    if not hasattr(os, "pread"):
        return None
    found: list[tuple[str, int, int]] = []
    place, long_name = 0, None
    while True:
        header = os.pread(handle, _BLOCK, place)
        if header == _END:
            return found
        size_field, kind, magic = header[124:136], header[156:157], header[257:263]
        if len(header) < _BLOCK or magic not in (b"ustar\0", b"ustar ") or size_field[0] & 0x80:
            return None
        try:
            size, told = int(size_field.strip(b" \0") or b"0", 8), int(header[148:156].strip(b" \0"), 8)
            if told != sum(header) - sum(header[148:156]) + 8 * 32:
                return None
            start, place = place + _BLOCK, place + _BLOCK + -(-size // _BLOCK) * _BLOCK
            if kind == b"x":
                long_name = _pax_name(os.pread(handle, size, start), long_name)
                continue
            name = _text_of(header[:100])
            prefix = _text_of(header[345:500]) if magic == b"ustar\0" else ""
        except ValueError:
            return None
        name, long_name = long_name or (f"{prefix}/{name}" if prefix else name), None
        if kind in (b"0", b"\0") and not name.endswith("/"):
            found.append((name, start, size))
        elif kind != b"5":
            return None


def _pax_name(records: bytes, name: str | None) -> str | None:
    """The path that the records before a header give; refuses what would change more than the name."""
    while records.rstrip(b"\0"):
        length, _, rest = records.partition(b" ")
        record = rest[: int(length) - len(length) - 1]
        key, _, value = record.removesuffix(b"\n").partition(b"=")
        if key == b"path":
            name = value.decode("utf-8")
        elif key not in _HARMLESS:
            raise ValueError(key)
        records = records[int(length) :]
    return name


def _text_of(field_: bytes) -> str:
    return field_.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _place_member(found: dict[str, _Files], path: str, regular: bool, offset: int, size: int, file: Any) -> None:
    folder, _, base = path.rpartition("/")
    stem, _, extension = base.partition(".")
    if stem and extension:  # not hidden, and of some kind
        name = f"{folder}/{stem}".removeprefix("./").removeprefix("/")
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        _note(found.setdefault(name, _Files()), extension.lower(), regular, offset, size, file)


@dataclass
class _Files:
    """The files of one key: where the image lies, and the small ones' bytes; None for one that is too long."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes | None] = field(default_factory=dict)
    fault: str | None = None


def _note(files: _Files, extension: str, regular: bool, offset: int, size: int, archive: Any) -> None:
    if extension not in IMAGES and extension not in ("txt", "json", "cls"):
        return
    if not regular:
        files.fault = f"its .{extension} is not a regular file"
    elif extension in IMAGES:
        files.fault = "it has two images" if files.image is not None else files.fault
        files.image = offset, size
    else:
        files.fault = f"it has two .{extension}" if extension in files.texts else files.fault
        archive.seek(offset)
        files.texts[extension] = archive.read(size) if size <= _LONGEST_TEXT else None


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


def _place(folder: Path, shard: Path) -> Path:
    name = hashlib.blake2b(os.path.abspath(shard).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return folder / "shards" / f"{name}.json"


def _read(place: Path, state: list[int]) -> Shard | None:
    """What an index file says, if it is whole and of this state of the shard."""
    try:
        version, of, fault, entries = json.loads(read_sealed_text(place))
        if (version, of) != (_VERSION, state):
            return None
        return Shard([Entry(key, None if image is None else tuple(image), *rest) for key, image, *rest in entries], fault)
    except (KinfolkError, OSError, ValueError, TypeError):
        return None
