"""A temperature that is learned, as CLIP has it: the logarithm of its inverse is the parameter.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 2.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kinfolk import distributed


class LearnedTemperature(nn.Module):
    """t = exp(−`logit_scale`), kept within [lowest, highest]: in training the parameter itself is brought back before it is used, so that
    it never rests where it has no gradient. Under a process group its gradient is the same on all ranks.

    Args:
        initial: t at the start.
        lowest, highest: of t; 0.01 is the scale of at most 100 of the paper.
        gradient_factor: what the gradient that t receives is multiplied by.

    Example:
        >>> round(LearnedTemperature(0.07)().item(), 4)
        0.07
    """

    def __init__(self, initial: float, lowest: float = 0.01, highest: float = 1.0, gradient_factor: float = 1.0) -> None:
        super().__init__()
        if not 0 < lowest < highest:
            raise ValueError(f"`min_temperature` (={lowest}) must be above 0 and below {highest}")
        if not lowest <= initial <= highest:
            raise ValueError(f"`temperature` (={initial}) must be in [{lowest}, {highest}]")
        self.initial, self.lowest, self.highest, self.gradient_factor = initial, lowest, highest, gradient_factor
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(initial)))

    def forward(self) -> Tensor:
        """t, without dimensions."""
        bounds = -math.log(self.highest), -math.log(self.lowest)
        if self.training:
            with torch.no_grad():
                self.logit_scale.clamp_(*bounds)
        scale = distributed.averaged(self.logit_scale)
        scale = scale if scale.dtype == torch.float64 else scale.float()
        t = torch.exp(-(scale if self.training else scale.clamp(*bounds)))
        return t if self.gradient_factor == 1 else t.detach() + self.gradient_factor * (t - t.detach())
