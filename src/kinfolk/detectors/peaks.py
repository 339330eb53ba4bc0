"""What a block of similarities shows of its rows: mean, deviation below it and maximum; how many lie above a level and how high; where.

Dimension key: R rows of a block, C candidates, S sampled candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import few_places, sampled
from kinfolk.pairs import Block, Places

LOOKED_AT = 1024
"""Candidates that mean and deviation are taken from, evenly spread over all of them."""


def moments(sim_RC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(R,) each: mean, root of the mean square of what is below the mean, maximum and number of the finite entries, of at most
    `LOOKED_AT` columns. Above the mean lie the false negatives, few and far, which would make a standard deviation noisy."""
    sim_RS = sampled(sim_RC, LOOKED_AT)
    wide = torch.promote_types(sim_RS.dtype, torch.float32)
    top_R = sim_RS.amax(1).to(wide)
    below_RS = sim_RS - top_R.unsqueeze(1)  # from the maximum: a mean of 0.97 with a spread of 0.001 would cancel
    number_R = torch.gt(below_RS, -torch.inf, out=torch.empty_like(below_RS)).sum(1)
    below_RS = torch.nan_to_num(below_RS, nan=0.0, neginf=0.0)
    mean_R = below_RS.sum(1) / number_R
    depth_RS = (mean_R.unsqueeze(1) - below_RS).relu()
    number_below_R = torch.gt(depth_RS, 0, out=below_RS).sum(1).clamp(min=1)
    spread_R = torch.linalg.vector_norm(depth_RS, dim=1) * number_below_R.rsqrt()
    return top_R + mean_R, spread_R, top_R, number_R


def peaks(block: Block, level_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) how many of a row are above its level, and the sum of s − level over them.

    Passes over all similarities with masks of numbers, not of bools: finding the places alone takes longer."""
    level_R1 = level_R.to(block.sim_RC.dtype).unsqueeze(1)
    wide = torch.promote_types(block.sim_RC.dtype, torch.float32)
    number_R, excess_R = (torch.empty_like(level_R1[:, 0], dtype=wide) for _ in range(2))
    for rows, (excess_RC, above_RC) in block.parts(2):
        torch.sub(block.sim_RC[rows], level_R1[rows], out=excess_RC)
        number_R[rows] = torch.gt(excess_RC, 0, out=above_RC).sum(1, dtype=wide)
        excess_R[rows] = excess_RC.relu_().sum(1, dtype=wide)
    return number_R, excess_R


def places_above(sim_RC: Tensor, level_R: Tensor) -> Places:
    """Where a row is above its level."""
    return few_places(torch.gt(sim_RC, level_R.unsqueeze(1), out=torch.empty_like(sim_RC)))
