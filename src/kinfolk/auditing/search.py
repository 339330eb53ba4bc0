"""Thresholds, nearest neighbours and flagged pairs of all samples.

**Exact**, from blocked matrix products. For each row a lower bound is estimated from a random part
of the columns. The products are computed tile by tile and compared with the bound while they are in
the cache, and only the few values above it are kept. A row that keeps too few values (the bound is
an estimate) or far too many (ties) is computed again in full, so there is neither an N × N matrix
nor a full sort, and the result is exact.

**Approximate**, for data sets too large to compare all samples with all others. The nearest
neighbours come from a faiss inverted file and the thresholds from a random part of the columns.
Both are compared with the exact values of some anchors, and the result reports how well they agree.

Dimension key: N data set, D embedding, A anchors, R rows of a block, C columns of a tile, M sampled
columns, S values kept of a row (padded with −inf), K nearest neighbours kept, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfolk.errors import show_progress
from kinfolk.features import Features, Floats, Ints

ROWS, TILE_COLUMNS, COLUMNS = 512, 4096, 1 << 14
"""Rows of a block, and columns of a tile and of a product."""
SAMPLED = 2048
"""Columns from which the lower bound of a row is estimated."""
_BLOCK_ELEMENTS = 1 << 23


# ---- similarities of some anchors


def num_kin(alpha: float, others: int) -> int:
    """Number of `others` similarities above their (1 − α) quantile: ⌊α · others⌋, robust to
    rounding."""
    return min(others - 1, int(alpha * others + 1e-9))


def column_sample(num_samples: int, limit: int | None = None) -> Ints:
    """Ids of a random part of the columns, the same in every call; all of them up to `limit`, by
    default `SAMPLED`."""
    limit = SAMPLED if limit is None else limit
    if num_samples <= limit:
        return np.arange(num_samples, dtype=np.int64)
    random = np.random.default_rng(num_samples)
    return np.sort(random.choice(num_samples, limit, replace=False)).astype(np.int64)


def sampled_similarities(
    rows_RD: Floats, ids_R: Ints, columns_MD: Floats, columns_M: Ints
) -> Floats:
    """(R, M) similarities to the sampled columns, −inf to the sample itself."""
    sim_RM: Floats = torch.mm(torch.from_numpy(rows_RD), torch.from_numpy(columns_MD).T).numpy()
    at = np.searchsorted(columns_M, ids_R).clip(max=len(columns_M) - 1)
    same = np.flatnonzero(columns_M[at] == ids_R)
    sim_RM[same, at[same]] = -np.inf
    return sim_RM


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


# ---- the result, filled in block by block


@dataclass(frozen=True)
class Selection:
    """Results for a block of rows.

    Args:
        threshold_R: the (k + 1)-th largest similarity, which is the (1 − α) quantile; k values lie
            above it, fewer with ties.
        near_RK, near_sim_RK: ids and similarities of the nearest neighbours, closest first, ties by
            id; −1 and −inf where there are fewer.
        flagged_R: number of similarities above the threshold.
        row_P, kin_P: row of the block and id of every pair above it.
    """

    threshold_R: Floats
    near_RK: Ints
    near_sim_RK: Floats
    flagged_R: Ints
    row_P: Ints
    kin_P: Ints


def select(sim_RS: Floats, id_RS: Ints | None, k: int, nearest: int) -> Selection:
    """Selects by partition. A row must contain its k + 1 and its `nearest` largest similarities.
    `id_RS`: None if the columns are all samples."""
    width = sim_RS.shape[1]
    threshold_R = np.partition(sim_RS, width - 1 - k, axis=1)[:, width - 1 - k]
    num = min(nearest, width)
    place_RK = np.argpartition(sim_RS, width - num, axis=1)[:, width - num :]
    near_RK = place_RK if id_RS is None else np.take_along_axis(id_RS, place_RK, 1)
    near_RK, near_sim_RK = _closest_first(near_RK, np.take_along_axis(sim_RS, place_RK, 1))
    above_RS = sim_RS > threshold_R[:, None]
    place_P = np.flatnonzero(above_RS)
    return Selection(
        threshold_R,
        np.where(np.isfinite(near_sim_RK), near_RK, -1),
        near_sim_RK,
        above_RS.sum(1),
        place_P // width,
        place_P % width if id_RS is None else id_RS.reshape(-1)[place_P],
    )


def _closest_first(id_RK: Ints, sim_RK: Floats) -> tuple[Ints, Floats]:
    order_RK = np.lexsort((id_RK, -sim_RK), axis=1)
    return np.take_along_axis(id_RK, order_RK, 1), np.take_along_axis(sim_RK, order_RK, 1)


class Kin:
    """Thresholds, nearest neighbours and flagged pairs of all samples.

    Attributes:
        threshold_N: (1 − α) quantile of each sample's N − 1 similarities.
        near_NK, near_sim_NK: nearest neighbours of each sample, closest first; −1 and −inf where
            there are fewer.
        flagged_N: number of similarities above the threshold.
        occurrence_N: number of other samples that flag this one.
        num_known, hits: number of flagged pairs with two known labels, and with equal labels.
    """

    def __init__(self, num_samples: int, nearest: int) -> None:
        self.threshold_N = np.zeros(num_samples, np.float32)
        self.near_NK = np.full((num_samples, nearest), -1, np.int64)
        self.near_sim_NK = np.full((num_samples, nearest), -np.inf, np.float32)
        self.flagged_N, self.occurrence_N = np.zeros((2, num_samples), np.int64)
        self.num_known = self.hits = 0

    def write(self, ids_R: Ints, found: Selection, labels_N: Ints | None) -> None:
        """Writes the results of some rows."""
        num = found.near_RK.shape[1]
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


# ---- exact

Results = list[tuple[Ints, Selection]]


class _BlockSearch:
    """Computes the results of one block of rows; several threads share one instance."""

    def __init__(self, features: Features, k: int, nearest: int) -> None:
        self.features, self.k, self.nearest = features, k, nearest
        self.columns_M = column_sample(len(features))
        self.columns_MD = features.take(self.columns_M)
        expected = max(k + 1, nearest) / (len(features) - 1) * len(self.columns_M)
        self.rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)

    def block(self, start: int) -> Results:
        """Results of the rows from `start` on, in parts."""
        stop = min(start + ROWS, len(self.features))
        ids_R, rows_RD = np.arange(start, stop), self.features.rows(start, stop)
        num_sampled = len(self.columns_M)
        if self.rank >= num_sampled or num_sampled == len(self.features):
            return list(self._dense(ids_R))
        sampled_RM = sampled_similarities(rows_RD, ids_R, self.columns_MD, self.columns_M)
        place = num_sampled - self.rank
        floor_R = np.partition(sampled_RM, place, axis=1)[:, place]
        found = self._values_above(start, rows_RD, np.nextafter(floor_R, np.float32(-np.inf)))
        if found is None:
            return list(self._dense(ids_R))
        sim_RS, id_RS, count_R = pad(*found, len(ids_R))
        enough_R = count_R >= max(self.k + 1, self.nearest)
        parts: Results = []
        if enough_R.any():
            selected = select(sim_RS[enough_R], id_RS[enough_R], self.k, self.nearest)
            parts.append((ids_R[enough_R], selected))
        return [*parts, *self._dense(ids_R[~enough_R])]

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
        return (
            np.concatenate(row_P),
            np.concatenate(id_P),
            np.minimum(np.concatenate(sim_P), np.float32(1)),
        )

    def _dense(self, ids_R: Ints) -> Iterator[tuple[Ints, Selection]]:
        """Results from full rows, a few at a time."""
        for ids, sim_RN in full_rows(self.features, ids_R):
            yield ids, select(sim_RN, None, self.k, self.nearest)


def pad(row_P: Ints, id_P: Ints, sim_P: Floats, num_rows: int) -> tuple[Floats, Ints, Ints]:
    """(R, S), (R, S), (R,): the kept values as a matrix padded with −inf, their ids, and the number
    in each row."""
    count_R = np.bincount(row_P, minlength=num_rows)
    order_P = np.argsort(row_P.astype(np.int16 if num_rows < 1 << 15 else np.int64), kind="stable")
    row_P = row_P[order_P]
    start_R, width = count_R.cumsum() - count_R, int(count_R.max(initial=1))
    place_P = row_P * width + np.arange(len(row_P)) - start_R[row_P]
    sim_RS = np.full((num_rows, width), -np.inf, dtype=np.float32)
    id_RS = np.full((num_rows, width), -1, dtype=np.int64)
    sim_RS.reshape(-1)[place_P] = sim_P[order_P]
    id_RS.reshape(-1)[place_P] = id_P[order_P]
    return sim_RS, id_RS, count_R


def _device_search(
    features: Features, k: int, nearest: int, device: torch.device
) -> Callable[[int], Results]:
    """As `_BlockSearch.block`, on an accelerator: from full rows, the largest values of which are
    copied to the host."""
    starts = range(0, len(features), COLUMNS)
    parts = [torch.from_numpy(features.rows(first, first + COLUMNS)) for first in starts]
    unit_ND: Tensor = torch.cat([part.to(device) for part in parts])

    def block(start: int) -> Results:
        rows_RD = unit_ND[start : start + ROWS]
        sim_RN = (rows_RD @ unit_ND.T).clamp_(max=1)
        sim_RN.diagonal(start).fill_(-torch.inf)
        top = sim_RN.topk(max(k + 1, nearest), 1)
        selected = select(top.values.cpu().numpy(), top.indices.cpu().numpy(), k, nearest)
        return [(np.arange(start, start + len(rows_RD)), selected)]

    return block


def exact_kin(
    features: Features,
    alpha: float,
    nearest: int,
    labels_N: Ints | None,
    *,
    workers: int | None = None,
    progress: bool = False,
    device: torch.device | None = None,
) -> Kin:
    """The exact search. `device`: where to compute; None: a GPU where there is one, otherwise the
    CPU, on several threads."""
    num = len(features)
    nearest, k = min(nearest, num - 1), num_kin(alpha, num - 1)
    kin, starts = Kin(num, nearest), range(0, num, ROWS)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks: Iterator[Results]
    if device.type == "cpu":
        blocks = _on_threads(_BlockSearch(features, k, nearest).block, starts, workers)
    else:
        blocks = map(_device_search(features, k, nearest, device), starts)
    for parts in show_progress(blocks, len(starts), "Comparing all samples", enabled=progress):
        for ids_R, found in parts:
            kin.write(ids_R, found, labels_N)
    return kin


def _on_threads(
    compute: Callable[[int], Results], starts: range, workers: int | None
) -> Iterator[Results]:
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


# ---- approximate

CHECKED = 256
"""Anchors with exact values."""
SEARCH_ROWS = 1024
RECALL = 0.95
"""More lists are searched until the checked anchors reach this recall or a quarter of all lists is
searched."""


@dataclass(frozen=True)
class Check:
    """Agreement of an approximate audit with the exact values of some anchors.

    Args:
        anchors: number of checked anchors.
        recall: share of their exact nearest neighbours that the search found.
        threshold_error: mean absolute error of their thresholds.
        lists, searched: number of lists in the inverted file, and number of lists searched for each
            anchor.
    """

    anchors: int
    recall: float
    threshold_error: float
    lists: int
    searched: int


def approximate_kin(
    features: Features,
    alpha: float,
    nearest: int,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> tuple[Kin, Check]:
    """The approximate search. Only listed pairs count towards `occurrence_N`."""
    import faiss

    num, k = len(features), num_kin(alpha, len(features) - 1)
    anchors_A = column_sample(num, CHECKED)
    rows = full_rows(features, anchors_A, progress, "Exact values of some anchors")
    exact = [select(sim_RN, None, k, nearest) for _, sim_RN in rows]
    near_AK = np.concatenate([found.near_RK for found in exact])
    threshold_A = np.concatenate([found.threshold_R for found in exact])
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(workers or torch.get_num_threads())
    try:
        index = _build_index(features, faiss, progress)
        index.nprobe, most = 4, max(4, index.nlist // 4)
        while True:
            recall = _recall(_search(index, features, anchors_A, nearest)[0], near_AK)
            if recall >= RECALL or index.nprobe >= most:
                break
            index.nprobe = min(most, 2 * index.nprobe)
        kin = _search_all(index, features, alpha, nearest, progress)
    finally:
        faiss.omp_set_num_threads(before)
    error = float(np.abs(kin.threshold_N[anchors_A] - threshold_A).mean())
    listed = kin.near_NK[(kin.near_sim_NK > kin.threshold_N[:, None]) & (kin.near_NK >= 0)]
    kin.occurrence_N[:] = np.bincount(listed, minlength=num)
    kin.flagged_N[:] = k
    return kin, Check(len(anchors_A), recall, error, index.nlist, index.nprobe)


def _build_index(features: Features, faiss: Any, progress: bool) -> Any:
    """An inverted file around spherical k-means centres, in half precision; similarities are
    recomputed from the features later."""
    num, dim = len(features), features.dim
    lists = max(1, min(round(2 * math.sqrt(num)), num // 40))
    half, inner = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatIP(dim), dim, lists, half, inner)
    index.cp.spherical, index.cp.niter, index.cp.seed = True, 8, 0
    index.train(features.take(column_sample(num, 50 * lists)))
    starts = range(0, num, 1 << 16)
    for start in show_progress(starts, len(starts), "Building the index", enabled=progress):
        index.add(features.rows(start, min(num, start + (1 << 16))))
    return index


def _search_all(index: Any, features: Features, alpha: float, nearest: int, progress: bool) -> Kin:
    num, kin = len(features), Kin(len(features), nearest)
    columns_M = column_sample(num, min(max(math.ceil(100 / alpha), 4096), 1 << 16))
    columns_MD = features.take(columns_M)
    place = len(columns_M) - 1 - num_kin(alpha, len(columns_M))
    starts = range(0, num, SEARCH_ROWS)
    title = "Searching nearest neighbours"
    for start in show_progress(starts, len(starts), title, enabled=progress):
        ids_R = np.arange(start, min(num, start + SEARCH_ROWS))
        rows_RD = features.rows(start, start + len(ids_R))
        sim_RM = sampled_similarities(rows_RD, ids_R, columns_MD, columns_M)
        kin.threshold_N[ids_R] = np.partition(sim_RM, place, axis=1)[:, place]
        kin.near_NK[ids_R], kin.near_sim_NK[ids_R] = _search(index, features, ids_R, nearest)
    return kin


def _search(index: Any, features: Features, ids_R: Ints, nearest: int) -> tuple[Ints, Floats]:
    """(R, K), (R, K) nearest other samples in the searched lists, with exact similarities; −1 and
    −inf where there are fewer."""
    rows_RD = features.take(ids_R)
    found = index.search(rows_RD, nearest + 1)[1]
    other = found != ids_R[:, None]
    # the sample itself was not found, so the farthest is dropped instead
    other[other.all(1), -1] = False
    near_RK = found[other].reshape(len(ids_R), nearest)
    near = torch.from_numpy(features.take(near_RK.clip(min=0).reshape(-1))).view(*near_RK.shape, -1)
    sim = torch.einsum("rd,rkd->rk", torch.from_numpy(rows_RD), near)
    sim_RK: Floats = sim.clamp_(-1, 1).numpy()
    sim_RK[near_RK < 0] = -np.inf
    return _closest_first(near_RK, sim_RK)


def _recall(found_AK: Ints, exact_AK: Ints) -> float:
    pairs = zip(found_AK, exact_AK, strict=True)
    return sum(len(np.intersect1d(found, exact)) for found, exact in pairs) / exact_AK.size
