"""Thresholds, nearest neighbours and flagged pairs of all samples: exact, from blocked products.

For each row a lower bound is estimated from a random part of the columns, and only the few values
above it are kept while a tile of the product is in the cache. A row that keeps too few values (the
bound is an estimate) or far too many (ties) is computed again in full, so the result is exact
without an N × N matrix or a full sort.

Dimension key: N data set, D embedding, A anchors, R rows of a block, C columns of a tile, M sampled
columns, S values kept of a row (padded with −inf), K nearest neighbours kept, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from kinfolk.errors import show_progress
from kinfolk.features import Features, Floats, Ints

ROWS, TILE_COLUMNS, COLUMNS = 512, 4096, 1 << 14
"""Rows of a block, and columns of a tile and of a product."""
SAMPLED = 2048
"""Columns from which the lower bound of a row is estimated."""
_BLOCK_ELEMENTS = 1 << 23


def num_kin(alpha: float, others: int) -> int:
    """Number of `others` similarities above their (1 − α) quantile: ⌊α · others⌋, robust to
    rounding."""
    return min(others - 1, int(alpha * others + 1e-9))


def column_sample(num_samples: int, limit: int | None = None) -> Ints:
    """Ids of a random part of the columns (default: `SAMPLED`), the same in every call."""
    limit = SAMPLED if limit is None else limit
    if num_samples <= limit:
        return np.arange(num_samples, dtype=np.int64)
    random = np.random.default_rng(num_samples)
    return np.sort(random.choice(num_samples, limit, replace=False)).astype(np.int64)


def full_rows(
    features: Features, anchors_A: Ints, progress: bool = False, title: str = ""
) -> Iterator[tuple[Ints, Floats]]:
    """Yields ids (R,) and all similarities (R, N) of a few anchors at a time, −inf to itself."""
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


class Selection(NamedTuple):
    """Results for the rows `ids_R`; `row_P`, `kin_P` are the row and id of each flagged pair."""

    ids_R: Ints
    threshold_R: Floats
    near_RK: Ints
    near_sim_RK: Floats
    flagged_R: Ints
    row_P: Ints
    kin_P: Ints


def select(ids_R: Ints, sim_RS: Floats, id_RS: Ints | None, k: int, nearest: int) -> Selection:
    """Threshold (the (k + 1)-th largest similarity), neighbours (ties by id) and pairs of each row,
    which must contain its largest similarities. `id_RS`: None if the columns are all samples."""
    width = sim_RS.shape[1]
    threshold_R = np.partition(sim_RS, width - 1 - k, axis=1)[:, width - 1 - k]
    num = min(nearest, width)
    place_RK = np.argpartition(sim_RS, width - num, axis=1)[:, width - num :]
    near_RK = place_RK if id_RS is None else np.take_along_axis(id_RS, place_RK, 1)
    near_sim_RK = np.take_along_axis(sim_RS, place_RK, 1)
    order_RK = np.lexsort((near_RK, -near_sim_RK), axis=1)
    near_RK = np.take_along_axis(near_RK, order_RK, 1)
    near_sim_RK = np.take_along_axis(near_sim_RK, order_RK, 1)
    above_RS = sim_RS > threshold_R[:, None]
    place_P = np.flatnonzero(above_RS)
    return Selection(
        ids_R,
        threshold_R,
        np.where(np.isfinite(near_sim_RK), near_RK, -1),
        near_sim_RK,
        above_RS.sum(1),
        place_P // width,
        place_P % width if id_RS is None else id_RS.reshape(-1)[place_P],
    )


class Kin:
    """Results for all samples, filled in block by block.

    Attributes:
        threshold_N: (1 − α) quantile of each sample's N − 1 similarities.
        near_NK, near_sim_NK: nearest neighbours, closest first; −1 and −inf where there are fewer.
        flagged_N: number of similarities above the threshold.
        occurrence_N: number of other samples that flag this one.
        num_known, hits: flagged pairs with two known labels, and with equal labels.
    """

    def __init__(self, num_samples: int, nearest: int) -> None:
        self.threshold_N = np.zeros(num_samples, np.float32)
        self.near_NK = np.full((num_samples, nearest), -1, np.int64)
        self.near_sim_NK = np.full((num_samples, nearest), -np.inf, np.float32)
        self.flagged_N, self.occurrence_N = np.zeros((2, num_samples), np.int64)
        self.num_known = self.hits = 0

    def write(self, found: Selection, labels_N: Ints | None) -> None:
        ids_R, num = found.ids_R, found.near_RK.shape[1]
        self.threshold_N[ids_R] = found.threshold_R
        self.near_NK[ids_R, :num] = found.near_RK
        self.near_sim_NK[ids_R, :num] = found.near_sim_RK
        self.flagged_N[ids_R] = found.flagged_R
        self.occurrence_N += np.bincount(found.kin_P, minlength=len(self.occurrence_N))
        if labels_N is not None:
            one, other = labels_N[ids_R][found.row_P], labels_N[found.kin_P]
            known = (one >= 0) & (other >= 0)
            self.num_known += int(known.sum())
            self.hits += int((known & (one == other)).sum())


class _BlockSearch:
    """Computes the results of one block of rows; several threads share one instance."""

    def __init__(self, features: Features, k: int, nearest: int) -> None:
        self.features, self.k, self.nearest = features, k, nearest
        self.columns_M = column_sample(len(features))
        self.columns_MD = features.take(self.columns_M)
        expected = max(k + 1, nearest) / (len(features) - 1) * len(self.columns_M)
        self.rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)

    def block(self, start: int) -> list[Selection]:
        """Results of the rows from `start` on, in parts."""
        stop, num_sampled = min(start + ROWS, len(self.features)), len(self.columns_M)
        ids_R, rows_RD = np.arange(start, stop), self.features.rows(start, stop)
        if self.rank >= num_sampled or num_sampled == len(self.features):
            return self._in_full(ids_R)
        sim = torch.from_numpy(rows_RD) @ torch.from_numpy(self.columns_MD).T
        sampled_RM: Floats = sim.masked_fill_(
            torch.from_numpy(ids_R[:, None] == self.columns_M), -torch.inf
        ).numpy()
        place = num_sampled - self.rank
        floor_R = np.partition(sampled_RM, place, axis=1)[:, place]
        found = self._values_above(start, rows_RD, np.nextafter(floor_R, np.float32(-np.inf)))
        if found is None:
            return self._in_full(ids_R)
        sim_RS, id_RS, count_R = pad(*found, len(ids_R))
        enough_R = count_R >= max(self.k + 1, self.nearest)
        parts = self._in_full(ids_R[~enough_R])
        if enough_R.any():
            kept = ids_R[enough_R], sim_RS[enough_R], id_RS[enough_R]
            parts.append(select(*kept, self.k, self.nearest))
        return parts

    def _values_above(
        self, start: int, rows_RD: Floats, floor_R: Floats
    ) -> tuple[Ints, Ints, Floats] | None:
        """(P,), (P,), (P,) row, id and similarity of all values above the floor; None where there
        are too many to keep."""
        num_rows, total = len(rows_RD), len(self.features)
        most = 6 * self.rank * (total // len(self.columns_M) + 1) * num_rows
        rows, number = torch.from_numpy(rows_RD), 0
        tile = torch.empty(num_rows, TILE_COLUMNS)
        mask = np.empty((num_rows, TILE_COLUMNS), dtype=np.bool_)
        row_P, id_P, sim_P = [], [], []
        for first in range(0, total, TILE_COLUMNS):
            last = min(first + TILE_COLUMNS, total)
            width = last - first
            if width < TILE_COLUMNS:
                tile, mask = tile.new_empty(num_rows, width), np.empty((num_rows, width), np.bool_)
            torch.mm(rows, torch.from_numpy(self.features.rows(first, last)).T, out=tile)
            sim_RC: Floats = tile.numpy()
            same = np.arange(max(start, first), min(start + num_rows, last))
            sim_RC[same - start, same - first] = -np.inf
            place = np.flatnonzero(np.greater(sim_RC, floor_R[:, None], out=mask))
            number += len(place)
            if number > most:
                return None
            row_P.append(place // width)
            id_P.append(place % width + first)
            sim_P.append(sim_RC.reshape(-1)[place])
        sims = np.minimum(np.concatenate(sim_P), np.float32(1))
        return np.concatenate(row_P), np.concatenate(id_P), sims

    def _in_full(self, ids_R: Ints) -> list[Selection]:
        rows = full_rows(self.features, ids_R)
        return [select(ids, sim_RN, None, self.k, self.nearest) for ids, sim_RN in rows]


def pad(row_P: Ints, id_P: Ints, sim_P: Floats, num_rows: int) -> tuple[Floats, Ints, Ints]:
    """(R, S), (R, S), (R,): the kept values as a matrix padded with −inf, their ids, and the number
    in each row."""
    count_R = np.bincount(row_P, minlength=num_rows)
    order_P = np.argsort(row_P, kind="stable")
    row_P = row_P[order_P]
    start_R, width = count_R.cumsum() - count_R, int(count_R.max(initial=1))
    place_P = row_P, np.arange(len(row_P)) - start_R[row_P]
    sim_RS = np.full((num_rows, width), -np.inf, dtype=np.float32)
    id_RS = np.full((num_rows, width), -1, dtype=np.int64)
    sim_RS[place_P], id_RS[place_P] = sim_P[order_P], id_P[order_P]
    return sim_RS, id_RS, count_R


def exact_kin(
    features: Features,
    alpha: float,
    nearest: int,
    labels_N: Ints | None,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> Kin:
    """Compares all samples on several threads."""
    num = len(features)
    nearest, k = min(nearest, num - 1), num_kin(alpha, num - 1)
    kin, starts = Kin(num, nearest), range(0, num, ROWS)
    blocks = _on_threads(_BlockSearch(features, k, nearest).block, starts, workers)
    for parts in show_progress(blocks, len(starts), "Comparing all samples", enabled=progress):
        for found in parts:
            kin.write(found, labels_N)
    return kin


def _on_threads(
    compute: Callable[[int], list[Selection]], starts: range, workers: int | None
) -> Iterator[list[Selection]]:
    """The blocks, in any order. Each thread computes on one core, which suits both products and
    comparisons."""
    before = torch.get_num_threads()
    workers = min(workers or before, len(starts))
    if workers == 1:
        yield from map(compute, starts)
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            waiting = iter(starts)
            running = {pool.submit(compute, start) for start in islice(waiting, workers + 1)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    running |= {pool.submit(compute, start) for start in islice(waiting, 1)}
    finally:
        torch.set_num_threads(before)  # new threads take the number that was set last on any thread
