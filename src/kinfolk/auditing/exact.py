"""The exact audit: blocked products, and of each row only what can matter.

A bracket from a sample of the columns says for each row below which similarity nothing can matter; the products are made tile by tile,
compared with it while they are still in the cache, and only the few survivors are kept. Where a row turns out to have too few of them
(the bracket is a guess) or far too many (ties), it is looked at again in full. No N × N matrix, no full sort, and the result is exact.

Dimension key: N data set, D embedding, R rows of a block, C columns of a tile, M pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from kinfolk.auditing import shape
from kinfolk.auditing.features import Features, Floats, Ints
from kinfolk.auditing.kin import Kin
from kinfolk.auditing.rows import everyone, full_rows, num_kin
from kinfolk.auditing.select import Selection, padded, select
from kinfolk.data.progress import show_progress

ROWS, TILE_COLUMNS = 512, 4096


@dataclass
class _Pass:
    """One pass over all rows, in blocks, on several threads."""

    features: Features
    k: int
    nearest: int
    level: float
    columns_M: Ints = field(init=False)
    columns_MD: Floats = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns_M, self.columns_MD = shape.prepared_columns(self.features)
        share = max(self.k + 1, self.nearest) / (len(self.features) - 1)
        expected = share * len(self.columns_M)
        self.rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)

    def block(self, start: int) -> list[tuple[Ints, Selection]]:
        """What was selected of the rows from `start` on, in parts."""
        stop = min(start + ROWS, len(self.features))
        ids_R = np.arange(start, stop)
        rows_RD = self.features.rows(start, stop)
        sampled_RM = shape.sampled_rows(rows_RD, ids_R, self.columns_MD, self.columns_M)
        median_R, spread_R, high_R = shape.spread(sampled_RM, self.rank)
        bound_R = median_R + np.float32(self.level) * spread_R
        if self.rank >= len(self.columns_M) or len(self.columns_M) == len(self.features):
            return list(self._dense(ids_R, bound_R))
        floor_R = np.nextafter(np.minimum(high_R, bound_R), np.float32(-np.inf))
        found = self._survivors(start, rows_RD, floor_R)
        if found is None:
            return list(self._dense(ids_R, bound_R))
        sim_RS, id_RS, count_R = padded(*found, len(ids_R))
        enough = count_R >= max(self.k + 1, self.nearest)
        parts = []
        if enough.any():
            parts.append((ids_R[enough], select(sim_RS[enough], id_RS[enough], self.k, self.nearest, bound_R[enough])))
        if not enough.all():
            parts.extend(self._dense(ids_R[~enough], bound_R[~enough]))
        return parts

    def _survivors(self, start: int, rows_RD: Floats, floor_R: Floats) -> tuple[Ints, Ints, Floats] | None:
        """(M,), (M,), (M,) row, id and similarity of all above the floor; None where they are too many to be kept."""
        num_rows, total = len(rows_RD), len(self.features)
        most = 6 * self.rank * (total // len(self.columns_M) + 1) * num_rows
        rows = torch.from_numpy(rows_RD)
        tile, mask = torch.empty(num_rows, TILE_COLUMNS), np.empty((num_rows, TILE_COLUMNS), dtype=np.bool_)
        row_M, id_M, sim_M = [], [], []
        number = 0
        for first in range(0, total, TILE_COLUMNS):
            last = min(first + TILE_COLUMNS, total)
            width = last - first
            if width < TILE_COLUMNS:
                tile, mask = torch.empty(num_rows, width), np.empty((num_rows, width), dtype=np.bool_)
            torch.mm(rows, torch.from_numpy(self.features.rows(first, last)).T, out=tile)
            sim_RC: Floats = tile.numpy()
            own = np.arange(max(start, first), min(start + num_rows, last))
            sim_RC[own - start, own - first] = -np.inf
            place = np.flatnonzero(np.greater(sim_RC, floor_R[:, None], out=mask))
            number += len(place)
            if number > most:
                return None
            row = place // width
            row_M.append(row)
            id_M.append(place - row * width + first)
            sim_M.append(sim_RC.reshape(-1)[place])
        return np.concatenate(row_M), np.concatenate(id_M), np.minimum(np.concatenate(sim_M), np.float32(1))

    def _dense(self, ids_R: Ints, bound_R: Floats) -> Iterator[tuple[Ints, Selection]]:
        """Rows in full, a few at a time."""
        at = 0
        for ids, sim_RN in full_rows(self.features, ids_R):
            yield ids, select(sim_RN, everyone(sim_RN), self.k, self.nearest, bound_R[at : at + len(ids)])
            at += len(ids)


def exact_kin(
    features: Features,
    alpha: float,
    nearest: int,
    level: float,
    labels_N: Ints | None,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> Kin:
    """Thresholds, nearest and flagged pairs of all samples; `level` is the z of `shape` for α_i."""
    num = len(features)
    nearest = min(nearest, num - 1)
    run = _Pass(features, num_kin(alpha, num - 1), nearest, level)
    kin = Kin.empty(num, nearest)
    starts = range(0, num, ROWS)
    for parts in show_progress(_on_threads(run, starts, workers), len(starts), "Comparing all with all", enabled=progress):
        for ids_R, found in parts:
            kin.write(ids_R, found, labels_N)
    return kin


def _on_threads(run: _Pass, starts: range, workers: int | None) -> Iterator[list[tuple[Ints, Selection]]]:
    """The blocks, in any order; each thread computes on one core, which suits products and comparisons alike."""
    workers = min(workers or torch.get_num_threads(), len(starts))
    if workers == 1:
        yield from map(run.block, starts)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            waiting = iter(starts)
            running = {pool.submit(run.block, start) for start in islice(waiting, workers + 1)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    if (start := next(waiting, None)) is not None:
                        running.add(pool.submit(run.block, start))
    finally:
        torch.set_num_threads(before)  # a thread that is new to torch takes the number that was set last, on any thread
