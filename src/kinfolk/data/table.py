"""Tables of images or of text pairs (CSV, TSV, Parquet), and Hugging Face `datasets`, whose images
must be stored as bytes: a data set from elsewhere must not choose files of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, final

from kinfolk.data.decode import RefusedError
from kinfolk.data.labels import read_columns, split_name
from kinfolk.data.source import FileSource, Source, TableRows, as_utf8
from kinfolk.data.text import PairSource, open_pairs, text_columns
from kinfolk.errors import KinfolkError, UsageError, import_optional
from kinfolk.files import explain_read_errors

_ROLES = ("caption", "label", "group", "split")


Columns = Mapping[str, str | None]
"""Role → the name of its column; None: named like its role, if it exists."""


_OF_PAIRS = (
    "; a table of text pairs has the columns anchor and positive, or others that --set"
    " data.anchor_column=NAME and data.positive_column=NAME name"
)


def find_column(role: str, columns: Columns, names: Collection[str], table: str) -> str | None:
    chosen = columns.get(role)
    column: str = chosen or role
    if column in names:
        return column
    if chosen is None and role != "image":
        return None
    raise UsageError(
        f"{table} has no column {column!r} for `{role}_column`; its columns are"
        f" {', '.join(map(repr, names))}; choose one by --set data.{role}_column=NAME"
        + (_OF_PAIRS if role == "image" else "")
    )


def open_table(path: Path, columns: Columns) -> FileSource | PairSource:
    """Paths of images are relative to the table. Rows with the same image share it: their keys are
    `path`, `path#2`, …, and without a group column they are a group."""
    name, rows = f"`{path}`", read_columns(path)

    def pick(role: str) -> list[Any] | None:
        column = find_column(role, columns, rows, name)
        return None if column is None else rows[column]

    for role in ("anchor", "positive"):
        pick(role)  # refuses a chosen column that does not exist
    texts = text_columns(list(rows), columns.get("anchor"), columns.get("positive"))
    if texts is not None and (columns.get("image") or "image") not in rows:
        return open_pairs(path, rows, texts, pick)
    images = pick("image")
    if not images:
        raise KinfolkError(f"{name} has no rows")
    if odd := [value for value in images if not isinstance(value, str | None)]:
        raise KinfolkError(
            f"the image column of {name} holds {type(odd[0]).__name__}; it must hold file paths, or"
            " (in Parquet) the bytes of image files"
        )
    found = {role: pick(role) for role in _ROLES}
    if found["group"] is None and len(set(images)) < len(images):
        found["group"] = images
    made = TableRows(len(images), found, name)
    first: dict[str, int] = {}
    seen: dict[str, int] = {}
    for row, image in enumerate(images):
        seen[image] = number = seen.get(image, 0) + 1
        key = as_utf8(image or f"(row {row + 1})") + (f"#{number}" if number > 1 else "")
        file = os.path.join(path.parent, image or "")
        if (reason := _why_missing(image, file)) is not None:
            made.refused.append((key, reason))
        elif made.add(row, key, file, same_as=first.get(image)):
            first.setdefault(image, len(made.items) - 1)
    return FileSource(name, made.items, classes=made.classes, refused=made.refused)


def _why_missing(image: str | None, file: str) -> str | None:
    if not image:
        return "the image column is empty"
    is_file = "\0" not in image and os.path.isfile(file)
    return None if is_file else "there is no such file"


# Folders and Parquet files of Hugging Face


def find_hugging_face(path: Path, image_column: str) -> Path | None:
    """`path` if it is a folder of `save_to_disk`, or has Parquet files of images at its top or one
    level below."""
    if path.is_file():
        is_table = path.suffix.lower() == ".parquet"
        return path if is_table and _has_images(path, image_column) else None
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return path
    tables = islice((*path.glob("*.parquet"), *path.glob("*/*.parquet")), 8)
    return path if any(_has_images(file, image_column) for file in tables) else None


def _has_images(path: Path, image_column: str) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        kinds = {field.name: field.type for field in pq.read_schema(path)}
    except Exception:  # other readers report it
        return False
    plain = kinds.get(image_column, pa.null())
    if pa.types.is_string(plain):
        return False
    structs = [kind for kind in kinds.values() if pa.types.is_struct(kind)]
    return pa.types.is_binary(plain) or any(kind.get_field_index("bytes") >= 0 for kind in structs)


def open_hugging_face(path: Path, name: str, columns: Columns) -> HuggingFaceSource:
    package = import_optional("datasets", "datasets", "hf", name)
    with explain_read_errors(name, "data set of `datasets`"):
        return _open(package, path, name, columns)


def _open(package: Any, path: Path, name: str, columns: Columns) -> HuggingFaceSource:
    if path.is_dir() and not any(path.rglob("*.parquet")):
        found = package.load_from_disk(str(path))
    else:
        package.disable_progress_bars()
        where = {"data_dir": str(path)} if path.is_dir() else {"data_files": str(path)}
        found = package.load_dataset("parquet", **where)
    splits = found if isinstance(found, Mapping) else {str(found.split or "train"): found}
    splits = {split: data for split, data in splits.items() if len(data)}
    if not splits:
        raise KinfolkError(f"{name} holds no images")
    features = next(iter(splits.values())).features
    image = _image_column(package, features, columns.get("image") or "image", name)
    roles = {role: find_column(role, columns, features, name) for role in _ROLES}
    roles["label"] = roles["label"] or _label_column(features, name)
    raw = package.Image(decode=False)
    splits = {split: data.cast_column(image, raw) for split, data in splits.items()}
    origins = [(split, row) for split, data in splits.items() for row in range(len(data))]
    values = {
        role: None if column is None else [v for data in splits.values() for v in data[column]]
        for role, column in roles.items()
    }
    names = getattr(features.get(roles["label"]), "names", None)
    made = TableRows(len(origins), values, name, names)
    for at, (split, row) in enumerate(origins):
        made.add(at, f"{split_name(split)}/{row}", (splits[split], row), split=split)
    files = [path] if path.is_file() else [*path.rglob("*.parquet"), *path.rglob("*.arrow")]
    stats = [file.stat() for file in files]
    stat = sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)
    return HuggingFaceSource(name, made, image, stat)


@final
class HuggingFaceSource(Source):
    """The origin of an item is (data set, row), `stat` the size and time of all files."""

    def __init__(self, name: str, made: TableRows, image: str, stat: tuple[int, int]) -> None:
        super().__init__(name, made.items, classes=made.classes, refused=made.refused)
        self._image, self._stat = image, stat

    def load(self, index: int) -> bytes:
        data, row = self._items[index].origin
        found = (data[row][self._image] or {}).get("bytes")
        if not isinstance(found, bytes):
            raise RefusedError(
                "the row has no bytes of an image; save the data set with its images embedded"
            )
        return found

    def stat(self, index: int) -> tuple[int, int]:
        return self._stat


def _image_column(package: Any, features: Any, chosen: str, name: str) -> str:
    found = [
        column
        for column, kind in features.items()
        if isinstance(kind, package.Image)
        or (column == chosen and getattr(kind, "dtype", "") in ("binary", "large_binary"))
        or (isinstance(kind, dict) and "bytes" in kind)
    ]
    if chosen not in found and (chosen != "image" or len(found) != 1):
        raise UsageError(
            f"{name} has no column {chosen!r} of images; its columns are"
            f" {', '.join(map(repr, features))}; choose one by --set data.image_column=NAME"
        )
    return chosen if chosen in found else str(found[0])


def _label_column(features: Any, name: str) -> str | None:
    coded = [column for column, kind in features.items() if getattr(kind, "names", None)]
    found = [column for column in ("labels", "fine_label") if column in features] or coded
    if len(found) > 1 and found == coded:
        raise UsageError(
            f"{name} has several columns of labels ({', '.join(map(repr, coded))}); choose one by"
            " --set data.label_column=NAME"
        )
    return found[0] if found else None
