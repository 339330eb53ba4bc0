"""The table of samples, one row per id; the difference of two tables; and a digest of one."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from kinfolk.data.labels import Caption, Ints
from kinfolk.errors import KinfolkError, short
from kinfolk.files import (
    UNFINISHED,
    explain_read_errors,
    explain_write_errors,
    file_digest,
    move_into_place,
    write_atomically,
)

# Columns of texts

_CHUNK = 1 << 16
_LONGEST = (1 << 31) - 1


@final
class TextColumn(Sequence[Any]):
    """Reads like a list of texts (or of tuples of texts), with None for a missing one, in one block
    of memory, which processes share if it is mapped.

    Example:
        >>> column = TextColumn.of(["a", None, "b"])
        >>> column[2], list(column[:2]), column == ["a", None, "b"]
        ('b', ['a', None], True)
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Sequence[Any]) -> TextColumn:
        import pyarrow as pa

        if isinstance(values, TextColumn):
            return values
        if any(isinstance(value, tuple) for value in values):
            return cls(pa.array(values, pa.large_list(pa.large_string())))
        array = pa.array(values, pa.large_string())
        return cls(array.cast(pa.string()) if array.nbytes < _LONGEST else array)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK):
            yield from map(_value, self.array.slice(start, _CHUNK).to_pylist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TextColumn) and self.array.equals(other.array):
            return True
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __getitem__(self, place: int | slice | Ints) -> Any:
        import pyarrow as pa

        if isinstance(place, slice):
            place = np.arange(*place.indices(len(self)))
        if isinstance(place, np.ndarray):
            return TextColumn(_one_chunk(self.array.take(pa.array(place))))
        return _value(self.array[int(place)].as_py())

    def rows_of(self, value: str) -> Ints:
        import pyarrow.compute as pc

        equal = pc.fill_null(pc.equal(self.array, value), False)
        return np.flatnonzero(equal.to_numpy(zero_copy_only=False))

    @cached_property
    def numbers(self) -> Ints:
        coded = self.array.dictionary_encode(null_encoding="encode").indices
        return np.asarray(coded.to_numpy(), dtype=np.int64)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_chunk(column: Any) -> Any:
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# The table


@dataclass(frozen=True, eq=False)
class Places:
    """Where images are that are read when they are needed: the shards, or one folder whose files
    the keys name; (N,) index of the shard, −1 for a file; (N,) offset in the shard."""

    archives: list[str]
    archive: Ints
    offsets: Ints

    def __getitem__(self, rows: Ints) -> Places:
        return Places(self.archives, self.archive[rows], self.offsets[rows])


# names of columns in files, and the attributes
_COLUMNS = {
    "id": "ids",
    "key": "keys",
    "width": "widths",
    "height": "heights",
    "label": "labels",
    "split": "splits",
    "size_bytes": "sizes_bytes",
    "modified_ns": "modified_ns",
    "digest": "digests",
    "caption": "captions",
    "group": "groups",
    "group_id": "group_ids",
}
_TEXTS = ("keys", "splits", "digests", "captions", "groups")
_CLASSES = b"kinfolk.classes"
_ARCHIVES = b"kinfolk.archives"


