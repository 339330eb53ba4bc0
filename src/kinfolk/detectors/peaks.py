"""The few similarities of a block that lie above a level, found in one pass and kept as places.

A threshold is measured at one level and applied at another nearby; both need only what lies above the lower of the two.

Dimension key: R rows of a block, C candidates, P parts of the candidates, K places where one of P is a peak, M peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.pairs import Places

_PARTS = 4


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
        """Peaks are few, so the largest of every four candidates is looked at first: a maximum is read faster than it is compared."""
        num_rows, num_candidates = sim_RC.shape
        parts = _PARTS if num_candidates % _PARTS == 0 and sim_RC.is_contiguous() else 1
        width = num_candidates // parts
        row_K, col_K = (sim_RC.view(num_rows, parts, width).amax(1) > floor_R.unsqueeze(1)).nonzero(as_tuple=True)
        column_P = width * torch.arange(parts, device=sim_RC.device)
        sim_KP = sim_RC.reshape(-1)[(row_K * num_candidates + col_K).unsqueeze(1) + column_P]
        of_M, part_M = (sim_KP > floor_R[row_K].unsqueeze(1)).nonzero(as_tuple=True)
        return cls(sim_RC, floor_R, row_K[of_M], col_K[of_M] + width * part_M, sim_KP[of_M, part_M])

    def measure(self, level_R: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
        """(R,), (R,) how many are above a level, which is not below the floor, and the sum of their min((s − level) / scale, 1)."""
        excess_M = (self.sim_M - level_R[self.row_M]).double()
        number_R = torch.bincount(self.row_M, weights=(excess_M > 0).double(), minlength=len(self.sim_RC))
        height_M = (excess_M / scale_R[self.row_M]).clamp_(0, 1)
        return number_R, torch.bincount(self.row_M, weights=height_M, minlength=len(self.sim_RC))

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
