"""The few similarities of a block that lie above a level, found in one pass and kept as places.

A threshold is measured at one level and applied at another nearby; both need only what lies above the lower of the two.

Dimension key: R rows of a block, C candidates, M peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.pairs import Places


@dataclass(frozen=True)
class Peaks:
    """All similarities above `floor_R`, row by row."""

    sim_RC: Tensor
    floor_R: Tensor
    row_M: Tensor
    col_M: Tensor
    sim_M: Tensor

    @classmethod
    def above(cls, sim_RC: Tensor, floor_R: Tensor) -> Peaks:
        row_M, col_M = (sim_RC > floor_R.unsqueeze(1)).nonzero(as_tuple=True)
        return cls(sim_RC, floor_R, row_M, col_M, sim_RC[row_M, col_M])

    def number(self, level_R: Tensor) -> Tensor:
        """(R,) how many are above a level, which is not below the floor."""
        return torch.bincount(self.row_M, weights=(self.sim_M > level_R[self.row_M]).double(), minlength=len(self.sim_RC))

    def height(self, level_R: Tensor, scale_R: Tensor) -> Tensor:
        """(R,) sum of min((s − level)₊ / scale, 1) over a level not below the floor."""
        height_M = ((self.sim_M - level_R[self.row_M]) / scale_R[self.row_M]).clamp_(0, 1)
        return torch.bincount(self.row_M, weights=height_M.double(), minlength=len(self.sim_RC))

    def places(self, level_R: Tensor) -> Places:
        """Those above a level. Rows whose level is below the floor are looked through again."""
        kept = (self.sim_M > level_R[self.row_M]).nonzero()[:, 0]  # once, where two masked reads would look for it twice
        row_M, col_M = self.row_M[kept], self.col_M[kept]
        below = (level_R < self.floor_R).nonzero()[:, 0]
        if not len(below):
            return row_M, col_M
        again = Peaks.above(self.sim_RC[below], level_R[below])
        other_M = ~(level_R < self.floor_R)[row_M]
        return torch.cat([row_M[other_M], below[again.row_M]]), torch.cat([col_M[other_M], again.col_M])
