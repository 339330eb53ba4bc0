"""The exact audit: thresholds, nearest neighbours and flagged pairs of all samples, from blocked
matrix products.

For each row a lower bound is estimated from a random part of the columns. The products are computed
tile by tile and compared with the bound while they are in the cache, and only the few values above
it are kept. A row that keeps too few values (the bound is an estimate) or far too many (ties) is
computed again in full. There is no N × N matrix and no full sort, and the result is exact.

Dimension key: N data set, D embedding, A anchors, R rows of a block, C columns of a tile, S values
kept of a row (padded with −inf), K nearest neighbours kept, M pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from kinfolk.auditing import similarity_spread
from kinfolk.auditing.inputs import Features, Floats, Ints
from kinfolk.errors import show_progress

COLUMNS = 1 << 14
_BLOCK_ELEMENTS = 1 << 23


def full_rows(
    features: Features, anchors_A: Ints, progress: bool = False, title: str = ""
) -> Iterator[tuple[Ints, Floats]]:
    """Yields ids (R,) and all similarities (R, N) of a few anchors at a time; the similarity to
    itself is −inf."""
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


def all_ids(sim_RN: Floats) -> Ints:
    """(R, N) ids of the columns of full rows, as a view that takes no memory."""
    ids: Ints = np.broadcast_to(np.arange(sim_RN.shape[1]), sim_RN.shape)
    return ids


def num_kin(alpha: float, others: int) -> int:
    """Number of `others` similarities above their (1 − α) quantile: ⌊α · others⌋, robust to
    rounding."""
    return min(others - 1, int(alpha * others + 1e-9))


@dataclass(frozen=True)
class Selection:
    """Results for a block of rows.

    Args:
        threshold_R: the (k + 1)-th largest similarity, which is the (1 − α) quantile; k values lie
            above it, fewer with ties.
        near_RK, near_sim_RK: ids and similarities of the nearest neighbours, closest first, ties by
            id; −1 and −inf where there are fewer.
        flagged_R: number of similarities above the threshold.
        rows_M, kin_M: row of the block and id of every pair above it.
        above_bound_R: number of similarities above `bound_R`.
    """

    threshold_R: Floats
    near_RK: Ints
    near_sim_RK: Floats
    flagged_R: Ints
    rows_M: Ints
    kin_M: Ints
    above_bound_R: Ints


def select(sim_RS: Floats, id_RS: Ints, k: int, nearest: int, bound_R: Floats) -> Selection:
    """Selects by partition. A row must contain its k + 1 and its `nearest` largest similarities and
    all values above `bound_R`."""
    width = sim_RS.shape[1]
    threshold_R = np.partition(sim_RS, width - 1 - k, axis=1)[:, width - 1 - k]
    num = min(nearest, width)
    at_RK = np.argpartition(sim_RS, width - num, axis=1)[:, width - num :]
    near_sim_RK, near_RK = np.take_along_axis(sim_RS, at_RK, 1), np.take_along_axis(id_RS, at_RK, 1)
    order_RK = np.lexsort((near_RK, -near_sim_RK), axis=1)
    near_sim_RK, near_RK = (
        np.take_along_axis(near_sim_RK, order_RK, 1),
        np.take_along_axis(near_RK, order_RK, 1),
    )
    near_RK = np.where(np.isfinite(near_sim_RK), near_RK, -1)
    above_RS = sim_RS > threshold_R[:, None]
    place_M = np.flatnonzero(above_RS)
    return Selection(
        threshold_R,
        near_RK,
        near_sim_RK,
        above_RS.sum(1),
        place_M // width,
        id_RS.reshape(-1)[place_M],
        (sim_RS > bound_R[:, None]).sum(1),
    )


def padded(row_M: Ints, id_M: Ints, sim_M: Floats, num_rows: int) -> tuple[Floats, Ints, Ints]:
    """(R, S), (R, S), (R,): the kept values as a matrix padded with −inf, their ids, and the number
    in each row."""
    count_R = np.bincount(row_M, minlength=num_rows)
    order_M = np.argsort(row_M.astype(np.int16 if num_rows < 1 << 15 else np.int64), kind="stable")
    row_M = row_M[order_M]
    start_R = count_R.cumsum() - count_R
    width = int(count_R.max(initial=1))
    place_M = row_M * width + np.arange(len(row_M)) - start_R[row_M]
    sim_RS = np.full((num_rows, width), -np.inf, dtype=np.float32)
    id_RS = np.full((num_rows, width), -1, dtype=np.int64)
    sim_RS.reshape(-1)[place_M] = sim_M[order_M]
    id_RS.reshape(-1)[place_M] = id_M[order_M]
    return sim_RS, id_RS, count_R


@dataclass
class Kin:
    """Thresholds, nearest neighbours and flagged pairs of all samples, filled in block by block.

    Args:
        threshold_N: (1 − α) quantile of each sample's N − 1 similarities.
        near_NK, near_sim_NK: nearest neighbours of each sample, closest first; −1 and −inf where
            there are fewer.
        flagged_N: number of similarities above the threshold.
        occurrence_N: number of other samples that flag this one.
        alpha_N: each sample's own share, from the distribution of its similarities.
        judged, hits: number of flagged pairs with two known labels, and with equal labels.
    """

    threshold_N: Floats
    near_NK: Ints
    near_sim_NK: Floats
    flagged_N: Ints
    occurrence_N: Ints
    alpha_N: Floats
    judged: int = 0
    hits: int = 0

    @classmethod
    def empty(cls, num_samples: int, nearest: int) -> Kin:
        """All entries still unknown."""
        return cls(
            np.zeros(num_samples, np.float32),
            np.full((num_samples, nearest), -1, np.int64),
            np.full((num_samples, nearest), -np.inf, np.float32),
            np.zeros(num_samples, np.int64),
            np.zeros(num_samples, np.int64),
            np.zeros(num_samples, np.float32),
        )

    def write(self, ids_R: Ints, found: Selection, labels_N: Ints | None) -> None:
        """Writes the results of some rows."""
        num = found.near_RK.shape[1]
        self.threshold_N[ids_R] = found.threshold_R
        self.near_NK[ids_R, :num] = found.near_RK
        self.near_sim_NK[ids_R, :num] = found.near_sim_RK
        self.flagged_N[ids_R] = found.flagged_R
        self.alpha_N[ids_R] = found.above_bound_R / (len(self.threshold_N) - 1)
        self.occurrence_N += np.bincount(found.kin_M, minlength=len(self.occurrence_N))
        if labels_N is not None:
            one, other = labels_N[ids_R][found.rows_M], labels_N[found.kin_M]
            known = (one >= 0) & (other >= 0)
            self.judged += int(known.sum())
            self.hits += int((known & (one == other)).sum())


ROWS, TILE_COLUMNS = 512, 4096


@dataclass
class _BlockSearch:
    """Computes the results of one block of rows; several threads share one instance."""

    features: Features
    k: int
    nearest: int
    level: float
    columns_M: Ints = field(init=False)
    columns_MD: Floats = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns_M, self.columns_MD = similarity_spread.prepared_columns(self.features)
        share = max(self.k + 1, self.nearest) / (len(self.features) - 1)
        expected = share * len(self.columns_M)
        self.rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)

    def block(self, start: int) -> list[tuple[Ints, Selection]]:
        """Results of the rows from `start` on, in parts."""
        stop = min(start + ROWS, len(self.features))
        ids_R = np.arange(start, stop)
        rows_RD = self.features.rows(start, stop)
        sampled_RM = similarity_spread.sampled_rows(rows_RD, ids_R, self.columns_MD, self.columns_M)
        median_R, spread_R, high_R = similarity_spread.spread(sampled_RM, self.rank)
        bound_R = median_R + np.float32(self.level) * spread_R
        if self.rank >= len(self.columns_M) or len(self.columns_M) == len(self.features):
            return list(self._dense(ids_R, bound_R))
        floor_R = np.nextafter(np.minimum(high_R, bound_R), np.float32(-np.inf))
        found = self._values_above(start, rows_RD, floor_R)
        if found is None:
            return list(self._dense(ids_R, bound_R))
        sim_RS, id_RS, count_R = padded(*found, len(ids_R))
        enough = count_R >= max(self.k + 1, self.nearest)
        parts = []
        if enough.any():
            parts.append(
                (
                    ids_R[enough],
                    select(sim_RS[enough], id_RS[enough], self.k, self.nearest, bound_R[enough]),
                )
            )
        if not enough.all():
            parts.extend(self._dense(ids_R[~enough], bound_R[~enough]))
        return parts

    def _values_above(
        self, start: int, rows_RD: Floats, floor_R: Floats
    ) -> tuple[Ints, Ints, Floats] | None:
        """(M,), (M,), (M,) row, id and similarity of all values above the floor; None where there
        are too many to keep."""
        num_rows, total = len(rows_RD), len(self.features)
        most = 6 * self.rank * (total // len(self.columns_M) + 1) * num_rows
        rows = torch.from_numpy(rows_RD)
        tile, mask = (
            torch.empty(num_rows, TILE_COLUMNS),
            np.empty((num_rows, TILE_COLUMNS), dtype=np.bool_),
        )
        row_M, id_M, sim_M = [], [], []
        number = 0
        for first in range(0, total, TILE_COLUMNS):
            last = min(first + TILE_COLUMNS, total)
            width = last - first
            if width < TILE_COLUMNS:
                tile, mask = (
                    torch.empty(num_rows, width),
                    np.empty((num_rows, width), dtype=np.bool_),
                )
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
        return (
            np.concatenate(row_M),
            np.concatenate(id_M),
            np.minimum(np.concatenate(sim_M), np.float32(1)),
        )

    def _dense(self, ids_R: Ints, bound_R: Floats) -> Iterator[tuple[Ints, Selection]]:
        """Results from full rows, a few at a time."""
        at = 0
        for ids, sim_RN in full_rows(self.features, ids_R):
            yield (
                ids,
                select(sim_RN, all_ids(sim_RN), self.k, self.nearest, bound_R[at : at + len(ids)]),
            )
            at += len(ids)


class _DeviceSearch:
    """Computes the results of one block of rows on an accelerator from full rows, the largest of
    which are copied to the host."""

    def __init__(
        self, features: Features, k: int, nearest: int, level: float, device: torch.device
    ) -> None:
        self.k, self.nearest, self.level = k, nearest, level
        self.columns_M = torch.from_numpy(similarity_spread.column_sample(len(features))).to(device)
        parts = [
            features.rows(first, first + COLUMNS) for first in range(0, len(features), COLUMNS)
        ]
        self.unit_ND = torch.cat([torch.from_numpy(part).to(device) for part in parts])

    def block(self, start: int) -> list[tuple[Ints, Selection]]:
        """Results of the rows from `start` on; as `_BlockSearch.block`."""
        rows_RD = self.unit_ND[start : start + ROWS]
        sim_RN = (rows_RD @ self.unit_ND.T).clamp_(max=1)
        sim_RN.diagonal(start).fill_(-torch.inf)
        sampled_RM = sim_RN[:, self.columns_M].sort(1).values
        median_R, low_R = (
            sampled_RM[:, place]
            for place in similarity_spread.order_statistics(len(self.columns_M))
        )
        bound_R = median_R + self.level * (median_R - low_R).clamp_(min=1e-6)
        above_R = (sim_RN > bound_R.unsqueeze(1)).sum(1)
        top_RS = sim_RN.topk(max(self.k + 1, self.nearest), 1)
        found = select(
            top_RS.values.cpu().numpy(),
            top_RS.indices.cpu().numpy(),
            self.k,
            self.nearest,
            bound_R.cpu().numpy(),
        )
        return [
            (
                np.arange(start, start + len(rows_RD)),
                replace(found, above_bound_R=above_R.cpu().numpy()),
            )
        ]


def exact_kin(
    features: Features,
    alpha: float,
    nearest: int,
    level: float,
    labels_N: Ints | None,
    *,
    workers: int | None = None,
    progress: bool = False,
    device: torch.device | None = None,
) -> Kin:
    """Thresholds, nearest neighbours and flagged pairs of all samples; `level` is the z of
    `similarity_spread` for α_i. `device`: where to compute; None: a GPU where there is one,
    otherwise the CPU, on several threads."""
    num = len(features)
    nearest = min(nearest, num - 1)
    device = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    )
    kin = Kin.empty(num, nearest)
    starts = range(0, num, ROWS)
    if device.type == "cpu":
        blocks = _on_threads(
            _BlockSearch(features, num_kin(alpha, num - 1), nearest, level), starts, workers
        )
    else:
        blocks = map(
            _DeviceSearch(features, num_kin(alpha, num - 1), nearest, level, device).block, starts
        )
    for parts in show_progress(blocks, len(starts), "Comparing all samples", enabled=progress):
        for ids_R, found in parts:
            kin.write(ids_R, found, labels_N)
    return kin


def _on_threads(
    search: _BlockSearch, starts: range, workers: int | None
) -> Iterator[list[tuple[Ints, Selection]]]:
    """The blocks, in any order. Each thread computes on one core, which suits both products and
    comparisons."""
    workers = min(workers or torch.get_num_threads(), len(starts))
    if workers == 1:
        yield from map(search.block, starts)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            waiting = iter(starts)
            running = {pool.submit(search.block, start) for start in islice(waiting, workers + 1)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    if (start := next(waiting, None)) is not None:
                        running.add(pool.submit(search.block, start))
    finally:
        torch.set_num_threads(before)  # new threads take the number that was set last on any thread
