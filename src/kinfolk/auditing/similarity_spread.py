"""The distribution of a sample's similarities: median and spread of the lower half.

Most other samples are unrelated, so the lower half of a sample's similarities describes unrelated
samples. Their spread is the distance from the median to the quantile that lies one standard
deviation below it in a normal distribution. A similarity is then measured by the number of spreads
above the median, and one bound z for all samples gives each sample its own share

    α_i = share of j with  s_ij > median_i + z · spread_i,    z such that the mean of α_i is α.

The paper on GloFND (Balmaseda et al., ICML 2025) leaves the choice of a share for each sample open.

Dimension key: R rows, M sampled columns, N data set, Z levels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Features, Floats, Ints

LOW = 0.5 * math.erfc(1 / math.sqrt(2))
"""Share of a normal distribution that lies more than one standard deviation below its median:
0.159."""
COLUMNS = 2048
LEVELS = np.linspace(0.0, 12.0, 481)
"""Values of z to choose from, in spreads above the median."""


def column_sample(num_samples: int, limit: int = COLUMNS) -> Ints:
    """Ids of a random part of the columns, the same for every row and every call; all of them up to
    `limit`."""
    if num_samples <= limit:
        return np.arange(num_samples, dtype=np.int64)
    return np.sort(
        np.random.default_rng(num_samples).choice(num_samples, limit, replace=False)
    ).astype(np.int64)


def sampled_rows(rows_RD: Floats, ids_R: Ints, columns_MD: Floats, columns_M: Ints) -> Floats:
    """(R, M) similarities to the sampled columns, −inf to the sample itself."""
    sim_RM: Floats = torch.mm(torch.from_numpy(rows_RD), torch.from_numpy(columns_MD).T).numpy()
    at = np.searchsorted(columns_M, ids_R).clip(max=len(columns_M) - 1)
    own = np.flatnonzero(columns_M[at] == ids_R)
    sim_RM[own, at[own]] = -np.inf
    return sim_RM


def order_statistics(num: int) -> tuple[int, int]:
    """Places, among `num` similarities in growing order, of the median and of the quantile one
    standard deviation below it."""
    return num // 2, min(max(1, round(LOW * num)), num // 2)


def spread(sim_RM: Floats, rank: int = 1) -> tuple[Floats, Floats, Floats]:
    """(R,), (R,), (R,) median, spread of the lower half, and `rank`-th largest value of sampled
    similarities."""
    num = sim_RM.shape[1]
    (middle, low), high = order_statistics(num), num - min(rank, num)
    # one rank at a time, since numpy is slow with several
    halves = np.partition(sim_RM, middle, axis=1)
    median_R, low_R = halves[:, middle], np.partition(halves[:, : middle + 1], low, axis=1)[:, low]
    first = middle if high >= middle else 0
    high_R = np.partition(halves[:, first:], high - first, axis=1)[:, high - first]
    return median_R, np.maximum(median_R - low_R, np.float32(1e-6)), high_R


def tails(sim_RN: Floats, median_R: Floats, spread_R: Floats) -> NDArray[np.int64]:
    """(R, Z) number of similarities of each row above each of `LEVELS`."""
    number, step = len(LEVELS), np.float32(LEVELS[1])
    tails_RZ = np.empty((len(sim_RN), number), dtype=np.int64)
    for row, sim_N in enumerate(sim_RN):  # one row at a time stays in the cache
        height_N = (sim_N - median_R[row]) * (1 / (step * spread_R[row]))
        place_N = np.ceil(height_N).clip(0, number).astype(np.int64)  # 0: not above the median
        tails_RZ[row] = np.bincount(place_N, minlength=number + 1)[:0:-1].cumsum()[::-1]
    return tails_RZ


def level_for(alpha: float, tails_Z: NDArray[np.int64], pairs: int) -> float:
    """The z above which a share `alpha` of all pairs lies."""
    share_Z = tails_Z / pairs
    return float(np.interp(-alpha, -share_Z, LEVELS))


def prepared_columns(features: Features) -> tuple[Ints, Floats]:
    """The sampled columns' ids and unit rows."""
    columns_M = column_sample(len(features))
    return columns_M, features.take(columns_M)
