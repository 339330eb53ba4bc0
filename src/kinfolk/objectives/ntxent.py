"""Objectives that know a prior instead of a detector: debiased, hard-negative and decoupled InfoNCE.

Chuang et al., Debiased Contrastive Learning, NeurIPS 2020, equations 7 and 8; Robinson et al., Contrastive Learning with Hard Negative
Samples, ICLR 2021, equation 4; Yeh et al., Decoupled Contrastive Learning, ECCV 2022, equation 4.

Dimension key: R rows of a block, P own positives.

NT-Xent / InfoNCE: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020, equation 1.

With attraction it is SupCon: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (mean over positives outside
the log).

Dimension key: R rows of a block, P own positives.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.kinship import EMPTY
from kinfolk.objectives.base import USUAL, Objective, Shared, pulls
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


class NTXent(Objective):
    """The loss of SimCLR, with false negatives eliminated, attracted or reweighted.

        loss_i = −(1/|P_i|) Σ_{p ∈ P_i} s_ip / t + log( Σ_{own p} exp(s_ip / t) + Σ_j w_ij exp(s_ij / t) )

    P_i: the anchor's own positives, with `attract` also its kin. w_ij over the negatives: 1; for kin 0 with `eliminate`, 1 with `attract`,
    a factor in [0, 1] with `reweight`. No state. Without detector it is plain NT-Xent; with `Oracle` and `attract` it is SupCon.

    Args:
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.
        positive_in_denominator: False leaves the own positives out of the sum (the decoupled form).
        rescale_kept: with `eliminate`, the sum over the kept negatives is multiplied by (kept + eliminated) / kept, so that an anchor with
            many kin has as heavy a denominator as one without, as in the published code of GloFND for SimCLR. False: kin are left out and
            nothing is put in their place.
        prior: τ⁺, the share of the negatives that are false, such as 1 / number of classes: what they add on average is taken from the
            sum over negatives, without any detector (`debiased`). None or 0: nothing is.
        hardness: β, by which negatives weigh more the more similar they are (`kinship.hardened`). None or 0: all weigh alike.
        decoupled: True leaves the own positives out of the sum; the same as `positive_in_denominator=False`.

    Example:
        >>> import torch, kinfolk as kf
        >>> z1, z2 = torch.eye(4), torch.eye(4)
        >>> round(kf.NTXent(temperature=0.5)(z1, z2).item(), 4)
        0.5944
    """

    attracted_stay: ClassVar[bool] = True

    def __init__(
        self,
        temperature: float,
        positive_in_denominator: bool = True,
        rescale_kept: bool = False,
        prior: float | None = None,
        hardness: float | None = None,
        decoupled: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(temperature, **shared)
        if rescale_kept and self.action != "eliminate":
            raise ValueError(
                f"`rescale_kept` (=True) must be False with `action` (={self.action!r}): only 'eliminate' leaves negatives out"
            )
        self.positive_in_denominator, self.rescale_kept = positive_in_denominator and not decoupled, rescale_kept
        self.prior, self.hardness = checked_estimate(prior, hardness)
        if rescale_kept and (self.prior or self.hardness):
            raise ValueError(
                "`rescale_kept` (=True) must be False with `prior` or `hardness`: they estimate the sum over negatives themselves"
            )

    @property
    def reads_weight(self) -> bool:  # type: ignore[override]
        return self.rescale_kept or bool(self.prior or self.hardness)

    def terms(self, rows: Rows) -> Terms:
        t, lse_R = rows.temperature, rows.lse_R
        if self.rescale_kept and rows.flagged_R is not None and rows.weight_R is not None:
            # a constant in the exponent: shares of the negatives and ∂lse/∂t stay as they are
            lse_R = lse_R + torch.log1p(rows.flagged_R / rows.weight_R.clamp(min=1))
        if rows.own_RP.shape[1] == 1 and rows.kin_sum_R is None and self.positive_in_denominator and not self.prior:
            return of_one_positive(rows, lse_R)
        logit_RP = rows.own_RP / t
        pull, unbiased = pulls(rows, self.own_weight), None
        mean_R, empty_R = pull.sum_R / t, lse_R < EMPTY
        if self.prior:
            assert rows.weight_R is not None
            unbiased = debiased(lse_R, rows.own_RP, rows.weight_R, t, self.prior)
            lse_R = unbiased.lse_R
        if self.positive_in_denominator:
            log_all_R = torch.logaddexp(logit_RP.logsumexp(1), lse_R)
            push_RP = torch.exp(logit_RP - log_all_R.unsqueeze(1)) / t
        else:  # a row without negatives has only its positives left
            log_all_R, push_RP = lse_R.masked_fill(empty_R, 0.0), torch.zeros_like(logit_RP)
        d_lse_R = torch.exp(lse_R - log_all_R)
        d_temperature_R = (mean_R - (push_RP * rows.own_RP).sum(1)) / t if rows.learned else None
        if unbiased is not None:
            push_RP = push_RP + d_lse_R.unsqueeze(1) * unbiased.d_own_RP
            d_temperature_R = None if d_temperature_R is None else d_temperature_R + d_lse_R * unbiased.d_temperature_R
            d_lse_R = d_lse_R * unbiased.d_lse_R
        return Terms(
            loss_R=log_all_R - mean_R,
            d_lse_R=d_lse_R,
            d_own_RP=push_RP - (pull.own_R / t).unsqueeze(1),
            d_kin_R=-pull.kin_R / t,
            d_temperature_R=d_temperature_R,
        )

    def __repr__(self) -> str:
        usual: dict[str, Any] = {"positive_in_denominator": True, "rescale_kept": False, "prior": 0.0, "hardness": 0.0}
        return self._call(**{name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value})


def of_one_positive(rows: Rows, lse_R: Tensor) -> Terms:
    """log(exp(s⁺/t) + exp(lse)) − s⁺/t as a function of lse − s⁺/t: its derivative is the share of the negatives."""
    t, own_R = rows.temperature, rows.own_RP.squeeze(1)
    apart_R = lse_R - own_R / t if isinstance(t, Tensor) else torch.sub(lse_R, own_R, alpha=1 / t)
    push_R = torch.sigmoid(apart_R)
    d_own_R = push_R / -t
    return Terms(
        loss_R=F.softplus(apart_R, threshold=60),
        d_lse_R=push_R,
        d_own_RP=d_own_R.unsqueeze(1),
        d_temperature_R=d_own_R * own_R / -t if rows.learned else None,
    )
