"""Who is in the data set: one row per sample, with the id that all per-sample state is addressed by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinfolk.data.captions import Caption
from kinfolk.data.difference import first_difference
from kinfolk.errors import KinfolkError
from kinfolk.files import first_line, write_atomically

Ints = npt.NDArray[np.int64]
_CLASSES = b"kinfolk.classes"


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
class Samples:
    """The table of samples, by column. Training samples come first; their ids are 0 … `num_train` − 1.

    Args:
        ids: (N,) sample ids.
        keys: what the source calls each sample: a relative path, or `split/row` of an array.
        widths, heights: (N,) of the original image, after EXIF rotation.
        labels: (N,) with −1 for unlabelled; None where no sample has a label.
        classes: names of the labels, where known.
        splits: "train", "val", "test" or a table's own name.
        sizes_bytes, modified_ns: (N,) of the file; `modified_ns` is 0 where there is none.
        digests: of the raw bytes, 16 hexadecimal digits.
        captions, groups: where the source has them. A caption is a text, or a tuple where samples have several.
        group_ids: (N,) known positives: samples with one group id share an image, a caption or a group; see `groups.py`.
    """

    ids: Ints
    keys: list[str]
    widths: Ints
    heights: Ints
    labels: Ints | None
    classes: list[str] | None
    splits: list[str]
    sizes_bytes: Ints
    modified_ns: Ints
    digests: list[str]
    captions: list[Caption | None] | None = None
    groups: list[str | None] | None = None
    group_ids: Ints | None = None

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
        """How many samples are of the split "train"."""
        return self.splits.count("train")

    def of(self, split: str) -> Samples:
        """The samples of one split; they keep their ids."""
        return self._take([row for row, name in enumerate(self.splits) if name == split])

    def first_difference(self, other: Samples) -> str | None:
        """A sentence that names the first difference from `other` (the present state), or None. `modified_ns` is not compared."""
        return first_difference(self, other)

    def to_parquet(self, path: str | Path) -> None:
        """Writes the table; class names go into the file's metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            "id": self.ids,
            "key": pa.array(self.keys, pa.string()),
            "width": self.widths,
            "height": self.heights,
            "label": pa.array([None] * len(self), pa.int64()) if self.labels is None else pa.array(self.labels, mask=self.labels < 0),
            "split": pa.array(self.splits, pa.string()),
            "size_bytes": self.sizes_bytes,
            "modified_ns": self.modified_ns,
            "digest": pa.array(self.digests, pa.string()),
        }
        if self.captions is not None:
            several = any(isinstance(caption, tuple) for caption in self.captions)
            columns["caption"] = pa.array(self.captions, pa.list_(pa.string()) if several else pa.string())
        if self.groups is not None:
            columns["group"] = pa.array(self.groups, pa.string())
        if self.group_ids is not None:
            columns["group_id"] = self.group_ids
        table = pa.table(columns)
        if self.classes is not None:
            table = table.replace_schema_metadata({_CLASSES: json.dumps(self.classes).encode()})
        write_atomically(Path(path), lambda file: pq.write_table(table, file))

    @classmethod
    def read(cls, path: str | Path) -> Samples:
        """Reads what `to_parquet` wrote."""
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(Path(path))
            column = {name: table[name] for name in table.column_names}
            labels = column["label"]
            classes = (table.schema.metadata or {}).get(_CLASSES)
            return cls(
                **{name: column[singular].to_numpy().astype(np.int64) for name, singular in _INT_COLUMNS.items()},
                **{name: column[singular].to_pylist() for name, singular in _TEXT_COLUMNS.items()},
                labels=None if labels.null_count == len(table) else labels.fill_null(-1).to_numpy().astype(np.int64),
                classes=None if classes is None else json.loads(classes),
                captions=[_tupled(value) for value in column["caption"].to_pylist()] if "caption" in column else None,
                groups=column["group"].to_pylist() if "group" in column else None,
                group_ids=column["group_id"].to_numpy().astype(np.int64) if "group_id" in column else None,
            )
        except FileNotFoundError:
            raise KinfolkError(f"there is no table of samples at `{path}`; restore it, or start a new run") from None
        except Exception as error:  # readers raise nearly anything on a broken file
            raise KinfolkError(f"`{path}` is not a readable table of samples: {first_line(error)}") from error

    def _take(self, rows: Sequence[int]) -> Samples:
        index = np.asarray(rows, dtype=np.int64)
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in _INT_COLUMNS}
        for name in (*_TEXT_COLUMNS, "captions", "groups"):
            values = getattr(self, name)
            taken[name] = None if values is None else [values[row] for row in rows]
        for name in ("labels", "group_ids"):
            numbers = getattr(self, name)
            taken[name] = None if numbers is None else numbers[index]
        return replace(self, **taken)


def _tupled(value: str | list[str] | None) -> Caption | None:
    return tuple(value) if isinstance(value, list) else value


_INT_COLUMNS = {"ids": "id", "widths": "width", "heights": "height", "sizes_bytes": "size_bytes", "modified_ns": "modified_ns"}
_TEXT_COLUMNS = {"keys": "key", "splits": "split", "digests": "digest"}
