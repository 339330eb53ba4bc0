"""What an audit knows of every sample, filled in block by block.

Dimension key: N data set, R rows of a block, K nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinfolk.auditing.features import Floats, Ints
from kinfolk.auditing.select import Selection


@dataclass
class Kin:
    """Thresholds, nearest and flagged pairs of all samples.

    Args:
        threshold_N: (1 − α) quantile of each sample's N − 1 similarities.
        near_NK, near_sim_NK: the nearest of each, closest first; −1 and −inf where there are fewer.
        flagged_N: how many are above the threshold.
        occurrence_N: of how many others it is flagged as kin.
        alpha_N: share of each sample's own by the shape of its similarities.
        judged, hits: flagged pairs with two known labels, and with equal ones.
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
        """Nothing is known yet."""
        return cls(
            np.zeros(num_samples, np.float32),
            np.full((num_samples, nearest), -1, np.int64),
            np.full((num_samples, nearest), -np.inf, np.float32),
            np.zeros(num_samples, np.int64),
            np.zeros(num_samples, np.int64),
            np.zeros(num_samples, np.float32),
        )

    def write(self, ids_R: Ints, found: Selection, labels_N: Ints | None) -> None:
        """Takes in what was selected of some rows."""
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
