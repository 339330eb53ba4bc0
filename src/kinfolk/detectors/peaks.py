"""What a block of similarities shows of its rows: mean, deviation below it and maximum; how many lie above a level and how high.

Dimension key: R rows of a block, C candidates, S sampled candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import sampled
from kinfolk.kinship import greater, others
from kinfolk.pairs import Block

LOOKED_AT = 1024
"""Candidates that mean and deviation are taken from, evenly spread over all of them."""


def moments(sim_RC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(R,) each: mean, root of the mean square of what is below the mean, maximum and number of the entries that are not the anchor's
    own, of at most `LOOKED_AT` columns. Above the mean lie the false negatives, few and far: a standard deviation would be noisy."""
    sim_RS = sampled(sim_RC, LOOKED_AT)
    wide = torch.promote_types(sim_RS.dtype, torch.float32)
    top_R = sim_RS.amax(1).to(wide)
    there_RS = others(sim_RS)
    number_R = there_RS.sum(1)
    below_RS = (sim_RS - top_R.unsqueeze(1)).clamp(min=-4) * there_RS  # from the maximum: near 1 a small spread would cancel
    mean_R = below_RS.sum(1) / number_R
    depth_RS = (mean_R.unsqueeze(1) - below_RS).relu()
    number_below_R = greater(depth_RS, depth_RS.new_zeros(())).sum(1).clamp(min=1)
    spread_R = torch.linalg.vector_norm(depth_RS, dim=1) * number_below_R.rsqrt()
    return top_R + mean_R, spread_R, top_R, number_R


def peaks(block: Block, level_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) how many of a row are above its level, and the sum of s − level over them."""
    wide = torch.promote_types(block.sim_RC.dtype, torch.float32)
    excess_RC = block.sim_RC - level_R.to(block.sim_RC.dtype).unsqueeze(1)
    number_R = greater(excess_RC, excess_RC.new_zeros(())).sum(1, dtype=wide)
    return number_R, excess_RC.relu_().sum(1, dtype=wide)
