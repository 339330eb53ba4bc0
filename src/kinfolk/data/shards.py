"""Webdataset shards: `.tar` files of images, captions (`.txt`) and labels (`.cls`), read in place.
The first pass makes a table of samples, in a file named by a digest of path, size, time and
readability of each shard."""

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
from typing import Any, BinaryIO

import numpy as np

from kinfolk.data.labels import SPLITS, encode_labels, group_ids, to_text, why_refused
from kinfolk.data.prepare import one_writer
from kinfolk.data.sample_table import Places, Samples, TextColumn
from kinfolk.data.source import SPLIT_RANK, FileSource, Item, Refusals, all_refused, as_utf8
from kinfolk.errors import short
from kinfolk.files import first_line, read_sealed_text, remove_unfinished, write_sealed_text

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
Splits = dict[str, list[Path]]


def expand(pattern: str) -> list[Path]:
    """The `.tar` files of a pattern with `{000..331}` or `*`. A missing file of a range is reported
    later."""
    if not pattern.lower().endswith(".tar"):
        return []
    if (found := _RANGE.search(pattern)) is None:
        return [Path(name) for name in sorted(glob.glob(pattern))]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    names = (pattern[: found.start()] + number + pattern[found.end() :] for number in numbers)
    return [path for name in names for path in expand(name) or [Path(name)]]


def find_shards(path: Path) -> Splits:
    """A `.tar`, or those of a folder or of its `train/`, `test/` …, if it contains no images."""
    if path.is_file():
        return {"train": [path]}
    found = {"train": _tars(path)}
    for entry in path.glob("[!.]*"):
        if entry.is_dir():
            if entry.name not in SPLITS or not (inside := _tars(entry)):
                return {}
            found.setdefault(SPLITS[entry.name], []).extend(inside)
        elif entry.suffix.lower().lstrip(".") in IMAGES:
            return {}
    return {split: tars for split, tars in found.items() if tars}


def _tars(folder: Path) -> list[Path]:
    try:
        names = sorted(folder.iterdir())
    except OSError:  # treated like an archive that can't be read, which is refused by name
        return [folder]
    return [path for path in names if path.suffix.lower() == ".tar" and path.name[0] != "."]


def _names(paths: list[Path]) -> dict[Path, str]:
    """The file name, with its folder if two have the same."""
    count = Counter(path.name for path in paths)
    return {
        path: short(path.name if count[path.name] == 1 else f"{path.parent.name}/{path.name}")
        for path in paths
    }


# The table of samples

_VERSION = 4


def open_shards(splits: Splits, name: str, index_dir: str | Path | None = None) -> FileSource:
    """Samples of all archives in order; keys are `archive/key`. A sample without an image, or (if
    any has a caption) without a usable caption, is refused. `index_dir`: a cache for the table."""
    samples, refused = (
        _read_shards(splits, name)
        if index_dir is None
        else index_shards(splits, name, Path(index_dir))
    )
    assert samples.places is not None
    archives = samples.places.archives
    labels = np.full(len(samples), -1) if samples.labels is None else samples.labels
    captions = samples.captions or [None] * len(samples)
    columns = (samples.places.archive, samples.places.offsets, samples.sizes_bytes, labels)
    numbers = (column.tolist() for column in columns)
    rows = zip(samples.keys, samples.splits, captions, *numbers, strict=True)
    items = [
        Item(key, label, split, caption, origin=(archives[archive], offset, size))
        for key, split, caption, archive, offset, size, label in rows
    ]
    return FileSource(name, items, classes=samples.classes, refused=refused)


def index_shards(splits: Splits, name: str, folder: Path) -> tuple[Samples, Refusals]:
    state: list[Any] = [_VERSION]
    for split, path in _in_order(splits):
        try:
            status = path.stat()
            known = [status.st_size, status.st_mtime_ns, os.access(path, os.R_OK)]
        except OSError:
            known = []
        state.append([split, os.path.abspath(path), *known])
    digest = hashlib.blake2b(json.dumps(state).encode(), digest_size=8)
    note = folder / "streams" / f"{digest.hexdigest()}.json"
    if (found := _read_index(note)) is not None:
        return found
    with one_writer(note.parent):
        # another process may have written it meanwhile
        if (found := _read_index(note)) is not None:
            return found
        remove_unfinished(note.parent)
        samples, refused = _read_shards(splits, name)
        samples = samples.map_from_file(note.parent)
        assert samples.file is not None
        write_sealed_text(note, json.dumps([samples.file.name, refused]))
        return samples, refused


def _read_index(note: Path) -> tuple[Samples, Refusals] | None:
    try:
        name, refused = json.loads(read_sealed_text(note))
        return Samples.open(note.parent / name), [(path, reason) for path, reason in refused]
    except (OSError, ValueError):
        return None


def _in_order(splits: Splits) -> list[tuple[str, Path]]:
    ordered = sorted(splits.items(), key=lambda item: (SPLIT_RANK.get(item[0], 3), item[0]))
    return [(split, path) for split, paths in ordered for path in paths]


