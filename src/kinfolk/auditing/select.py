"""From the highest similarities of some rows to their thresholds, their nearest and who is flagged.

Dimension key: R rows, S survivors of a row (padded with −inf), K nearest kept, M flagged pairs, N data set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinfolk.auditing.features import Floats, Ints


@dataclass(frozen=True)
class Selection:
    """What is kept of a block of rows.

    Args:
        threshold_R: the (k + 1)-th largest similarity: the (1 − α) quantile; k lie above it, but for ties.
        near_RK, near_sim_RK: ids and similarities of the nearest, closest first, ties by id; −1 and −inf where a row has fewer.
        flagged_R: how many are above the threshold.
        rows_M, kin_M: row of the block and id of every pair above it.
        above_bound_R: how many are above `bound_R`.
    """

    threshold_R: Floats
    near_RK: Ints
    near_sim_RK: Floats
    flagged_R: Ints
    rows_M: Ints
    kin_M: Ints
    above_bound_R: Ints


def select(sim_RS: Floats, id_RS: Ints, k: int, nearest: int, bound_R: Floats) -> Selection:
    """Exact, by partition; a row must hold its k + 1 and its `nearest` largest similarities and all above `bound_R`."""
    width = sim_RS.shape[1]
    threshold_R = np.partition(sim_RS, width - 1 - k, axis=1)[:, width - 1 - k]
    num = min(nearest, width)
    at_RK = np.argpartition(sim_RS, width - num, axis=1)[:, width - num :]
    near_sim_RK, near_RK = np.take_along_axis(sim_RS, at_RK, 1), np.take_along_axis(id_RS, at_RK, 1)
    order_RK = np.lexsort((near_RK, -near_sim_RK), axis=1)
    near_sim_RK, near_RK = np.take_along_axis(near_sim_RK, order_RK, 1), np.take_along_axis(near_RK, order_RK, 1)
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
    """(R, S), (R, S), (R,): survivors given one by one as a matrix padded with −inf, their ids, and how many each row has."""
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
