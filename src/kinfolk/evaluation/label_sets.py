"""Several labels for a sample, as of VOC: a table with a row for each label of an image.

Dimension key: N samples, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kinfolk.data.columns import read_columns
from kinfolk.errors import KinfolkError, UsageError

_TRUE = {"1", "true", "yes"}


def read_label_sets(path: str | Path, keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """(N, K): 1 where the sample has the label, 0 where it has not, −1 where that does not count; and the K labels, sorted.

    The table (`.csv`, `.tsv` or `.parquet`) has the columns `image` (the sample's key: its path within the data) and `label`, a row for
    each label of an image, and perhaps `difficult`: 1 where this label does not count for this image. A sample that it does not name has
    no labels at all: −1 throughout.
    """
    path = Path(path)
    if not path.is_file() or path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise UsageError(f"there is no table `{path}`; --label-sets takes a .csv, .tsv or .parquet file with the columns image and label")
    columns = read_columns(path)
    for name in ("image", "label"):
        if name not in columns:
            raise UsageError(f"`{path}` has no column {name!r}; its columns are {', '.join(map(repr, columns))}")
    labels = ["" if value is None else str(value).strip() for value in columns["label"]]
    difficult = [str(value).strip().lower() in _TRUE for value in columns.get("difficult", [None] * len(labels))]
    names = sorted({label for label in labels if label})
    if not names:
        raise KinfolkError(f"`{path}` names no labels")
    row_of, column_of = {key: row for row, key in enumerate(keys)}, {name: column for column, name in enumerate(names)}
    sets = np.full((len(keys), len(names)), -1, dtype=np.int64)
    listed = [
        (row_of[image], label, hard) for image, label, hard in zip(columns["image"], labels, difficult, strict=True) if image in row_of
    ]
    if not listed:
        raise UsageError(f"`{path}` names none of the data's images; the first here is {keys[0]!r}, there {columns['image'][0]!r}")
    for row, _, _ in listed:
        sets[row] = 0
    for row, label, hard in listed:
        if label and not (hard and sets[row, column_of[label]] == 1):  # one clear instance is enough
            sets[row, column_of[label]] = -1 if hard else 1
    return sets, names
