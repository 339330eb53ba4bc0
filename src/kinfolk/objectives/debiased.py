"""Objectives that know a prior instead of a detector: debiased, hard-negative and decoupled InfoNCE.

Chuang et al., Debiased Contrastive Learning, NeurIPS 2020, equations 7 and 8; Robinson et al., Contrastive Learning with Hard Negative
Samples, ICLR 2021, equation 4; Yeh et al., Decoupled Contrastive Learning, ECCV 2022, equation 4.

Dimension key: R rows of a block, P own positives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kinfolk.objectives.base import USUAL, Shared
from kinfolk.pairs import LEFT_OUT


class Estimate(Shared, total=False):
    """The shared arguments, and how `NTXent` estimates the sum over the true negatives. A framework hands them on to its loss."""

    prior: float | None
    hardness: float | None
    decoupled: bool


USUAL_ESTIMATE: Estimate = {**USUAL, "prior": None, "hardness": None, "decoupled": False}
"""Their values where they are not given."""


def without_estimate(given: Estimate) -> Shared:
    """The shared arguments, and those of the estimate only where they are set: a loss that has none refuses them with a reason."""
    return {name: value for name, value in given.items() if name in USUAL or value}  # type: ignore[return-value]


def checked_estimate(prior: float | None, hardness: float | None) -> tuple[float, float]:
    """τ⁺ and β, 0 where they are not given."""
    if prior is not None and not 0 <= prior < 1:
        raise ValueError(f"`prior` (={prior}) must be in [0, 1): the share of negatives that are false, such as 1 / number of classes")
    if hardness is not None and not 0 <= hardness < math.inf:
        raise ValueError(f"`hardness` (={hardness}) must be at least 0; 0 weighs all negatives alike")
    return prior or 0.0, hardness or 0.0


class Debiased(NamedTuple):
    """log of the debiased sum over negatives, and its derivatives by the plain one, by the own similarities and by the temperature."""

    lse_R: Tensor
    d_lse_R: Tensor
    d_own_RP: Tensor
    d_temperature_R: Tensor


def debiased(lse_R: Tensor, own_RP: Tensor, weight_R: Tensor, temperature: float | Tensor, prior: float) -> Debiased:
    """Takes from the sum over negatives what false ones among them add to it.

        n·g = max( ( Σ_j w_j exp(s_j / t) − τ⁺ n E⁺ ) / (1 − τ⁺),  n exp(−1 / t) ),    E⁺ = mean over own positives of exp(s / t)

    exp(−1 / t) is the least that a negative can add. Where the maximum is taken there, the derivatives by similarities are 0.

    Args:
        lse_R: log Σ_j w_j exp(s_j / t).
        own_RP: similarities of the own positives.
        weight_R: n = Σ_j w_j; where it is 0, the result is `LEFT_OUT`.
        prior: τ⁺.
    """
    t = temperature.unsqueeze(1) if isinstance(temperature, Tensor) and temperature.ndim else temperature
    bare_R = weight_R == 0
    log_n_R = weight_R.masked_fill(bare_R, 1.0).log()
    logit_RP = own_RP / t
    log_own_R = logit_RP.logsumexp(1) - math.log(own_RP.shape[1])
    share_R = torch.exp(math.log(prior) + log_n_R + log_own_R - lse_R.masked_fill(bare_R, 0.0))  # τ⁺ n E⁺ / Σ
    kept_R = (1 - share_R).clamp(min=torch.finfo(lse_R.dtype).tiny)
    free_R, least_R = lse_R + kept_R.log() - math.log1p(-prior), log_n_R - 1 / temperature
    low_R = (share_R >= 1) | (free_R <= least_R)
    held_R = low_R | bare_R
    by_own_R = torch.where(held_R, 0.0, -share_R / kept_R)
    d_own_RP = by_own_R.unsqueeze(1) * logit_RP.softmax(1) / t
    return Debiased(
        lse_R=torch.where(bare_R, LEFT_OUT, torch.where(low_R, least_R, free_R)),
        d_lse_R=torch.where(held_R, 0.0, 1 / kept_R),
        d_own_RP=d_own_RP,
        d_temperature_R=torch.where(low_R & ~bare_R, 1 / temperature**2, -(d_own_RP * own_RP).sum(1) / temperature),
    )
