"""What a block of similarities shows of its rows: mean, spread and maximum; how many lie above a level and how high.

Dimension key: R rows of a block, C candidates, S sampled candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import sampled
from kinfolk.kinship import greater, others
from kinfolk.pairs import Block

LOOKED_AT = 1024
"""Candidates that mean and standard deviation are taken from, evenly spread over all of them."""


def moments(sim_RC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(R,) each: mean, standard deviation, maximum and number of the entries that are not the anchor's own, of at most `LOOKED_AT`
    columns."""
    sim_RS = sampled(sim_RC, LOOKED_AT)
    wide = torch.promote_types(sim_RS.dtype, torch.float32)
    top_R = sim_RS.amax(1).to(wide)
    there_RS = others(sim_RS)
    number_R = there_RS.sum(1)
    below_RS = (sim_RS - top_R.unsqueeze(1)).clamp(
        min=-4
    ) * there_RS  # from the maximum: a mean of 0.97 with a spread of 0.001 would cancel
    mean_R = below_RS.sum(1) / number_R
    square_R = torch.linalg.vector_norm(below_RS, dim=1).square() / number_R
    return top_R + mean_R, (square_R - mean_R.square()).clamp(min=0).sqrt(), top_R, number_R


def peaks(block: Block, level_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) how many of a row are above its level, and the sum of s − level over them."""
    wide = torch.promote_types(block.sim_RC.dtype, torch.float32)
    excess_RC = block.sim_RC - level_R.to(block.sim_RC.dtype).unsqueeze(1)
    number_R = greater(excess_RC, excess_RC.new_zeros(())).sum(1, dtype=wide)
    return number_R, excess_RC.relu_().sum(1, dtype=wide)
