"""Samples to look at: likely label errors and outliers, judged by their nearest neighbours.

A label is doubtful when a sample's neighbours agree on another one. The threshold follows confident learning (Northcutt, Jiang and Chuang,
2021, the method of cleanlab): the share of neighbours with label c must reach the mean share among the samples that are labelled c.

Dimension key: N data set, K nearest neighbours, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Floats, Ints

MISLABEL = np.dtype([("sample", np.int64), ("label", np.int64), ("suggested", np.int64), ("agreement", np.float32), ("own", np.float32)])
OUTLIER = np.dtype([("sample", np.int64), ("similarity", np.float32), ("usual", np.float32)])
NEIGHBOURS = 10
MAJORITY = 0.5
"""Smallest share of the neighbours that must agree on another label."""
SPREADS = 5.0
"""An outlier is this many spreads farther from its neighbours than the median."""
_ROWS = 1 << 16


def find_mislabels(labels_N: Ints, near_NK: Ints) -> NDArray[Any]:
    """Rows of sample, label, suggested label, share of neighbours with the suggested label (`agreement`) and with the own label; the
    clearest first. Neighbours without a known label do not count."""
    num = len(labels_N)
    suggested_N, agreement_N, own_N = np.full(num, -1, np.int64), np.zeros(num), np.zeros(num)
    for start in range(0, num, _ROWS):
        rows = slice(start, start + _ROWS)
        near_RK = near_NK[rows, :NEIGHBOURS]
        label_RK = np.where(near_RK >= 0, labels_N[near_RK], -1)
        known_R = np.maximum((label_RK >= 0).sum(1), 1)
        count_RK = ((label_RK[:, :, None] == label_RK[:, None, :]) & (label_RK >= 0)[:, :, None]).sum(2)
        best_R = count_RK.argmax(1)
        at_R = np.arange(len(label_RK))
        suggested_N[rows] = label_RK[at_R, best_R]
        agreement_N[rows] = count_RK[at_R, best_R] / known_R
        own_N[rows] = (label_RK == labels_N[rows, None]).sum(1) / known_R
    labelled = labels_N >= 0
    if not labelled.any() or (suggested_N == labels_N)[labelled].mean() < MAJORITY:
        return np.empty(0, dtype=MISLABEL)
    sizes_C = np.bincount(labels_N[labelled])
    usual_C = np.bincount(labels_N[labelled], weights=own_N[labelled]) / np.maximum(sizes_C, 1)
    needed_N = np.maximum(usual_C[suggested_N.clip(min=0)], MAJORITY)
    found = np.flatnonzero(labelled & (suggested_N >= 0) & (suggested_N != labels_N) & (agreement_N >= needed_N) & (own_N < agreement_N))
    found = found[np.lexsort((found, own_N[found] - agreement_N[found]))]
    rows_found = np.empty(len(found), dtype=MISLABEL)
    for name, values in (("sample", found), ("label", labels_N[found]), ("suggested", suggested_N[found])):
        rows_found[name] = values
    rows_found["agreement"], rows_found["own"] = agreement_N[found], own_N[found]
    return rows_found


def find_outliers(near_sim_NK: Floats) -> NDArray[Any]:
    """Rows of sample, mean similarity to its nearest neighbours, and the median of that over all samples; the farthest first."""
    finite_NK = np.isfinite(near_sim_NK[:, :NEIGHBOURS])
    mean_N = np.where(finite_NK, near_sim_NK[:, :NEIGHBOURS], 0).sum(1) / np.maximum(finite_NK.sum(1), 1)
    median, low = np.quantile(mean_N, (0.5, 0.16))
    spread = median - low
    if len(mean_N) < 2 * NEIGHBOURS or spread <= 1e-6:
        return np.empty(0, dtype=OUTLIER)
    found = np.flatnonzero(mean_N < median - SPREADS * spread)
    found = found[np.lexsort((found, mean_N[found]))]
    rows = np.empty(len(found), dtype=OUTLIER)
    rows["sample"], rows["similarity"], rows["usual"] = found, mean_N[found], median
    return rows