@dataclass(frozen=True, eq=False)
class Samples:
    """The table of samples, by column; training samples come first, with ids from 0 on. It takes
    about 60 bytes per sample and its key, shared by processes that map one file.

    Args:
        keys: relative paths, or `split/row` of an array.
        widths, heights: (N,) of the original image, after EXIF rotation.
        labels: (N,) with −1 for unlabelled; None if no sample has a label.
        sizes_bytes, modified_ns: (N,) of the file.
        digests: of the raw bytes, 16 hexadecimal digits.
        captions: a tuple for each sample if any has several.
        group_ids: (N,) known positives; see `labels.group_ids`.
        places: of shards and streamed data.
        file: that the columns are mapped from.
    """

    ids: Ints
    keys: Sequence[str]
    widths: Ints
    heights: Ints
    labels: Ints | None
    classes: list[str] | None
    splits: Sequence[str]
    sizes_bytes: Ints
    modified_ns: Ints
    digests: Sequence[str]
    captions: Sequence[Caption | None] | None = None
    groups: Sequence[str | None] | None = None
    group_ids: Ints | None = None
    places: Places | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if (texts := getattr(self, name)) is not None:
                object.__setattr__(self, name, TextColumn.of(texts))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_train(self) -> int:
        return len(self.rows_of("train"))

    def of(self, split: str) -> Samples:
        return self._take(self.rows_of(split))

    def rows_of(self, split: str) -> Ints:
        return TextColumn.of(self.splits).rows_of(split)

    def at(self, rows: Ints) -> Samples:
        return replace(self._take(rows), ids=np.arange(len(rows)))

    def place(self, row: int) -> str | tuple[str, int, int]:
        assert self.places is not None
        archives, archive = self.places.archives, int(self.places.archive[row])
        if archive < 0:
            return f"{archives[0]}/{self.keys[row]}"
        return archives[archive], int(self.places.offsets[row]), int(self.sizes_bytes[row])

    def first_difference(self, other: Samples) -> str | None:
        """A sentence on the first difference from `other`, the present state, or None."""
        if (found := key_difference(self.keys, other.keys)) is not None:
            return found
        if self.classes != other.classes:
            return f"the classes were {_shorten(self.classes)}, are now {_shorten(other.classes)}"
        before, after = _columns_to_compare(self), _columns_to_compare(other)
        rows = {name: _first_unequal(before[name], after[name]) for name in before}
        differing = {name: row for name, row in rows.items() if row is not None}
        if not differing:
            return None
        name, row = min(differing.items(), key=lambda found: found[1])
        was, now = _shorten(before[name][row]), _shorten(after[name][row])
        return f"the {name} of sample {row} ({short(self.keys[row])}) was {was}, is now {now}"

    def to_parquet(self, path: str | Path, metadata: dict[str, str] | None = None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {**dict.fromkeys(("id", "key", "width", "height", "label")), **self._columns()}
        labels = np.full(len(self), -1) if self.labels is None else self.labels
        columns["label"] = pa.array(labels, pa.int64(), mask=labels < 0)
        header = {**(metadata or {}), **self._metadata()}
        table = pa.table(columns).replace_schema_metadata(header or None)
        write_atomically(Path(path), lambda file: pq.write_table(table, file))

    @classmethod
    def read(cls, path: str | Path) -> Samples:
        import pyarrow.parquet as pq

        if not Path(path).exists():
            raise KinfolkError(
                f"there is no table of samples at `{path}`; restore it, or start a new run"
            )
        with explain_read_errors(f"`{path}`", "table of samples"):
            return cls._of_table(pq.read_table(Path(path)))

    def map_from_file(self, folder: str | Path) -> Samples:
        """The same table, mapped from a file named by the digest of its bytes."""
        import pyarrow as pa

        columns, metadata = self._columns(), self._metadata()
        if self.places is not None:
            columns["archive"] = _narrow(self.places.archive)
            columns["offset"] = _narrow(self.places.offsets)
            metadata[_ARCHIVES] = json.dumps(self.places.archives).encode()
        table = pa.table(columns).replace_schema_metadata(metadata or None)

        def write(file: Any) -> None:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)

        draft = Path(folder) / f"samples-{secrets.token_hex(4)}{UNFINISHED}.arrow"
        with explain_write_errors(draft):
            draft.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(draft, write)
            path = draft.with_name(f"samples-{file_digest(draft, 8)}.arrow")
            move_into_place(draft, path)
        return self.open(path)

    @classmethod
    def open(cls, path: str | Path) -> Samples:
        """Maps a file of `map_from_file`, whose bytes must match its name."""
        import pyarrow as pa

        path = Path(path)
        with explain_read_errors(f"`{path}`", "table of samples"):
            if path.stem != f"samples-{file_digest(path, 8)}":
                raise ValueError("its bytes do not match the digest in its name")
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            return replace(cls._of_table(table), file=path)

    def _metadata(self) -> dict[Any, Any]:
        return {} if self.classes is None else {_CLASSES: json.dumps(self.classes).encode()}

    def _columns(self) -> dict[str, Any]:
        values = {name: getattr(self, attribute) for name, attribute in _COLUMNS.items()}
        return {
            name: column.array if isinstance(column, TextColumn) else _narrow(column)
            for name, column in values.items()
            if column is not None
        }

    @classmethod
    def _of_table(cls, table: Any) -> Samples:
        columns = {name: _one_chunk(table[name]) for name in table.column_names}
        metadata = table.schema.metadata or {}
        given: dict[str, Any] = dict.fromkeys(_COLUMNS.values())
        for name, attribute in _COLUMNS.items():
            column = columns.get(name)
            if attribute in _TEXTS:
                given[attribute] = None if column is None else TextColumn(column)
            elif column is not None and column.null_count < max(1, len(column)):
                filled = column.fill_null(-1) if column.null_count else column
                given[attribute] = filled.to_numpy()
        if _ARCHIVES in metadata:
            numbers = (columns[name].to_numpy() for name in ("archive", "offset"))
            given["places"] = Places(json.loads(metadata[_ARCHIVES]), *numbers)
        classes = metadata.get(_CLASSES)
        found = cls(**given, classes=None if classes is None else json.loads(classes))
        if any(getattr(found, name) is None for name in ("ids", "keys", "splits", "sizes_bytes")):
            raise ValueError("a column is missing")
        return found

    def _take(self, rows: Sequence[int] | Ints) -> Samples:
        index = np.asarray(rows, dtype=np.int64)
        columns = {name: getattr(self, name) for name in (*_COLUMNS.values(), "places")}
        taken = {name: values[index] for name, values in columns.items() if values is not None}
        return replace(self, **taken, file=None)


