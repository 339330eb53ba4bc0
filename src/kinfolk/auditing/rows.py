"""Rows of similarities in full, for the few anchors that are looked at so.

Dimension key: N data set, R rows of a block, A anchors, C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kinfolk.auditing.features import Features, Floats, Ints
from kinfolk.data.progress import show_progress

COLUMNS = 1 << 14
_BLOCK_ELEMENTS = 1 << 23


def full_rows(features: Features, anchors_A: Ints, progress: bool = False, title: str = "") -> Iterator[tuple[Ints, Floats]]:
    """Ids (R,) and all similarities (R, N), −inf to themselves, of a few anchors at a time."""
    num = len(features)
    step = max(1, _BLOCK_ELEMENTS // num)
    starts = range(0, len(anchors_A), step)
    for start in show_progress(starts, len(starts), title, enabled=progress):
        ids_R = anchors_A[start : start + step]
        rows = torch.from_numpy(features.take(ids_R))
        sim = torch.empty(len(ids_R), num)
        for first in range(0, num, COLUMNS):
            last = min(num, first + COLUMNS)
            sim[:, first:last] = rows @ torch.from_numpy(features.rows(first, last)).T
        sim_RN: Floats = sim.clamp_(-1, 1).numpy()
        sim_RN[np.arange(len(ids_R)), ids_R] = -np.inf
        yield ids_R, sim_RN


def everyone(sim_RN: Floats) -> Ints:
    """(R, N) the ids of full rows, in no memory of their own."""
    ids: Ints = np.broadcast_to(np.arange(sim_RN.shape[1]), sim_RN.shape)
    return ids


def num_kin(alpha: float, others: int) -> int:
    """How many of `others` similarities lie above their (1 − α) quantile: ⌊α · others⌋, safe from rounding."""
    return min(others - 1, int(alpha * others + 1e-9))
