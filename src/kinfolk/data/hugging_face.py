"""Folders and Parquet files of Hugging Face, read by the package `datasets`.

`load_dataset` and `load_from_disk` find the files, the splits and the class names. Images must be
stored as bytes; a row that only names a file is refused, because a data set from elsewhere must not
choose files of this machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, final

from kinfolk.data.captions import usable_captions
from kinfolk.data.decode import RefusedError
from kinfolk.data.labels import encode_labels, split_name
from kinfolk.data.source import Item, Source
from kinfolk.data.table import Columns
from kinfolk.errors import KinfolkError, UsageError, install_hint
from kinfolk.files import first_line

_LABELS = ("label", "labels", "fine_label")


def find_hugging_face(path: Path, image_column: str) -> Path | None:
    """`path` if it is a folder of `save_to_disk`, or Parquet files that contain images, in the
    folder or in one below it; otherwise None."""
    if path.is_file():
        return (
            path if path.suffix.lower() == ".parquet" and _has_images(path, image_column) else None
        )
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return path
    tables = (file for pattern in ("*", "*/*") for file in path.glob(f"{pattern}.parquet"))
    return path if any(_has_images(file, image_column) for file in islice(tables, 8)) else None


def _has_images(path: Path, image_column: str) -> bool:
    """Whether a Parquet file has a column of images: structs with `bytes`, or bytes in
    `image_column`. False for a file that can't be read, which other readers report."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        kinds = {field.name: field.type for field in pq.read_schema(path)}
    except Exception:
        return False
    plain = kinds.get(image_column, pa.null())
    return not pa.types.is_string(plain) and (
        pa.types.is_binary(plain)
        or any(
            pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            for kind in kinds.values()
        )
    )


def open_hugging_face(path: Path, name: str, columns: Columns) -> HuggingFaceSource:
    """The source for what `find_hugging_face` found.

    Args:
        columns: names of the columns. Without a column `image`, the only column of images is used;
            without `label`, a column `labels` or `fine_label`, or the only one with class names.
    """
    try:
        package = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"{name} needs the package datasets; {install_hint('datasets', 'hf')}"
        ) from error
    try:
        splits = _load(package, path)
        features = next(iter(splits.values())).features
        image = _image_column(package, features, columns.image, name)
        label = _label_column(features, columns.label, name)
        splits = {
            split: data.cast_column(image, package.Image(decode=False))
            for split, data in splits.items()
        }
        return HuggingFaceSource(name, path, splits, image, label, columns)
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        why = first_line(error.__cause__ or error)
        raise KinfolkError(f"{name} can't be read by `datasets`: {why}") from error


def _load(package: Any, path: Path) -> dict[str, Any]:
    """The data set of each split."""
    if path.is_dir() and not _data_files(path, "*.parquet"):
        found = package.load_from_disk(str(path))
    else:
        package.disable_progress_bars()
        where = {"data_dir": str(path)} if path.is_dir() else {"data_files": str(path)}
        found = package.load_dataset("parquet", **where)
    if not isinstance(found, Mapping):
        found = {str(found.split or "train"): found}
    return {split: data for split, data in found.items() if len(data)} or dict(found)


def _data_files(path: Path, *patterns: str) -> list[Path]:
    return [path] if path.is_file() else [file for each in patterns for file in path.rglob(each)]


@final
class HuggingFaceSource(Source):
    """Images of a Hugging Face folder, with a data set for each split. Keys are `split/row`."""

    def __init__(
        self,
        name: str,
        path: Path,
        splits: Mapping[str, Any],
        image: str,
        label: str | None,
        columns: Columns,
    ) -> None:
        items = list[Item]()
        self.name, self.native_size, self.refused, self._items = name, None, [], items
        features = next(iter(splits.values())).features
        roles = {
            role: _optional_column(features, role, getattr(columns, role), name)
            for role in ("caption", "group", "split")
        }
        rows = list(_rows(splits, {"label": label, **roles}))
        labels, self.classes = encode_labels(
            [row["label"] for _, _, row in rows], name, getattr(features.get(label), "names", None)
        )
        self._image, self._places = image, list[tuple[Any, int]]()
        for (split, place, row), number in zip(rows, labels, strict=True):
            key = f"{split_name(split)}/{place}"
            caption, faults = (
                (None, []) if roles["caption"] is None else usable_captions(row["caption"])
            )
            self.refused += [(f"{key}[{part}]" if part else key, why) for part, why in faults]
            if roles["caption"] is not None and caption is None:
                continue
            within = split if roles["split"] is None else str(row["split"] or "")
            group = None if row["group"] is None else str(row["group"])
            items.append(Item(key, number, split_name(within), caption, group))
            self._places.append((splits[split], place))
        if not rows:
            raise KinfolkError(f"{name} holds no images")
        files = [file.stat() for file in _data_files(path, "*.parquet", "*.arrow")]
        self._stat = (
            sum(file.st_size for file in files),
            max(file.st_mtime_ns for file in files),
        )

    def load(self, index: int) -> bytes:
        data, row = self._places[index]
        value = data[row][self._image]
        found = None if value is None else value.get("bytes")
        if not isinstance(found, bytes):
            raise RefusedError(
                "the row has no bytes of an image; save the data set with its images embedded"
            )
        return found

    def stat(self, index: int) -> tuple[int, int]:
        return self._stat

    def release(self) -> None:
        super().release()
        self._places = []


def _rows(
    splits: Mapping[str, Any], roles: Mapping[str, str | None]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(split, row, value of each role) of every row; images are not read."""
    chosen = sorted({column for column in roles.values() if column is not None})
    for split, data in splits.items():
        few = data.select_columns(chosen) if chosen else [{}] * len(data)
        for row, values in enumerate(few):
            yield split, row, {role: values.get(column) for role, column in roles.items()}


def _image_column(package: Any, features: Any, chosen: str, name: str) -> str:
    found = [
        column
        for column, kind in features.items()
        if isinstance(kind, package.Image)
        or (column == chosen and getattr(kind, "dtype", "") in ("binary", "large_binary"))
        or (isinstance(kind, dict) and "bytes" in kind)
    ]
    if chosen in found:
        return chosen
    if chosen == "image" and len(found) == 1:
        return str(found[0])
    raise UsageError(
        f"{name} has no column {chosen!r} of images; its columns are {_named(features)}; choose one"
        " by `image_column` (--set data.image_column=NAME)"
    )


def _label_column(features: Any, chosen: str | None, name: str) -> str | None:
    if chosen is not None:
        return _optional_column(features, "label", chosen, name)
    coded = [column for column, kind in features.items() if getattr(kind, "names", None)]
    found = [column for column in _LABELS if column in features] or coded
    if len(found) > 1 and found == coded:
        raise UsageError(
            f"{name} has several columns of labels ({', '.join(map(repr, coded))}); choose one by"
            " `label_column` (--set data.label_column=NAME)"
        )
    return found[0] if found else None


def _optional_column(features: Any, role: str, chosen: str | None, name: str) -> str | None:
    """The column `chosen`, which must exist, or the one named like its role, if it exists."""
    if chosen is not None and chosen not in features:
        raise UsageError(
            f"{name} has no column {chosen!r} for `{role}_column`; its columns are"
            f" {_named(features)}"
        )
    return chosen or (role if role in features else None)


def _named(features: Any) -> str:
    return ", ".join(map(repr, features))
