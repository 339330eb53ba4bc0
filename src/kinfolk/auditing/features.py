"""Features of a data set, read in blocks of rows as unit vectors; the array itself is never copied whole.

Dimension key: N data set, D embedding, R rows of a block.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kinfolk.errors import KinfolkError, UsageError

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

FEWEST = 3
_BLOCK_ELEMENTS = 1 << 22
"""Numbers that are looked at together while the rows are checked."""
_ORDINARY = (1e-30, 1e30)
"""Between these one over the norm can be taken in 32 bits."""


class Features:
    """(N, D) numbers, checked once; `rows` gives unit-norm float32.

    Args:
        array: (N, D) float16, float32 or float64, perhaps memory-mapped; neither copied nor changed.
        name: what messages call it.
    """

    def __init__(self, array: NDArray[Any], name: str = "`features`") -> None:
        if array.ndim != 2:
            raise UsageError(f"{name} (=shape {array.shape}) must have the shape (samples, features): one row for each sample")
        if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
            raise UsageError(f"{name} (={array.dtype}) must be float16, float32 or float64; convert it")
        if len(array) < FEWEST:
            raise UsageError(f"{name} (={len(array)} samples) must hold at least {FEWEST}: an audit compares each sample with all others")
        if array.shape[1] < 1:
            raise UsageError(f"{name} (=shape {array.shape}) must have at least one feature for each sample")
        self.array, self.name = array, name
        self._inverse_N = self._checked()

    def __len__(self) -> int:
        return len(self.array)

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def rows(self, start: int, stop: int) -> Floats:
        """(R, D) unit-norm rows from `start` to `stop`."""
        return self._unit(self.array[start:stop], self._inverse_N[start:stop])

    def take(self, ids: Ints) -> Floats:
        """(R, D) unit-norm rows of `ids`."""
        return self._unit(self.array[ids], self._inverse_N[ids])

    def _unit(self, values: NDArray[Any], inverse: NDArray[np.float64]) -> Floats:
        if values.dtype == np.float64 or not _ORDINARY[0] < inverse.min() <= inverse.max() < _ORDINARY[1]:
            return np.ascontiguousarray(values * inverse[:, None], dtype=np.float32)
        return np.ascontiguousarray(values.astype(np.float32, copy=False) * inverse[:, None].astype(np.float32))

    def _checked(self) -> NDArray[np.float64]:
        """(N,) one over the norm of each row; rows without a direction are refused."""
        inverse, scale = np.empty(len(self.array), dtype=np.float64), np.empty(len(self.array), dtype=np.float64)
        rows = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(inverse), rows):
            block = self.array[start : start + rows].astype(np.float64)
            largest = np.abs(block).max(1)
            block /= np.where((largest > 0) & np.isfinite(largest), largest, 1)[:, None]  # squares of 1e300 are no numbers any more
            with np.errstate(divide="ignore", over="ignore"):
                inverse[start : start + rows] = 1 / np.sqrt(np.einsum("ij,ij->i", block, block)) / largest
            scale[start : start + rows] = largest
        bad = np.flatnonzero(~np.isfinite(scale))
        if len(bad):
            raise KinfolkError(f"{self._which(bad)} of {self.name} hold NaN or infinite values; remove or repair them")
        bad = np.flatnonzero(~np.isfinite(inverse))
        if len(bad):
            raise KinfolkError(f"{self._which(bad)} of {self.name} are all zero and have no direction to compare; remove or repair them")
        return inverse

    def _which(self, bad: Ints) -> str:
        return f"{len(bad):,} of {len(self.array):,} rows (the first is row {bad[0]})"
