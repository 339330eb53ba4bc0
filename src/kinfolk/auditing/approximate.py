"""The approximate audit, for data sets too large to compare all samples with all others.

The nearest neighbours come from a faiss inverted file and the thresholds from a random part of the
columns. Both are compared with the exact values of some anchors, and the result reports how well
they agree.

Dimension key: N data set, R rows of a block, S checked anchors, K nearest, M sampled columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinfolk.auditing import similarity_spread
from kinfolk.auditing.alpha import FEWEST_ANCHORS
from kinfolk.auditing.exact import Kin, all_ids, full_rows, num_kin, select
from kinfolk.auditing.inputs import Features, Floats, Ints
from kinfolk.errors import show_progress

ROWS = 1024
RECALL = 0.95
"""Target: more lists are searched until the checked anchors reach this recall or a quarter of all
lists is searched."""


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
    level: float,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> tuple[Kin, Check]:
    """Nearest neighbours, thresholds and shares of all samples. Only listed pairs count towards
    `occurrence_N`."""
    import faiss

    num, k = len(features), num_kin(alpha, len(features) - 1)
    anchors_S = similarity_spread.column_sample(num, FEWEST_ANCHORS)
    checked = [
        (ids_R, select(sim_RN, all_ids(sim_RN), k, nearest, sim_RN[:, 0]))
        for ids_R, sim_RN in full_rows(
            features, anchors_S, progress, "Exact values of some anchors"
        )
    ]
    exact_SK = np.concatenate([found.near_RK for _, found in checked])
    exact_S = np.concatenate([found.threshold_R for _, found in checked])
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(workers or torch.get_num_threads())
    try:
        index = _index(features, faiss, progress)
        index.nprobe, most = 4, max(4, index.nlist // 4)
        while True:
            recall = _recall(_search(index, features, anchors_S, nearest)[0], exact_SK)
            if recall >= RECALL or index.nprobe >= most:
                break
            index.nprobe = min(most, 2 * index.nprobe)
        kin = _search_all(index, features, alpha, nearest, level, progress)
        check = Check(
            len(anchors_S),
            recall,
            float(np.abs(kin.threshold_N[anchors_S] - exact_S).mean()),
            index.nlist,
            index.nprobe,
        )
    finally:
        faiss.omp_set_num_threads(before)
    listed = kin.near_NK[(kin.near_sim_NK > kin.threshold_N[:, None]) & (kin.near_NK >= 0)]
    kin.occurrence_N[:] = np.bincount(listed, minlength=num)
    kin.flagged_N[:] = k
    return kin, check


def _index(features: Features, faiss: Any, progress: bool) -> Any:
    """An inverted file around spherical k-means centres, in half precision; similarities are
    recomputed from the features later."""
    num, lists = (
        len(features),
        max(1, min(round(2 * math.sqrt(len(features))), len(features) // 40)),
    )
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(features.dim),
        features.dim,
        lists,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
    )
    index.cp.spherical, index.cp.niter, index.cp.seed = True, 8, 0
    index.train(features.take(similarity_spread.column_sample(num, 50 * lists)))
    starts = range(0, num, 1 << 16)
    for start in show_progress(starts, len(starts), "Building the index", enabled=progress):
        index.add(features.rows(start, min(num, start + (1 << 16))))
    return index


def _search_all(
    index: Any, features: Features, alpha: float, nearest: int, level: float, progress: bool
) -> Kin:
    num = len(features)
    columns_M = similarity_spread.column_sample(
        num, min(max(math.ceil(100 / alpha), 4096), 1 << 16)
    )
    columns_MD = features.take(columns_M)
    rank = num_kin(alpha, len(columns_M))
    kin = Kin.empty(num, nearest)
    starts = range(0, num, ROWS)
    for start in show_progress(
        starts, len(starts), "Searching nearest neighbours", enabled=progress
    ):
        ids_R = np.arange(start, min(num, start + ROWS))
        sim_RM = similarity_spread.sampled_rows(
            features.rows(start, start + len(ids_R)), ids_R, columns_MD, columns_M
        )
        high = len(columns_M) - 1 - rank
        kin.threshold_N[ids_R] = np.partition(sim_RM, high, axis=1)[:, high]
        median_R, spread_R, _ = similarity_spread.spread(
            sim_RM[:, :: max(1, len(columns_M) // similarity_spread.COLUMNS)]
        )
        bound_R = median_R + np.float32(level) * spread_R
        kin.alpha_N[ids_R] = (sim_RM > bound_R[:, None]).mean(1)
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
    sim_RK: Floats = (
        torch.einsum("rd,rkd->rk", torch.from_numpy(rows_RD), near).clamp_(-1, 1).numpy()
    )
    sim_RK[near_RK < 0] = -np.inf
    order_RK = np.lexsort((near_RK, -sim_RK), axis=1)
    return np.take_along_axis(near_RK, order_RK, 1), np.take_along_axis(sim_RK, order_RK, 1)


def _recall(found_SK: Ints, exact_SK: Ints) -> float:
    hits = sum(
        len(np.intersect1d(found, exact)) for found, exact in zip(found_SK, exact_SK, strict=True)
    )
    return hits / exact_SK.size
