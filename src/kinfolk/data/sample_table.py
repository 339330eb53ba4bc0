"""The table of samples: one row per sample, with the id that addresses all per-sample state.

Also a sentence on the first difference between two tables, and a digest of a whole table, which
tells whether per-sample state belongs to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.data.captions import Caption, TextColumn
from kinfolk.errors import KinfolkError, shown
from kinfolk.files import DamagedFileError, explain_write_errors, first_line, write_atomically

Ints = npt.NDArray[np.int64]
_CLASSES = b"kinfolk.classes"
_ARCHIVES = b"kinfolk.archives"
_PIECE = 1 << 24


@dataclass(frozen=True)
class Sample:
    """One row of `Samples`."""

    id: int
    key: str
    width: int
    height: int
    label: int | None
    split: str
    size_bytes: int
    modified_ns: int
    digest: str
    caption: Caption | None = None
    group: str | None = None
    group_id: int | None = None


@dataclass(frozen=True, eq=False)
class Places:
    """Where the images of streamed data are stored.

    Args:
        archives: the shards, or the folder whose files the keys name.
        archive: (N,) index of the shard; −1: the file that the key names, below the first entry of
            `archives`.
        offsets: (N,) offset of the image within the shard; its length is the sample's `size_bytes`.
    """

    archives: list[str]
    archive: Ints
    offsets: Ints

    def __getitem__(self, rows: Ints) -> Places:
        return Places(self.archives, self.archive[rows], self.offsets[rows])


@dataclass(frozen=True, eq=False)
class Samples:
    """The table of samples, by column. Training samples come first; their ids are 0 … `num_train` −
    1.

    Columns of texts are lists, or `TextColumn`s in tables that are kept for long (`packed`,
    `mapped`). These take about 45 bytes per sample plus the key instead of about 900, and processes
    that map the same file share them.

    Args:
        ids: (N,) sample ids.
        keys: the name of each sample in its source: a relative path, or `split/row` of an array.
        widths, heights: (N,) of the original image, after EXIF rotation.
        labels: (N,) with −1 for unlabelled; None if no sample has a label.
        classes: names of the labels, if known.
        splits: "train", "val", "test" or another name from a table.
        sizes_bytes, modified_ns: (N,) of the file; `modified_ns` is 0 where there is none.
        digests: of the raw bytes, 16 hexadecimal digits.
        captions, groups: if the source has them. A caption is a text, or a tuple if samples have
            several.
        group_ids: (N,) known positives: samples with the same group id share an image, a caption or
            a group; see `labels.group_ids`.
        places: where each image is stored, for streamed data.
        file: the file that the columns are mapped from, if any.
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

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row: int) -> Sample:
        label = -1 if self.labels is None else int(self.labels[row])
        return Sample(
            id=int(self.ids[row]),
            key=self.keys[row],
            width=int(self.widths[row]),
            height=int(self.heights[row]),
            label=None if label < 0 else label,
            split=self.splits[row],
            size_bytes=int(self.sizes_bytes[row]),
            modified_ns=int(self.modified_ns[row]),
            digest=self.digests[row],
            caption=None if self.captions is None else self.captions[row],
            group=None if self.groups is None else self.groups[row],
            group_id=None if self.group_ids is None else int(self.group_ids[row]),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[row] for row in range(len(self)))

    @property
    def num_train(self) -> int:
        """Number of samples in the split "train"."""
        return self.splits.count("train")

    def of(self, split: str) -> Samples:
        """The samples of one split, with their ids."""
        return self._take(self.rows_of(split))

    def rows_of(self, split: str) -> Ints:
        """The rows of one split, in order."""
        if isinstance(self.splits, TextColumn):
            return self.splits.rows_of(split)
        return np.array(
            [row for row, name in enumerate(self.splits) if name == split], dtype=np.int64
        )

    def at(self, rows: Ints) -> Samples:
        """The samples at `rows`, with new ids."""
        return replace(self._take(rows), ids=np.arange(len(rows)))

    def with_group_ids(self, group_ids: Ints) -> Samples:
        """The same samples with these group ids."""
        return replace(self, group_ids=group_ids, file=None)

    def first_difference(self, other: Samples) -> str | None:
        """A sentence on the first difference from `other` (the present state), or None.
        `modified_ns` is not compared."""
        return first_difference(self, other)

    def to_parquet(self, path: str | Path, metadata: dict[str, str] | None = None) -> None:
        """Writes the table to a Parquet file, with the class names in its metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            "id": pa.array(self.ids, pa.int64()),
            "key": _strings(self.keys),
            "width": pa.array(self.widths, pa.int64()),
            "height": pa.array(self.heights, pa.int64()),
            "label": pa.nulls(len(self), pa.int64())
            if self.labels is None
            else pa.array(self.labels.astype(np.int64), mask=self.labels < 0),
            "split": _strings(self.splits),
            "size_bytes": pa.array(self.sizes_bytes, pa.int64()),
            "modified_ns": pa.array(self.modified_ns, pa.int64()),
            "digest": _strings(self.digests),
        }
        if self.captions is not None:
            columns["caption"] = _strings(self.captions)
        if self.groups is not None:
            columns["group"] = _strings(self.groups)
        if self.group_ids is not None:
            columns["group_id"] = pa.array(self.group_ids, pa.int64())
        noted: dict[Any, Any] = dict(metadata or {})
        if self.classes is not None:
            noted[_CLASSES] = json.dumps(self.classes).encode()
        table = pa.table(columns).replace_schema_metadata(noted or None)
        write_atomically(Path(path), lambda file: pq.write_table(table, file))

    @classmethod
    def read(cls, path: str | Path) -> Samples:
        """Reads a file that `to_parquet` wrote."""
        import pyarrow.parquet as pq

        try:
            return cls._of_table(pq.read_table(Path(path)))
        except FileNotFoundError:
            raise KinfolkError(
                f"there is no table of samples at `{path}`; restore it, or start a new run"
            ) from None
        except Exception as error:  # readers raise nearly anything on a broken file
            raise KinfolkError(
                f"`{path}` is not a readable table of samples: {first_line(error)}"
            ) from error

    def packed(self) -> Samples:
        """The same table in its compact form, in memory."""
        return self._of_table(self._compact())

    def mapped(self, folder: str | Path) -> Samples:
        """The same table, mapped from a file in `folder` that all processes of the machine share.

        The file is named by the digest of its bytes; a damaged one is written again.
        """
        table = self._compact()
        name = hashlib.blake2b(digest_size=8)
        _write_table(table, _Digested(name))
        path = Path(folder) / f"samples-{name.hexdigest()}.arrow"
        if path.exists():
            with contextlib.suppress(KinfolkError):
                return self.open(path)
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: _write_table(table, file))
        return self.open(path)

    @classmethod
    def open(cls, path: str | Path) -> Samples:
        """Maps a file that `mapped` wrote; refuses one whose bytes do not match its name."""
        import pyarrow as pa

        path = Path(path)
        try:
            with open(path, "rb") as file:
                digest = hashlib.blake2b(digest_size=8)
                while piece := file.read(_PIECE):
                    digest.update(piece)
            if path.stem != f"samples-{digest.hexdigest()}":
                raise DamagedFileError("its bytes do not match the digest in its name")
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            return replace(cls._of_table(table), file=path)
        except Exception as error:  # readers raise nearly anything on a broken file
            raise KinfolkError(
                f"`{path}` is not a readable table of samples: {first_line(error)}"
            ) from error

    def _compact(self) -> Any:
        """The table as one record batch: 32 bits if they suffice, splits as numbers, digests as
        eight bytes."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            "key": TextColumn.of(self.keys).array,
            "split": TextColumn.of(self.splits, few=True).array,
        }
        columns["digest"] = TextColumn.of(self.digests).array
        columns |= {name: _narrow(getattr(self, plural)) for plural, name in _INT_COLUMNS.items()}
        columns |= {
            name: _narrow(numbers)
            for name, numbers in (("label", self.labels), ("group_id", self.group_ids))
            if numbers is not None
        }
        columns |= {
            name: TextColumn.of(texts).array
            for name, texts in (("caption", self.captions), ("group", self.groups))
            if texts is not None
        }
        metadata = {} if self.classes is None else {_CLASSES: json.dumps(self.classes).encode()}
        if self.places is not None:
            columns |= {
                "archive": _narrow(self.places.archive),
                "offset": _narrow(self.places.offsets),
            }
            metadata[_ARCHIVES] = json.dumps(self.places.archives).encode()
        return pa.table(columns).replace_schema_metadata(metadata or None)

    @classmethod
    def _of_table(cls, table: Any) -> Samples:
        column = {name: table[name] for name in table.column_names}
        labels = column.get("label")
        metadata = table.schema.metadata or {}
        classes = metadata.get(_CLASSES)
        places = None
        if _ARCHIVES in metadata:
            places = Places(
                json.loads(metadata[_ARCHIVES]),
                _numbers(column["archive"]),
                _numbers(column["offset"]),
            )

        def texts(name: str) -> TextColumn | None:
            return TextColumn(_one_chunk(column[name])) if name in column else None

        return cls(
            **{plural: _numbers(column[name]) for plural, name in _INT_COLUMNS.items()},
            keys=TextColumn(_one_chunk(column["key"])),
            splits=TextColumn(_one_chunk(column["split"])),
            digests=TextColumn(_one_chunk(column["digest"])),
            labels=None
            if labels is None or labels.null_count == len(table)
            else _numbers(labels.fill_null(-1) if labels.null_count else labels),
            classes=None if classes is None else json.loads(classes),
            captions=texts("caption"),
            groups=texts("group"),
            group_ids=_numbers(column["group_id"]) if "group_id" in column else None,
            places=places,
        )

    def _take(self, rows: Sequence[int] | Ints) -> Samples:
        index = np.asarray(rows, dtype=np.int64)
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in _INT_COLUMNS}
        for name in (*_TEXT_COLUMNS, "captions", "groups"):
            values = getattr(self, name)
            taken[name] = (
                values.take(index)
                if isinstance(values, TextColumn)
                else values and [values[row] for row in rows]
            )
        for name in ("labels", "group_ids"):
            numbers = getattr(self, name)
            taken[name] = None if numbers is None else numbers[index]
        return replace(
            self, **taken, places=None if self.places is None else self.places[index], file=None
        )