def _read_shards(splits: Splits, name: str) -> tuple[Samples, Refusals]:
    """Keeps only compact columns of each shard."""
    import pyarrow as pa

    shards, refused = _in_order(splits), list[tuple[str, str]]()
    names = _names([path for _, path in shards])
    label_of: dict[str | None, int] = {}
    faults: list[tuple[str, str, bool]] = []
    all_splits: list[str] = []
    keys, captions, rows = list[Any](), list[Any](), list[Any]()
    for number, (split, path) in enumerate(shards):
        entries = _usable(path, names[path], refused)
        if not entries:
            continue
        modified_ns, texts = path.stat().st_mtime_ns, []
        for key, entry in entries:
            reason = why_refused(entry.caption)
            texts.append(entry.caption if reason is None else None)
            if reason is not None:
                faults.append((key, reason, entry.caption is None))
        known = [
            (*(entry.image or ()), label_of.setdefault(entry.label, len(label_of)))
            for _, entry in entries
        ]
        rows.append(np.array([(*each, number, modified_ns) for each in known]))
        keys.append(pa.array([key for key, _ in entries], pa.large_string()))
        captions.append(pa.array(texts, pa.large_string()))
        all_splits += [split] * len(entries)
    if not rows:
        raise all_refused(name, refused)
    caption_N = pa.concat_arrays(captions)
    captioned = caption_N.null_count < len(caption_N)
    refused += [(key, fault) for key, fault, missing in faults if captioned or not missing]
    labels, classes = encode_labels(list(label_of), name)
    offsets, sizes, codes_N, archives, times = np.concatenate(rows).T
    label_N = np.array([-1 if label is None else label for label in labels])[codes_N]
    unknown = np.zeros(len(sizes), dtype=np.int64)
    samples = Samples(
        ids=np.arange(len(sizes)),
        keys=TextColumn(pa.concat_arrays(keys)),
        widths=unknown,
        heights=unknown,
        labels=label_N if (label_N >= 0).any() else None,
        classes=classes,
        splits=all_splits,
        sizes_bytes=sizes,
        modified_ns=times,
        digests=TextColumn(pa.nulls(len(sizes), pa.string())),
        captions=TextColumn(caption_N) if captioned else None,
        places=Places([os.path.abspath(path) for _, path in shards], archives, offsets),
    )
    if captioned:
        samples = samples.at(np.flatnonzero(caption_N.is_valid().to_numpy(zero_copy_only=False)))
        groups = group_ids(list(samples.keys), samples.captions, None)
        samples = replace(samples, group_ids=groups)
    return samples, refused


# One archive

IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"))
_LONGEST_TEXT = 1 << 20  # more than the longest caption


@dataclass
class Entry:
    """The files of one key: offset and length of the image, the contents of the others by
    extension, and why the entry can't be used."""

    image: tuple[int, int] | None = None
    texts: dict[str, bytes] = field(default_factory=dict)
    fault: str | None = None

    @property
    def caption(self) -> str | None:
        text = to_text(self.texts.get("txt"))
        return None if text is None else text.strip()

    @property
    def label(self) -> str | None:
        text = to_text(self.texts.get("cls"))
        return None if text is None else as_utf8(text.strip())


def _usable(path: Path, name: str, refused: Refusals) -> list[tuple[str, Entry]]:
    entries, fault = read_shard(path)
    if fault is not None:
        refused.append((name, fault))
    end, usable = path.stat().st_size if entries else 0, []
    for within, entry in entries.items():
        if entry.fault is None and entry.image is None:
            entry.fault = "there is no image"
        if entry.fault is None and sum(entry.image or ()) > end:
            entry.fault = "truncated: the archive ends within it"
        if entry.fault is None:
            usable.append((f"{name}/{within}", entry))
        else:
            refused.append((f"{name}/{within}", entry.fault))
    return usable


def read_shard(path: Path) -> tuple[dict[str, Entry], str | None]:
    """The entries by key, and what is wrong with the archive; those before the damage are kept."""
    found: dict[str, Entry] = {}
    try:
        # "r:" refuses compressed archives, whose parts can't be read in place
        with open(path, "rb") as file, tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # there may be millions
                if not member.isdir():
                    _add_member(found, member, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        what = "cut short or damaged" if found else "not a readable archive"
        return found, f"{what}: {first_line(error)}"
    return found, None


def _add_member(found: dict[str, Entry], member: tarfile.TarInfo, file: BinaryIO) -> None:
    folder, _, base = member.name.rpartition("/")
    stem, _, extension = base.partition(".")
    extension = extension.lower()
    if not stem or extension not in (*IMAGES, "txt", "cls"):
        return
    entry = found.setdefault(
        as_utf8(f"{folder}/{stem}".removeprefix("./").removeprefix("/")), Entry()
    )
    if not member.isreg() or member.sparse is not None:
        entry.fault = f"its .{extension} is not a regular file"
    elif extension in IMAGES:
        entry.fault = "it has two images" if entry.image is not None else entry.fault
        entry.image = member.offset_data, member.size
    else:
        entry.fault = f"it has two .{extension}" if extension in entry.texts else entry.fault
        file.seek(member.offset_data)
        entry.texts[extension] = file.read(min(member.size, _LONGEST_TEXT))
