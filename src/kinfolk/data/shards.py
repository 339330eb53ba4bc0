"""Webdataset shards: `.tar` files of images, captions (`.txt`, or `.json` with "caption") and
labels (`.cls`), read in place.

The first pass reads the archives' headers and captions into a table of samples, in a file that
later runs and all ranks map; its name is a digest of path, size, time and readability of each
shard.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kinfolk.data.labels import SPLITS, encode_labels, group_ids, same_type, usable_captions
from kinfolk.data.prepare import one_writer
from kinfolk.data.sample_table import Places, Samples, TextColumn
from kinfolk.data.source import SPLIT_RANK, FileSource, Item, Refusals, all_refused
from kinfolk.errors import KinfolkError, short
from kinfolk.files import read_sealed_text, remove_unfinished, write_sealed_text

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(pattern: str) -> list[Path]:
    """The `.tar` files of a pattern, `{000..331}` or `*`; empty if it is none. A file of a range
    need not exist: it is reported later."""
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


def find_shards(path: Path) -> dict[str, list[Path]]:
    """The archives of each split: a single `.tar`, or those of a folder or of its `train/`, `test/`
    …, if it contains no image files."""
    if path.is_file():
        return {"train": [path]}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise KinfolkError(
            f"the folder `{short(str(path))}` can't be read: {error.strerror}"
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
    """The name of each archive in keys: its file name, with its folder if two have the same."""
    names = Counter(path.name for path in paths)
    chosen = {
        path: path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}"
        for path in paths
    }
    return {path: short(name) for path, name in chosen.items()}


# The table of samples

_VERSION = 3
Splits = dict[str, list[Path]]
"""The shards of each split."""


def open_shards(splits: Splits, name: str, index_dir: str | Path | None = None) -> FileSource:
    """The samples of all archives, in order; keys are `archive/key`. A sample without an image,
    with two images, or (if any sample has a caption) without a usable caption is refused by name.
    `index_dir`: a cache folder that may have the table."""
    index = _index_of(splits)
    found = None if index_dir is None else _read_index(Path(index_dir) / index)
    samples, refused = found or _read_shards(splits, name)
    assert samples.places is not None
    rows = zip(
        samples.keys,
        samples.splits,
        samples.captions or [None] * len(samples),
        [-1] * len(samples) if samples.labels is None else samples.labels.tolist(),
        samples.places.archive.tolist(),
        samples.places.offsets.tolist(),
        samples.sizes_bytes.tolist(),
        strict=True,
    )
    items = [
        Item(key, label, split, caption, origin=(samples.places.archives[archive], offset, size))
        for key, split, caption, label, archive, offset, size in rows
    ]

    def keep(folder: Path) -> None:
        if found is None:
            with one_writer((folder / index).parent):
                _write(folder / index, samples, refused)

    return FileSource(name, items, classes=samples.classes, refused=refused, keep=keep)


def index_shards(splits: Splits, name: str, folder: Path) -> tuple[Samples, Refusals]:
    """The table of samples of all shards, mapped from a file in `folder`, and what was refused."""
    note = folder / _index_of(splits)
    found = _read_index(note)
    if found is None:
        with one_writer(note.parent):
            found = _read_index(note)  # another process may have written it meanwhile
            if found is None:
                found = _write(note, *_read_shards(splits, name))
    return found


def _write(note: Path, samples: Samples, refused: Refusals) -> tuple[Samples, Refusals]:
    remove_unfinished(note.parent)
    kept = samples.map_from_file(note.parent)
    assert kept.file is not None
    write_sealed_text(note, json.dumps([kept.file.name, refused]))
    return kept, refused


def _read_index(note: Path) -> tuple[Samples, Refusals] | None:
    try:
        name, refused = json.loads(read_sealed_text(note))
        return Samples.open(note.parent / name), [(path, reason) for path, reason in refused]
    except (OSError, ValueError, KinfolkError):
        return None


def _in_order(splits: Splits) -> list[tuple[str, Path]]:
    ordered = sorted(splits.items(), key=lambda item: (SPLIT_RANK.get(item[0], 3), item[0]))
    return [(split, path) for split, paths in ordered for path in paths]


def _index_of(splits: Splits) -> str:
    state: list[Any] = [_VERSION]
    for split, path in _in_order(splits):
        try:
            found = path.stat()
            status = [found.st_size, found.st_mtime_ns, os.access(path, os.R_OK)]
        except OSError:
            status = []
        state.append([split, os.path.abspath(path), *status])
    digest = hashlib.blake2b(json.dumps(state).encode(), digest_size=8)
    return f"streams/{digest.hexdigest()}.json"


def _read_shards(splits: Splits, name: str) -> tuple[Samples, Refusals]:
    """Reads one shard after the other, and keeps only compact columns of each."""
    import pyarrow as pa

    shards, refused = _in_order(splits), list[tuple[str, str]]()
    names = shard_names([path for _, path in shards])
    label_of: dict[str | None, int] = {}
    faults: list[tuple[str, str, bool]] = []
    columns: dict[str, list[Any]] = {}
    for number, (split, path) in enumerate(shards):
        entries = _usable(path, names[path], refused)
        if not entries:
            continue
        captions = []
        for key, entry in entries:
            caption, wrong = usable_captions(entry.caption)
            captions.append(caption)
            is_missing = entry.caption is None
            faults += [(f"{key}[{part}]" if part else key, why, is_missing) for part, why in wrong]
        status = path.stat()
        for column, values in {
            "key": TextColumn.of([key for key, _ in entries]),
            "caption": TextColumn.of(same_type(captions)),
            "split": [split] * len(entries),
            "archive": np.full(len(entries), number, dtype=np.int32),
            "image": np.array([entry.image for _, entry in entries], dtype=np.int64),
            "time": np.full(len(entries), status.st_mtime_ns),
            "label": np.array(
                [label_of.setdefault(entry.label, len(label_of)) for _, entry in entries]
            ),
        }.items():
            columns.setdefault(column, []).append(values)
    if not columns:
        raise all_refused(name, refused)
    captioned = any(column.array.null_count < len(column) for column in columns["caption"])
    refused += [(key, fault) for key, fault, missing in faults if captioned or not missing]
    codes, classes = encode_labels(list(label_of), name)
    labels = np.array([-1 if label is None else label for label in codes])
    labels = labels[np.concatenate(columns["label"])]
    images = np.concatenate(columns["image"])
    number = len(images)
    unknown = np.zeros(number, dtype=np.int64)
    samples = Samples(
        ids=np.arange(number),
        keys=TextColumn(
            pa.concat_arrays([each.array.cast(pa.large_string()) for each in columns["key"]])
        ),
        widths=unknown,
        heights=unknown,
        labels=labels if (labels >= 0).any() else None,
        classes=classes,
        splits=[split for part in columns["split"] for split in part],
        sizes_bytes=images[:, 1],
        modified_ns=np.concatenate(columns["time"]),
        digests=TextColumn(pa.nulls(number, pa.string())),
        captions=(
            same_type([caption for column in columns["caption"] for caption in column])
            if captioned
            else None
        ),
        places=Places(
            [os.path.abspath(path) for _, path in shards],
            np.concatenate(columns["archive"]),
            images[:, 0],
        ),
    )
    if samples.captions is not None:
        has_caption = np.array([caption is not None for caption in samples.captions])
        samples = samples.at(np.flatnonzero(has_caption))
        groups = group_ids(list(samples.keys), samples.captions, None)
        samples = replace(samples, group_ids=groups)
    return samples, refused


def _usable(path: Path, name: str, refused: Refusals) -> list[tuple[str, Entry]]:
    """The entries of an archive that have a complete image; adds the others to `refused`."""
    shard, found = read_shard(path), []
    if shard.fault is not None:
        refused.append((name, shard.fault))
    end = path.stat().st_size if shard.entries else 0
    for entry in shard.entries:
        key, fault = f"{name}/{entry.key}", entry.fault
        if fault is None and entry.image is None:
            fault = "there is no image"
        if fault is None and sum(entry.image or ()) > end:
            fault = "truncated: the archive ends within it"
        if fault is None:
            found.append((key, entry))
        else:
            refused.append((key, fault))
    return found


# One archive

IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20


class Entry(NamedTuple):
    """The files of one key in a shard: offset and length of the image, caption (a text, a list or
    None), text of the `.cls`, and why it can't be used."""

    key: str
    image: tuple[int, int] | None
    caption: Any
    label: str | None
    fault: str | None


class Shard(NamedTuple):
    """The entries, and what is wrong with the archive; entries before a damaged part are kept."""

    entries: list[Entry]
    fault: str | None


def read_shard(path: Path) -> Shard:
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
    """The files of one key; the bytes of small files are None if too long."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes | None] = field(default_factory=dict)
    fault: str | None = None


def _add_member(found: dict[str, _Files], member: tarfile.TarInfo, file: BinaryIO) -> None:
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
