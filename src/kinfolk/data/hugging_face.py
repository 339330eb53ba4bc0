"""Folders of Hugging Face `datasets`: Parquet files that hold the images' bytes, and what
`save_to_disk` writes. The package is not needed.

An image is a struct {bytes, path} or plain bytes. Splits come from the file names
(`train-00000-of-00002.parquet`) or from the folders they are in; class names come from the schema's
metadata. Images are read row group by row group, never all at once.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np

from kinfolk.data.captions import usable_captions
from kinfolk.data.decode import RefusedError
from kinfolk.data.labels import encode_labels, split_name
from kinfolk.data.source import Item, Source
from kinfolk.data.table import Columns, column_values
from kinfolk.errors import KinfolkError, UsageError, shown
from kinfolk.files import first_line

_LABELS = ("label", "labels", "fine_label")
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+(-[0-9a-f]+)?")
_MOST_FOLDERS = 64  # a folder with more of them holds classes, not the data sets of a repository
Splits = dict[str, list[Path]]


def find_hugging_face(path: Path, image_column: str) -> Splits | None:
    """The data files of each split, below a folder or of one Parquet file; None if `path` holds no
    such data."""
    if path.is_file():
        return (
            {"train": [path]}
            if path.suffix.lower() == ".parquet" and _holds_images(path, image_column)
            else None
        )
    if (path / "dataset_dict.json").is_file():
        names = [str(name) for name in _json(path / "dataset_dict.json").get("splits", ())]
        if any(os.path.basename(name) != name for name in names):
            raise KinfolkError(
                f"`{path / 'dataset_dict.json'}` names splits that are not folders beside it:"
                f" {shown(repr(names))}"
            )
        return {split_name(name): _saved(path / name) for name in names}
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return {split_name(str(_json(path / "state.json").get("_split") or "train")): _saved(path)}
    return _parquet_files(path, image_column)


def open_hugging_face(splits: Splits, name: str, columns: Columns) -> HuggingFaceSource:
    """The source for what `find_hugging_face` found.

    Args:
        columns: names of the columns. Without a column `image`, the only one that holds images is
            taken; without `label`, a column `labels` or `fine_label`, or the only one with class
            names.
    """
    folders = {os.path.realpath(path.parent) for paths in splits.values() for path in paths}
    root = Path(os.path.commonpath(folders)) if folders else Path()
    tables = [(split, _Table(path, root)) for split, paths in splits.items() for path in paths]
    if not any(len(table) for _, table in tables):
        raise KinfolkError(f"{name} holds no images")
    first = tables[0][1]
    image, label = (
        _image_column(first, columns.image, name),
        _label_column(first, columns.label, name),
    )
    wanted = {"caption": columns.caption, "group": columns.group, "split": columns.split}
    roles: dict[str, str | None] = {"label": label}
    for role, given in wanted.items():
        if given is not None and given not in first.schema.names:
            raise UsageError(
                f"{name} has no column {given!r} for `{role}_column`; its columns are"
                f" {', '.join(map(repr, first.schema.names))}"
            )
        roles[role] = given or (role if role in first.schema.names else None)
    for _, table in tables:
        missing = [
            column
            for column in (image, *roles.values())
            if column is not None and column not in table.schema.names
        ]
        if missing:
            raise KinfolkError(
                f"`{table.path}` has no column {missing[0]!r}, which `{first.path}` has; all files"
                " must have the same columns"
            )
    found: dict[str, list[Any]] = {role: [] for role in roles}
    paths: list[Any] = []
    of_split: list[str] = []
    for split, table in tables:
        paths += table.paths(image)
        of_split += [split] * len(table)
        for role, column in roles.items():
            found[role] += [None] * len(table) if column is None else table.values(column)
    if roles["split"] is not None:
        of_split = [split_name(str(value or "")) for value in found["split"]]
    labels, classes = encode_labels(found["label"], name, first.class_names(label))
    items: list[Item] = []
    refused: list[tuple[str, str]] = []
    places: list[tuple[int, int]] = [
        (number, row) for number, (_, table) in enumerate(tables) for row in range(len(table))
    ]
    kept: list[tuple[int, int]] = []
    for row, key in enumerate(_keys(of_split, paths)):
        caption, faults = (
            (None, []) if roles["caption"] is None else usable_captions(found["caption"][row])
        )
        refused += [(f"{key}[{number}]" if number else key, fault) for number, fault in faults]
        if roles["caption"] is not None and caption is None:
            continue
        group = found["group"][row]
        items.append(
            Item(key, labels[row], of_split[row], caption, None if group is None else str(group))
        )
        kept.append(places[row])
    return HuggingFaceSource(
        name, items, [table for _, table in tables], kept, image, classes, refused
    )


@final
class HuggingFaceSource(Source):
    """Images inside Parquet or Arrow files."""

    def __init__(
        self,
        name: str,
        items: list[Item],
        tables: list[_Table],
        places: list[tuple[int, int]],
        column: str,
        classes: list[str] | None,
        refused: list[tuple[str, str]],
    ) -> None:
        self.name, self.classes, self.refused, self.native_size = name, classes, refused, None
        self._items, self._tables, self._places, self._column = items, tables, places, column
        self._stats = [
            (status.st_size, status.st_mtime_ns)
            for status in (table.path.stat() for table in tables)
        ]

    def items(self) -> list[Item]:
        return self._items

    def load(self, index: int) -> bytes:
        number, row = self._places[index]
        for other in self._tables:  # rows are read in order: one row group is kept
            if other is not self._tables[number]:
                other.forget()
        return self._tables[number].image(self._column, row)

    def label(self, index: int) -> int | None:
        return self._items[index].label

    def path(self, index: int) -> None:
        return None

    def stat(self, index: int) -> tuple[int, int]:
        return self._stats[self._places[index][0]]

    def release(self) -> None:
        self._items, self._places = [], []


@final
class _Table:
    """A Parquet file or a stream of Arrow batches; columns are read when they are needed.

    Args:
        path: the file.
        root: the folder of the data set; files that the table names must be in it.
    """

    def __init__(self, path: Path, root: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self._root = path, root
        self._group: tuple[int, Any] | None = None
        with _readable(path):
            if path.suffix.lower() == ".parquet":
                self._file = pq.ParquetFile(path)
                self.schema = self._file.schema_arrow
                meta = self._file.metadata
                sizes = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
            else:
                self._file, self._whole = (
                    None,
                    pa.ipc.open_stream(pa.memory_map(str(path))).read_all(),
                )
                self.schema, sizes = self._whole.schema, [len(self._whole)]
        self._starts = np.cumsum([0, *sizes]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def values(self, column: str) -> list[Any]:
        """All values of a column."""
        with _readable(self.path):
            table = self._whole if self._file is None else self._file.read(columns=[column])
            return column_values(table[column])

    def paths(self, column: str) -> list[Any]:
        """The file names that stand beside the bytes of the images; None where there are none."""
        import pyarrow as pa

        kind = self.schema.field(column).type
        if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
            return [None] * len(self)
        with _readable(self.path):
            table = (
                self._whole if self._file is None else self._file.read(columns=[f"{column}.path"])
            )
            return [
                value and value.get("path") for value in _without_bytes(table[column]).to_pylist()
            ]

    def image(self, column: str, row: int) -> bytes:
        """The bytes of one image."""
        group = bisect_right(self._starts, row) - 1
        with _readable(self.path):
            if self._group is None or self._group[0] != group:
                table = (
                    self._whole
                    if self._file is None
                    else self._file.read_row_group(group, columns=[column])
                )
                self._group = group, table[column]
            value = self._group[1][row - self._starts[group]].as_py()
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):
                return self._file_bytes(str(value["path"]))
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise RefusedError("the image column is empty")
        return value

    def _file_bytes(self, name: str) -> bytes:
        """The bytes of a file that the table names. One outside of the data set is not read: a
        data set from elsewhere must not be able to choose files of this machine."""
        try:
            file = Path(os.path.realpath(self.path.parent / name))
            if file.is_relative_to(self._root):
                return file.read_bytes()
        except (OSError, ValueError) as error:
            raise RefusedError(
                f"it holds no bytes, and its file can't be read: {first_line(error)}"
            ) from error
        raise RefusedError(
            f"it holds no bytes, and the file it names ({shown(name)}) is outside of "
            f"{shown(str(self._root))}; copy the file into that folder"
        )

    def forget(self) -> None:
        """Frees the row group that was read last."""
        self._group = None

    def features(self) -> dict[str, Any]:
        """What the metadata says about the columns."""
        try:
            known = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}

    def class_names(self, column: str | None) -> list[str] | None:
        """The names of the classes of a column of labels, where the metadata has them."""
        feature = self.features().get(column or "")
        names = (
            feature.get("names")
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
            else None
        )
        return [str(name) for name in names] if isinstance(names, list) and names else None


def _image_columns(schema: Any, wanted: str) -> list[str]:
    """The columns that hold bytes of images: structs with `bytes`, and plain bytes in the column
    `wanted`. None where that holds texts, for these are paths of files."""
    import pyarrow as pa

    kinds = {field.name: field.type for field in schema}
    if wanted in kinds and (
        pa.types.is_string(kinds[wanted]) or pa.types.is_large_string(kinds[wanted])
    ):
        return []
    structs = [
        name
        for name, kind in kinds.items()
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    ]
    plain = (
        [wanted]
        if wanted in kinds
        and (pa.types.is_binary(kinds[wanted]) or pa.types.is_large_binary(kinds[wanted]))
        else []
    )
    return structs + plain


def _without_bytes(column: Any) -> Any:
    """A column of structs, with the paths alone."""
    import pyarrow as pa
    import pyarrow.compute as pc

    paths = pc.struct_field(column, "path")
    return pa.chunked_array(
        [pa.StructArray.from_arrays([chunk], ["path"]) for chunk in paths.chunks],
        pa.struct([("path", paths.type)]),
    )


def _image_column(table: _Table, wanted: str, name: str) -> str:
    found, columns = _image_columns(table.schema, wanted), ", ".join(map(repr, table.schema.names))
    if wanted in found:
        return wanted
    if wanted != "image":
        raise UsageError(
            f"{name} has no column {wanted!r} of images for `image_column`; its columns are"
            f" {columns}"
        )
    if len(found) != 1:
        what = (
            f"several columns of images ({', '.join(map(repr, found))})"
            if found
            else f"no column of images among {columns}"
        )
        raise UsageError(
            f"{name} has {what}; choose one by `image_column` (--set data.image_column=NAME)"
        )
    return found[0]


def _label_column(table: _Table, wanted: str | None, name: str) -> str | None:
    names = table.schema.names
    if wanted is not None:
        if wanted not in names:
            raise UsageError(
                f"{name} has no column {wanted!r} for `label_column`; its columns are"
                f" {', '.join(map(repr, names))}"
            )
        return wanted
    usual = [column for column in _LABELS if column in names]
    coded = [column for column in names if table.class_names(column) is not None]
    if not usual and len(coded) > 1:
        found = ", ".join(map(repr, coded))
        raise UsageError(
            f"{name} has several columns of labels ({found}); choose one by `label_column` (--set"
            " data.label_column=NAME)"
        )
    return next(iter([*usual, *coded]), None)


def _keys(splits: list[str], paths: list[Any]) -> list[str]:
    """`split/file name` where every image has a name of its own, else `split/row`."""
    named = [f"{split}/{path}" for split, path in zip(splits, paths, strict=True)]
    if all(paths) and len(set(named)) == len(named):
        return [name.encode("utf-8", "backslashreplace").decode() for name in named]
    count: dict[str, int] = {}
    keys = []
    for split in splits:
        keys.append(f"{split}/{count.setdefault(split, 0)}")
        count[split] += 1
    return keys


def _parquet_files(folder: Path, image_column: str) -> Splits | None:
    """Parquet files that hold images: in the folder, in `data/`, in folders named like splits, or
    in its only folder that has any."""
    try:
        with os.scandir(folder) as entries:
            tops = sorted(
                Path(entry.path)
                for entry in entries
                if entry.is_dir() and not entry.name.startswith(".")
            )
    except OSError:  # the reader of image folders will report it
        return None
    by_folder = {
        place: files
        for place in (folder, *tops[:_MOST_FOLDERS])
        if (files := _parquets(place)) and _holds_images(files[0], image_column)
    }
    if not by_folder:
        return None
    if folder in by_folder:
        by_folder = {folder: by_folder[folder]}
    splits: Splits = {}
    is_split = {place: split_name(place.name) in ("train", "val", "test") for place in by_folder}
    if len(by_folder) > 1 and not all(is_split.values()):
        names = ", ".join(f"{place.name}/" for place in by_folder)
        raise UsageError(
            f"`{folder}` holds several data sets ({names}); give the folder of one of them"
        )
    for place, files in by_folder.items():
        for file in files:
            splits.setdefault(
                split_name(place.name) if len(by_folder) > 1 else _split_of(file), []
            ).append(file)
    return splits


def _parquets(folder: Path) -> list[Path]:
    """The Parquet files of a folder; a folder whose first thousand files are none is not listed
    further."""
    try:
        with os.scandir(folder) as entries:
            if not any(entry.name.endswith(".parquet") for entry in islice(entries, 1000)):
                return []
        return sorted(folder.glob("[!.]*.parquet"))
    except OSError:
        return []


def _split_of(file: Path) -> str:
    """The split that a file's name begins with: `train-00000-of-00002`, `test`, `validation_0`."""
    shard = _SHARD.fullmatch(file.stem)
    start = shard["split"] if shard is not None else re.split(r"[-_. ]", file.stem)[0]
    name = split_name(start)
    return name if shard is not None or name in ("train", "val", "test") else "train"


def _holds_images(path: Path, image_column: str) -> bool:
    """Whether a Parquet file has a column of image bytes; False also for one that can't be read,
    which other readers report."""
    import pyarrow.parquet as pq

    try:
        return bool(_image_columns(pq.read_schema(path), image_column))
    except Exception:
        return False


def _saved(folder: Path) -> list[Path]:
    """The Arrow files that `save_to_disk` listed."""
    files = _json(folder / "state.json").get("_data_files")
    names = (
        [str(file.get("filename", "")) for file in files if isinstance(file, dict)]
        if isinstance(files, list)
        else []
    )
    if not names or any(os.path.basename(name) != name or not name for name in names):
        raise KinfolkError(
            f"`{folder / 'state.json'}` does not list the data files beside it; save the data set"
            " again"
        )
    return [folder / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KinfolkError(f"`{path}` is not readable JSON: {first_line(error)}") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (KinfolkError, RefusedError):
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` is not a readable table: {first_line(error)}") from error
