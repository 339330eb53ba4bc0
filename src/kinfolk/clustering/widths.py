"""Rows of unequal length, padded to a common width: a few long ones must not make all the others long.

Dimension key: K rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def by_width(number_K: Tensor, first: int = 8) -> Iterator[tuple[Tensor, int]]:
    """The rows in groups, and the width of each: lengths of at most 8, then of at most twice the last, and so on.

    Example:
        >>> import torch
        >>> [(rows.tolist(), width) for rows, width in by_width(torch.tensor([2, 30, 5, 0]))]
        [([0, 2, 3], 5), ([1], 30)]
    """
    longest, low, high = int(number_K.max()) if len(number_K) else -1, -1, first
    while low < longest:
        rows = ((number_K > low) & (number_K <= high)).nonzero().flatten()
        if len(rows):
            yield rows, int(number_K[rows].max())
        low, high = high, 2 * high
