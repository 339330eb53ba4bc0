"""Keys, labels and texts of the audited samples, from files or from Python.

A table (.csv, .tsv, .parquet) that names its samples in a key column is joined with the features by
key, so that its order does not matter. Files without keys must have one entry for each row of the
features, in their order.

Dimension key: N data set.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.auditing.inputs import Ints, choose_key
from kinfolk.data.labels import encode_labels
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, shown
from kinfolk.files import first_line

LABEL_COLUMNS = ("label",)
TEXT_COLUMNS = ("text", "caption", "sentence")
KEY_COLUMNS = ("key", "file", "filename", "file_name", "path", "image")
KINDS = ".npy, .npz, .csv, .tsv, .parquet or .txt"


@dataclass(frozen=True)
class Column:
    """Values read from a file.

    Args:
        path: the file.
        values: one for each row of the file.
        key_column, keys: the column that names the samples and its values; None if there is none.
        ids: the column `id` as whole numbers; None if there is none.
    """

    path: Path
    values: list[Any]
    key_column: str | None = None
    keys: list[str] | None = None
    ids: list[int] | None = None


def read_labels(path: str | os.PathLike[str]) -> Column:
    """Labels from .npy, .npz (`labels`, `label` or `y`), .csv / .tsv / .parquet (column `label`) or
    .txt (one in each line)."""
    return _read(Path(path), "--labels", LABEL_COLUMNS)


def read_texts(path: str | os.PathLike[str]) -> Column:
    """Texts from .txt (one in each line) or .csv / .tsv / .parquet (column `text`, `caption` or
    `sentence`)."""
    return _read(Path(path), "--texts", TEXT_COLUMNS)


def read_keys(path: str | os.PathLike[str]) -> list[str]:
    """Keys of the rows from .txt (one in each line) or .csv / .tsv / .parquet (a column such as
    `key` or `file`)."""
    return [str(value) for value in _read(Path(path), "--keys", KEY_COLUMNS).values]


def align(column: Column, keys: Sequence[str] | None, num_samples: int) -> list[Any]:
    """(N,) the values in the order of the samples; None for samples that the file does not name.

    Args:
        column: what was read.
        keys: (N,) keys of the samples; None if they have none.
    """
    name = f"`{column.path}`"
    if column.keys is None or keys is None:
        if column.ids is not None and sorted(column.ids) == list(range(num_samples)):
            by_id = dict(zip(column.ids, column.values, strict=True))
            return [by_id[sample] for sample in range(num_samples)]
        if column.keys is None:
            return column.values
        raise UsageError(
            f"{name} names its samples in the column `{column.key_column}`, but the features have"
            " no keys to match them with; give the keys of the rows with --keys or --images, or"
            " remove the column"
        )
    given = _match(column.keys, keys)
    if given is None:
        raise UsageError(
            f"none of the {len(column.keys):,} samples in {name} is among the {len(keys):,} samples"
            f" of the features: it has {shown(column.keys[0]) if column.keys else 'no rows'}, the"
            f" features have {shown(keys[0])}; give a file with the same keys"
        )
    missing = [key for key, at in zip(keys, given, strict=True) if at is None]
    unused = len(column.keys) - (len(keys) - len(missing))
    if missing or unused:
        parts = []
        if missing:
            parts.append(
                f"has no entry for {len(missing):,} of {len(keys):,} samples (the first is"
                f" {shown(missing[0])})"
            )
        if unused:
            parts.append(f"names {unused:,} samples that are not among the features")
        warnings.warn(f"{name} {' and '.join(parts)}", KinfolkWarning, stacklevel=2)
    return [None if at is None else column.values[at] for at in given]


def encode(values: Any, num_samples: int, name: str = "`labels`") -> tuple[Ints, list[str] | None]:
    """(N,) class of each sample, −1 where it is unknown, and the names of the classes if they have
    names."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(listed) != num_samples:
        raise UsageError(
            f"{name} (={len(listed):,} labels) must be as many as the samples (={num_samples:,}):"
            " one for each row, in order"
        )
    if any(isinstance(value, list) for value in listed):
        raise UsageError(f"{name} must have one label for each sample, not a list of labels")
    labels, classes = encode_labels(listed, name)
    return np.asarray([-1 if label is None else label for label in labels], dtype=np.int64), classes


def _match(given: Sequence[str], keys: Sequence[str]) -> list[int | None] | None:
    """Position in `given` of each of `keys`, by the whole key or else by the file name alone; None
    if nothing matches."""
    for simplify in (_plain, lambda key: _plain(key).rpartition("/")[2]):
        place = {simplify(key): at for at, key in enumerate(given)}
        wanted = [simplify(key) for key in keys]
        if len(place) < len(given) or len(set(wanted)) < len(wanted):
            continue
        found = [place.get(key) for key in wanted]
        if any(at is not None for at in found):
            return found
    return None


def _plain(key: str) -> str:
    return key.replace("\\", "/").removeprefix("./")


def _read(path: Path, option: str, wanted: Sequence[str]) -> Column:
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`; {option} takes {KINDS}")
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            return Column(path, list(np.load(path, allow_pickle=False).tolist()))
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                names = list(arrays.files)
                chosen = next((name for name in (*wanted, "labels", "y") if name in names), None)
                return Column(path, list(arrays[chosen or choose_key(names, None, path)]))
        if suffix in (".csv", ".tsv", ".parquet"):
            return _from_table(path, read_table(path), wanted)
        if suffix == ".txt":
            return Column(path, path.read_text(encoding="utf-8").splitlines())
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(
            f"`{path}` has no readable {option.removeprefix('--')} ({first_line(error)})"
        ) from error
    raise UsageError(f"{option} (={path}) must end in {KINDS}")


def read_table(path: Path) -> dict[str, list[Any]]:
    """The columns of a .csv, .tsv or .parquet file by name; values of text files are texts."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path, partitioning=None)
        return {name: table[name].to_pylist() for name in table.column_names}
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [
            row
            for row in csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            if row
        ]
    if not rows:
        return {}
    short = next((number for number, row in enumerate(rows, 1) if len(row) != len(rows[0])), None)
    if short is not None:
        raise KinfolkError(
            f"`{path}` has {len(rows[short - 1])} cells in row {short} and {len(rows[0])} in its"
            " header; write it again"
        )
    return {name: [row[at] for row in rows[1:]] for at, name in enumerate(rows[0])}


def _from_table(path: Path, table: dict[str, list[Any]], wanted: Sequence[str]) -> Column:
    name = next(
        (name for name in wanted if name in table), next(iter(table)) if len(table) == 1 else None
    )
    if name is None:
        raise UsageError(
            f"`{path}` has no column {' or '.join(repr(each) for each in wanted)}; its columns are"
            f" {', '.join(table) or 'none'}"
        )
    key_column = (
        None
        if wanted is KEY_COLUMNS
        else next((key for key in KEY_COLUMNS if key in table and key != name), None)
    )
    keys = None if key_column is None else [str(key) for key in table[key_column]]
    if keys is not None and len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise UsageError(
            f"the column `{key_column}` of `{path}` names {shown(twice)} more than once; each"
            " sample must have one row"
        )
    return Column(path, table[name], key_column, keys, _whole_numbers(table.get("id")))


def _whole_numbers(values: list[Any] | None) -> list[int] | None:
    try:
        return None if values is None else [int(value) for value in values]
    except (TypeError, ValueError):
        return None