def _narrow(numbers: Ints) -> Any:
    import pyarrow as pa

    fits = not len(numbers) or -(1 << 31) <= int(numbers.min()) <= int(numbers.max()) < 1 << 31
    return pa.array(numbers, pa.int32() if fits else pa.int64(), safe=False)


# Differences between two tables


def key_difference(was: Sequence[str], now: Sequence[str]) -> str | None:
    """A sentence on the first sample that was removed, added or moved, or None."""
    row = _first_unequal(was, now)
    if row is None and len(was) == len(now):
        return None
    row = min(len(was), len(now)) if row is None else row
    then, here = (short(keys[row]) if row < len(keys) else "missing" for keys in (was, now))
    return f"sample {row} (of {len(was):,}) was {then}, is now {here} (of {len(now):,})"


def _columns_to_compare(samples: Samples) -> dict[str, Any]:
    missing = [None] * len(samples)
    labels = missing if samples.labels is None else samples.labels.tolist()
    return {
        "split": samples.splits,
        "label": [None if label == -1 else label for label in labels],
        "caption": missing if samples.captions is None else samples.captions,
        "group": missing if samples.groups is None else samples.groups,
        "size in bytes": samples.sizes_bytes,
        "width": samples.widths,
        "height": samples.heights,
        "digest": samples.digests,
    }


def _first_unequal(was: Sequence[Any], now: Sequence[Any]) -> int | None:
    if isinstance(was, np.ndarray):
        places = np.flatnonzero(was[: len(now)] != now[: len(was)])
        return int(places[0]) if len(places) else None
    if was == now:
        return None
    return next((row for row, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)


def _shorten(value: object) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return "none" if value is None else short(repr(value), 80)


# Digest of a table


def samples_digest(samples: Samples) -> str:
    """A digest of all columns that a training depends on."""
    state = hashlib.blake2b(digest_size=16)
    state.update(repr(samples.classes).encode("utf-8", "surrogatepass"))
    for texts in (samples.keys, samples.splits, samples.digests, samples.captions, samples.groups):
        if texts is None:
            state.update(b"none")
            continue
        column = TextColumn.of(texts)
        state.update(b"column" + len(column).to_bytes(8, "little"))
        for start in range(0, len(column), _CHUNK):
            for part in _bytes_of(column.array.slice(start, _CHUNK)):
                state.update(part)
    labels = np.full(len(samples), -1) if samples.labels is None else samples.labels
    for numbers in (labels, samples.sizes_bytes):
        state.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
    return state.hexdigest()


def _bytes_of(array: Any) -> list[bytes]:
    """The lengths of all texts (−1: missing) and their characters, whatever the layout; for lists
    of texts, first the lengths of the lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def to_bytes(lengths: Any) -> bytes:
        numbers = lengths.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(numbers, dtype="<i8").tobytes()

    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return [to_bytes(pc.list_value_length(array)), *_bytes_of(array.flatten())]
    texts = array.cast(pa.large_string())
    lengths = to_bytes(pc.binary_length(texts))
    return [lengths, "".join(pc.fill_null(texts, "").to_pylist()).encode()]
