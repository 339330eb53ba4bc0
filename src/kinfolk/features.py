"""Features of samples: the reader of feature files, which runs no code in them, and blocks of unit-
norm rows.

Dimension key: N data set, D embedding, R rows of a block.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import KinfolkError, UsageError, similar_path
from kinfolk.files import check_safetensors, explain_read_errors

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

FEWEST = 3
_BLOCK_ELEMENTS = 1 << 22  # values in a block while the rows are checked
_EXACT_IN_FLOAT32 = (1e-30, 1e30)  # range of one over the norm in which float32 is enough
KEYS = ("features", "embeddings", "embedding", "x")
"""Preferred names in a file with several arrays."""


class Features:
    """(N, D), possibly memory-mapped, checked once; `rows` and `take` return unit-norm float32."""

    def __init__(self, array: NDArray[Any], name: str = "`features`") -> None:
        if array.ndim != 2 or array.shape[1] < 1 or len(array) < FEWEST:
            raise UsageError(
                f"{name} (=shape {array.shape}) must have the shape (samples, features), with at"
                f" least {FEWEST} samples and one feature"
            )
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise UsageError(
                f"{name} (={array.dtype}) must be float16, float32 or float64; convert it"
            )
        self.array, self.name = array, name
        self._inverse_N = self._inverse_norms()

    def __len__(self) -> int:
        return len(self.array)

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def rows(self, start: int, stop: int) -> Floats:
        return self._unit(self.array[start:stop], self._inverse_N[start:stop])

    def take(self, ids: Ints) -> Floats:
        return self._unit(self.array[ids], self._inverse_N[ids])

    def _unit(self, values: NDArray[Any], inverse: NDArray[np.float64]) -> Floats:
        low, high = _EXACT_IN_FLOAT32
        if values.dtype != np.float64 and low < inverse.min() <= inverse.max() < high:
            inverse, values = inverse.astype(np.float32), values.astype(np.float32, copy=False)
        return np.ascontiguousarray(values * inverse[:, None], dtype=np.float32)

    def _inverse_norms(self) -> NDArray[np.float64]:
        """(N,); rows that are zero or not finite are refused."""
        inverse_N, largest_N = np.empty((2, len(self.array)))
        step = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(inverse_N), step):
            block = self.array[start : start + step].astype(np.float64)
            largest = largest_N[start : start + step] = np.abs(block).max(1)
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                # the square of 1e300 would overflow
                norms = np.linalg.norm(block / largest[:, None], axis=1)
                inverse_N[start : start + step] = 1 / norms / largest
        for bad_N, words in (
            (~np.isfinite(largest_N), "are NaN or infinite"),
            (~np.isfinite(inverse_N), "are all zero and have no direction to compare"),
        ):
            if bad_N.any():
                raise KinfolkError(
                    f"{bad_N.sum():,} of {len(bad_N):,} rows (the first is row {bad_N.argmax()}) of"
                    f" {self.name} {words}; remove or repair them"
                )
        return inverse_N


def open_features(path: str | os.PathLike[str], key: str | None = None) -> NDArray[Any]:
    """(N, D) in a file with one of `SUFFIXES`; `key` names the array if there are several."""
    path = Path(path)
    suffix, kinds = path.suffix.lower(), ", ".join(SUFFIXES)
    if not path.exists():
        instead = (
            "; give a folder of images, a run folder, or a file of features, such as `kinfolk embed"
            " RUN --out features.npy` writes"
        )
        raise UsageError(f"there is no file or folder `{path}`{similar_path(path) or instead}")
    if path.is_dir() or suffix not in SUFFIXES:
        why = " (this folder has no config.yaml)" if path.is_dir() else ""
        raise UsageError(f"`{path}` must be a run folder{why} or a file that ends in {kinds}")
    with explain_read_errors(f"`{path}`"):
        return _READERS[suffix](path, key)


def choose_key(names: list[str], key: str | None, path: Path) -> str:
    preferred = names if len(names) == 1 else [name for name in KEYS if name in names]
    chosen = preferred[0] if key is None and preferred else key
    if chosen not in names:
        raise UsageError(
            f"`{path}` contains {', '.join(names) or 'nothing'}; call the features `features`, or"
            " give their name with --key"
        )
    return chosen


def _npy(path: Path, key: str | None) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # numpy refuses an impossible shape in the next line
        # a private map: no write would reach the file
        return np.lib.format.open_memmap(path, mode="c")


def _npz(path: Path, key: str | None) -> NDArray[Any]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no zip archive")
    with np.load(path, allow_pickle=False) as arrays:
        array: NDArray[Any] = arrays[choose_key(arrays.files, key, path)]
    return array


def _safetensors(path: Path, key: str | None) -> NDArray[Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        check_safetensors(path, file.metadata() or {})
        return from_tensor(file.get_tensor(choose_key(sorted(file.keys()), key, path)))


def _torch(path: Path, key: str | None) -> NDArray[Any]:
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, dict):
        names = [str(name) for name, value in loaded.items() if isinstance(value, torch.Tensor)]
        loaded = loaded[choose_key(names, key, path)]
    if not isinstance(loaded, torch.Tensor):
        raise UsageError(
            f"`{path}` (={type(loaded).__name__}) must contain a tensor or a dictionary of tensors"
        )
    return from_tensor(loaded)


def from_tensor(tensor: Any) -> NDArray[Any]:
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _parquet(path: Path, key: str | None) -> NDArray[Any]:
    """One column of lists; other columns, such as images, are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    values = {field.name: getattr(field.type, "value_type", pa.null()) for field in schema}
    lists = [name for name, kind in values.items() if pa.types.is_floating(kind)]
    if not lists:
        raise UsageError(
            f"`{path}` has no column of lists of floats; its columns are {', '.join(schema.names)}"
        )
    table = pq.read_table(path, columns=[choose_key(lists, key, path)], partitioning=None)
    if not len(table):
        raise KinfolkError(f"`{path}` has no rows")
    empty_N = table.column(0).is_null().to_numpy()
    if empty_N.any():
        raise KinfolkError(
            f"`{path}` has rows without features: {empty_N.sum():,} of {len(empty_N):,} (the first"
            f" is row {empty_N.argmax()}); remove them"
        )
    rows = table.column(0).to_numpy()
    length_N = np.array([len(row) for row in rows])
    if (other_N := length_N != length_N[0]).any():
        row = other_N.argmax()
        raise KinfolkError(
            f"the rows of `{path}` have unequal lengths: {length_N[0]} in row 0 and {length_N[row]}"
            f" in row {row}; write it again"
        )
    return np.stack(rows)


_READERS: dict[str, Callable[[Path, str | None], NDArray[Any]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}
SUFFIXES = tuple(_READERS)