def _strings(values: Sequence[Any]) -> Any:
    """A column of plain strings or lists of strings, which other programs can read."""
    import pyarrow as pa

    if isinstance(values, TextColumn) and (
        pa.types.is_string(values.array.type) or pa.types.is_dictionary(values.array.type)
    ):
        return values.array.cast(pa.string())
    several = any(isinstance(value, tuple) for value in values)
    return pa.array(list(values), pa.list_(pa.string()) if several else pa.string())


class _Digested:
    """A file object that keeps only the digest of what is written."""

    closed = False

    def __init__(self, state: hashlib.blake2b) -> None:
        self._state, self._written = state, 0

    def write(self, data: Any) -> int:
        self._state.update(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _write_table(table: Any, file: Any) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _one_chunk(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numbers(column: Any) -> Any:
    """A column as a numpy view, or as a copy if it has several chunks."""
    return _one_chunk(column).to_numpy()


def _narrow(numbers: Ints) -> Any:
    """The numbers in 32 bits, if all fit."""
    import pyarrow as pa

    fits = not len(numbers) or -(1 << 31) <= int(numbers.min()) <= int(numbers.max()) < 1 << 31
    return pa.array(numbers, pa.int32() if fits else pa.int64(), safe=False)


_INT_COLUMNS = {
    "ids": "id",
    "widths": "width",
    "heights": "height",
    "sizes_bytes": "size_bytes",
    "modified_ns": "modified_ns",
}
_TEXT_COLUMNS = ("keys", "splits", "digests")


# Differences between two tables


def first_difference(was: Samples, now: Samples) -> str | None:
    """The first difference between two tables of samples: order and presence first, then classes,
    then row by row."""
    if (found := key_difference(was.keys, now.keys)) is not None:
        return found
    if was.classes != now.classes:
        return f"the classes were {_shorten(was.classes)}, are now {_shorten(now.classes)}"
    columns: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("split", was.splits, now.splits),
        ("label", _labels(was), _labels(now)),
        ("caption", was.captions or [None] * len(was), now.captions or [None] * len(now)),
        ("group", was.groups or [None] * len(was), now.groups or [None] * len(now)),
        ("bytes", was.sizes_bytes, now.sizes_bytes),  # type: ignore[list-item]
        ("width", was.widths, now.widths),  # type: ignore[list-item]
        ("height", was.heights, now.heights),  # type: ignore[list-item]
        ("digest", was.digests, now.digests),
    ]
    differing = [
        (row, name, a[row], b[row])
        for name, a, b in columns
        if (row := first_unequal(a, b)) is not None
    ]
    if not differing:
        return None
    row, name, before, after = min(differing, key=lambda found: found[0])
    return value_difference(row, was.keys[row], name, before, after)


def key_difference(was: Sequence[str], now: Sequence[str]) -> str | None:
    """A sentence on the first sample that is missing, was added or has moved; None if there is
    none."""
    row = first_unequal(was, now)
    if row is None and len(was) == len(now):
        return None
    row = min(len(was), len(now)) if row is None else row
    if row < len(was) and was[row] not in set(now):
        return f"sample {row} ({shown(was[row])}) is now missing"
    if row < len(now) and now[row] not in set(was):
        return f"{shown(now[row])} was not there before and is now sample {row}"
    if row < len(was) and row < len(now):
        return (
            f"the order has changed: sample {row} was {shown(was[row])}, is now {shown(now[row])}"
        )
    return f"there were {len(was):,} samples, there are now {len(now):,}"


def value_difference(row: int, key: str, name: str, before: object, after: object) -> str:
    """A sentence on a changed value of one sample."""
    subject = f"sample {row} ({shown(key)})"
    if name == "bytes":
        return f"{subject} was {before:,} bytes, is now {after:,}"
    if name == "digest":
        return f"{subject} has the same size as before but other content"
    return f"{subject} had {name} {_shorten(before)}, now has {_shorten(after)}"


def first_unequal(was: Sequence[Any], now: Sequence[Any]) -> int | None:
    """The first position, within the shorter of both, where they differ."""
    if isinstance(was, np.ndarray):
        places = np.flatnonzero(was[: len(now)] != now[: len(was)])
        return int(places[0]) if len(places) else None
    if was == now:
        return None
    return next((row for row, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)


def _labels(samples: Samples) -> list[int | None]:
    return (
        [None] * len(samples)
        if samples.labels is None
        else [None if label < 0 else label for label in samples.labels.tolist()]
    )


def _shorten(value: object) -> str:
    text = (
        "none" if value is None else repr(value.item() if isinstance(value, np.generic) else value)
    )
    return text if len(text) <= 80 else f"{text[:79]}…"


# Digest of a table

_DIGESTED_ROWS = 1 << 16


def samples_digest(samples: Samples) -> str:
    """32 hexadecimal digits of keys, splits, contents, sizes, labels, classes, captions and groups,
    in the order of ids.

    For streamed data, whose contents are not known, only the sizes count. The digest does not
    depend on whether columns are lists.
    """
    state = hashlib.blake2b(digest_size=16)
    state.update(repr(samples.classes).encode("utf-8", "surrogatepass"))
    for texts in (samples.keys, samples.splits, samples.digests, samples.captions, samples.groups):
        _add(state, texts)
    labels = np.full(len(samples), -1) if samples.labels is None else samples.labels
    for numbers in (labels, samples.sizes_bytes):
        state.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
    return state.hexdigest()


def _add(state: hashlib.blake2b, texts: Sequence[Any] | None) -> None:
    """Adds a column to the digest. Lengths come before the texts, so that different columns never
    have the same bytes."""
    if texts is None:
        state.update(b"none")
        return
    column = TextColumn.of(texts)
    state.update(b"column" + len(column).to_bytes(8, "little"))
    for start in range(0, len(column), _DIGESTED_ROWS):
        for part in column[start : start + _DIGESTED_ROWS].plain():
            state.update(part)
