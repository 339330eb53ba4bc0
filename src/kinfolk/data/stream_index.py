"""The table of samples of streamed data: where each image is stored. It is made once and kept in a
file that later runs and all ranks map.

The headers of shards are read one shard after the other, so building the table needs the memory of
the table and of one shard. The name of the file is a digest of the state it describes (for shards:
path, size, modification time and readability of each; for a folder: those of every folder below
it), so a file of another state is never used. A folder is not listed again while none of its
folders has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data.captions import TextColumn, same_type, usable_captions
from kinfolk.data.change_detection import SPLIT_RANK, arrange
from kinfolk.data.folder import folders_below, open_folder
from kinfolk.data.labels import encode_labels, group_ids
from kinfolk.data.prepare import Refusals, one_writer
from kinfolk.data.sample_table import Places, Samples
from kinfolk.data.shards import ShardIndex, shard_names
from kinfolk.errors import KinfolkError
from kinfolk.files import (
    DamagedFileError,
    explain_write_errors,
    read_sealed_text,
    remove_unfinished,
    write_sealed_text,
)

_VERSION = 2


def index_shards(
    splits: dict[str, list[Path]], name: str, folder: Path
) -> tuple[Samples, Refusals]:
    """The samples of all shards, and what was refused: shards that are missing or truncated,
    samples without a usable image or caption.

    Args:
        splits: the shards of each split.
        name: used in messages.
        folder: for the file of the table.
    """
    ordered = sorted(splits.items(), key=lambda item: (SPLIT_RANK.get(item[0], 3), item[0]))
    state = [(split, [_state(path) for path in paths]) for split, paths in ordered]
    return _load_or_build(folder, ["shards", state], lambda: _read_shards(ordered, name, folder))


def index_folder(root: Path, labels_from_folders: bool, folder: Path) -> tuple[Samples, Refusals]:
    """The image files below `root`; see `open_folder`."""
    key = ["folder", os.path.abspath(root), labels_from_folders]
    known = folder / "streams" / f"{_digest(key)}.json"
    try:
        state = json.loads(read_sealed_text(known))
        if all(_state(Path(path)) == [path, *rest] for path, *rest in state):
            return _load_or_build(
                folder, [key, state], lambda: _read_folder(root, labels_from_folders)
            )
    except (DamagedFileError, OSError, ValueError, TypeError):
        pass
    state = [
        _state(Path(path)) for path in folders_below(os.path.abspath(root))
    ]  # before listing, so that later changes are noticed the next time
    found = _load_or_build(folder, [key, state], lambda: _read_folder(root, labels_from_folders))
    with one_writer(known.parent):
        remove_unfinished(known.parent)
        _write(known, state)
    return found


def _load_or_build(folder: Path, state: object, build: Any) -> tuple[Samples, Refusals]:
    """The table of this state, from its file, or built and written by one process while others
    wait."""
    note = folder / "streams" / f"{_digest([_VERSION, state])}.json"
    found = _read_table(note)
    if found is None:
        with one_writer(note.parent):
            remove_unfinished(note.parent)
            found = _read_table(note)
            if found is None:
                samples, refused = build()
                kept = samples.mapped(note.parent)
                _write(note, [kept.file.name, refused])
                return kept, refused
    return found


def _read_table(note: Path) -> tuple[Samples, Refusals] | None:
    try:
        name, refused = json.loads(read_sealed_text(note))
        return Samples.open(note.parent / name), [(path, reason) for path, reason in refused]
    except (OSError, ValueError, KinfolkError):
        return None


def _read_shards(
    ordered: list[tuple[str, list[Path]]], name: str, folder: Path
) -> tuple[Samples, Refusals]:
    """Reads one shard after the other, and keeps only compact columns of each."""
    import pyarrow as pa

    index, refused = ShardIndex(folder), list[tuple[str, str]]()
    label_of: dict[str | None, int] = {}
    faults: list[tuple[str, str, bool]] = []
    columns: dict[str, list[Any]] = {}
    shards = [(split, path) for split, tars in ordered for path in tars]
    names = shard_names([path for _, path in shards])
    for number, (split, path) in enumerate(shards):
        entries = index.usable(path, names[path], refused)
        index.keep(folder)
        end = path.stat().st_size if entries else 0
        refused += [
            (key, "truncated: the archive ends within it")
            for key, entry in entries
            if sum(entry.image or ()) > end
        ]
        entries = [(key, entry) for key, entry in entries if sum(entry.image or ()) <= end]
        if not entries:
            continue
        captions = []
        for key, entry in entries:
            caption, wrong = usable_captions(entry.caption)
            captions.append(caption)
            faults += [
                (f"{key}[{part}]" if part else key, why, entry.caption is None)
                for part, why in wrong
            ]
        images = np.array([entry.image for _, entry in entries], dtype=np.int64)
        codes = [label_of.setdefault(entry.label, len(label_of)) for _, entry in entries]
        for column, values in {
            "key": pa.array([key for key, _ in entries], pa.large_string()),
            "caption": TextColumn.of(same_type(captions)),
            "split": (split, len(entries)),
            "archive": np.full(len(entries), number, dtype=np.int32),
            "offset": images[:, 0],
            "size": images[:, 1],
            "time": np.full(len(entries), path.stat().st_mtime_ns, dtype=np.int64),
            "label": np.array(codes, dtype=np.int32),
        }.items():
            columns.setdefault(column, []).append(values)
    if not columns:
        first = f"; the first refusal is {refused[0][0]}: {refused[0][1]}" if refused else ""
        raise KinfolkError(f"{name} holds no images{first}")
    captioned = any(column.array.null_count < len(column) for column in columns["caption"])
    refused += [(key, fault) for key, fault, missing in faults if captioned or not missing]
    texts, classes = encode_labels(list(label_of), name)
    labels = np.array([-1 if label is None else label for label in texts])
    labels = labels[np.concatenate(columns["label"])]
    keys = TextColumn(pa.concat_arrays(columns["key"]))
    number = len(keys)
    samples = Samples(
        ids=np.arange(number),
        keys=TextColumn(keys.array.cast(pa.string())) if keys.nbytes < (1 << 31) - 1 else keys,
        widths=np.zeros(number, dtype=np.int64),
        heights=np.zeros(number, dtype=np.int64),
        labels=labels if (labels >= 0).any() else None,
        classes=classes,
        splits=TextColumn(_repeat(columns["split"])),
        sizes_bytes=np.concatenate(columns["size"]),
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
            np.concatenate(columns["offset"]),
        ),
    )
    if captioned:
        assert samples.captions is not None
        with_text = np.array([caption is not None for caption in samples.captions])
        samples = samples.at(np.flatnonzero(with_text))
        samples = samples.with_group_ids(group_ids(list(samples.keys), samples.captions, None))
    return samples, refused


def _read_folder(root: Path, labels_from_folders: bool) -> tuple[Samples, Refusals]:
    import pyarrow as pa

    source = open_folder(root, labels_from_folders=labels_from_folders)
    items = source.items()
    if not items:
        path, reason = source.refused[0]
        raise KinfolkError(
            f"all {len(source.refused):,} images of `{root}` were refused; the first is {path}:"
            f" {reason}"
        )
    order = arrange(items)
    _require_plain_names(root, [(source.path(index), items[index].key) for index in order])
    labels = [items[index].label for index in order]
    nothing = np.zeros(len(order), dtype=np.int64)
    samples = Samples(
        ids=np.arange(len(order)),
        keys=[items[index].key for index in order],
        widths=nothing,
        heights=nothing,
        labels=(
            None
            if source.classes is None
            else np.array([-1 if label is None else label for label in labels])
        ),
        classes=source.classes,
        splits=[items[index].split for index in order],
        sizes_bytes=nothing,
        modified_ns=nothing,
        digests=TextColumn(pa.nulls(len(order), pa.string())),
        places=Places([os.path.abspath(root)], nothing - 1, nothing),
    )
    return samples, source.refused


def _require_plain_names(root: Path, files: Sequence[tuple[str, str]]) -> None:
    """Raises if a key does not name its file, which happens only if the file name is not UTF-8."""
    for path, key in files:
        if os.path.relpath(path, root).replace(os.sep, "/") != key:
            raise KinfolkError(
                f"the file `{key}` has a name that is not UTF-8, which streaming cannot read;"
                " rename it"
            )


def _repeat(splits: Iterable[tuple[str, int]]) -> Any:
    import pyarrow as pa

    names = list(dict.fromkeys(split for split, _ in splits))
    codes = np.concatenate(
        [np.full(count, names.index(split), dtype=np.int8) for split, count in splits]
    )
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.large_string()))


def _state(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError:
        return [os.path.abspath(path), 0, 0, False]
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns, os.access(path, os.R_OK)]


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _write(path: Path, value: object) -> None:
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed_text(path, json.dumps(value))
