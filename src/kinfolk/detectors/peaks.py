"""The few similarities of a block that lie above a level: how many and how high, or where.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import few_places
from kinfolk.pairs import Block, Places


def peaks(block: Block, level_R: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) how many of a row are above its level, and the sum of their min((s − level) / scale, 1).

    Passes over all similarities with masks of numbers, not of bools: finding the places alone takes longer."""
    level_R1, scale_R1 = (rows.to(block.sim_RC.dtype).unsqueeze(1) for rows in (level_R, scale_R))
    number_R, height_R = torch.empty_like(level_R1[:, 0]), torch.empty_like(level_R1[:, 0])
    for rows, (excess_RC, above_RC) in block.parts(2):
        torch.sub(block.sim_RC[rows], level_R1[rows], out=excess_RC)
        number_R[rows] = torch.gt(excess_RC, 0, out=above_RC).sum(1)
        height_R[rows] = torch.minimum(excess_RC.relu_(), scale_R1[rows], out=excess_RC).sum(1)
    return number_R, height_R / scale_R1.squeeze(1)


def places_above(sim_RC: Tensor, level_R: Tensor) -> Places:
    """Where a row is above its level."""
    return few_places(torch.gt(sim_RC, level_R.unsqueeze(1), out=torch.empty_like(sim_RC)))
