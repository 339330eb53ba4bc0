"""Labels of the audited samples, from a file or from Python.

Dimension key: N data set.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.auditing.features import Ints
from kinfolk.auditing.input import choose_key
from kinfolk.data.labels import encode_labels
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import first_line

COLUMN = "label"


def encoded(values: Any, num_samples: int, name: str = "`labels`") -> tuple[Ints, list[str] | None]:
    """(N,) class of each sample, −1 where it is unknown, and the classes' names where they have any."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(listed) != num_samples:
        raise UsageError(f"{name} (={len(listed):,} labels) must be as many as the samples (={num_samples:,}): one for each row, in order")
    if any(isinstance(value, list) for value in listed):
        raise UsageError(f"{name} must hold one label for each sample, not a list of them")
    labels, classes = encode_labels(listed, name)
    return np.asarray([-1 if label is None else label for label in labels], dtype=np.int64), classes


def read_labels(path: str | os.PathLike[str]) -> list[Any]:
    """The labels in a `.npy`, `.npz` (`labels` or `y`), `.csv` / `.tsv` / `.parquet` (column `label`) or `.txt` (a line each) file."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file `{path}`; --labels takes .npy, .npz, .csv, .tsv, .parquet or .txt")
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            return list(np.load(path, allow_pickle=False).tolist())
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                names = list(arrays.files)
                return list(
                    arrays[next((name for name in ("labels", "label", "y") if name in names), None) or choose_key(names, None, path)]
                )
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path, partitioning=None)
            return list(table[_column(table.column_names, path)].to_pylist())
        if suffix in (".csv", ".tsv"):
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","))
            place = (rows[0] if rows else []).index(_column(rows[0] if rows else [], path))
            return [row[place] for row in rows[1:] if row]
        if suffix == ".txt":
            return path.read_text(encoding="utf-8").splitlines()
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` holds no readable labels ({first_line(error)})") from error
    raise UsageError(f"--labels (={path}) must end in .npy, .npz, .csv, .tsv, .parquet or .txt")


def _column(names: list[str], path: Path) -> str:
    if COLUMN in names:
        return COLUMN
    if len(names) == 1:
        return names[0]
    raise UsageError(f"`{path}` has no column {COLUMN!r}; its columns are {', '.join(names) or 'none'}")
