"""The few similarities of a block that lie above a level: how many and how high, or where.

Dimension key: R rows of a block, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import few_places
from kinfolk.pairs import Block

Places = tuple[Tensor, Tensor]



def peaks(block: Block, level_R: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) how many of a row are above its level, and the sum of their min((s − level) / scale, 1).

    Passes over all similarities with masks of numbers, not of bools: finding the places alone takes longer."""
    level_R1, scale_R1 = (rows.to(block.sim_RC.dtype).unsqueeze(1) for rows in (level_R, scale_R))
    excess_RC = block.sim_RC - level_R1
    number_R = torch.gt(excess_RC, 0, out=torch.empty_like(excess_RC)).sum(1)
    height_R = torch.minimum(excess_RC.relu_(), scale_R1).sum(1)
    return number_R, height_R / scale_R1.squeeze(1)


def places_above(sim_RC: Tensor, level_R: Tensor) -> Places:
    """Where a row is above its level."""
    return few_places(torch.gt(sim_RC, level_R.unsqueeze(1), out=torch.empty_like(sim_RC)))
