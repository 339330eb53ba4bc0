"""NT-Xent / InfoNCE: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020, equation 1.

With attraction it is SupCon: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (mean over positives outside
the log).

Dimension key: R rows of a block, P own positives.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.kinship import EMPTY
from kinfolk.objectives.base import Objective, Shared, positives


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
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(temperature, **shared)
        if rescale_kept and self.action != "eliminate":
            raise ValueError(
                f"`rescale_kept` (=True) must be False with `action` (={self.action!r}): only 'eliminate' leaves negatives out"
            )
        self.positive_in_denominator, self.rescale_kept = positive_in_denominator, rescale_kept

    @property
    def reads_weight(self) -> bool:  # type: ignore[override]
        return self.rescale_kept

    def terms(self, rows: Rows) -> Terms:
        t, lse_R = rows.temperature, rows.lse_R
        if self.rescale_kept and rows.flagged_R is not None and rows.weight_R is not None:
            # a constant in the exponent: shares of the negatives and ∂lse/∂t stay as they are
            lse_R = lse_R + torch.log1p(rows.flagged_R / rows.weight_R.clamp(min=1))
        if rows.own_RP.shape[1] == 1 and rows.kin_sum_R is None and self.positive_in_denominator:
            return _of_one_positive(rows, lse_R)
        logit_RP = rows.own_RP / t
        number, sum_R = positives(rows)
        mean_R = sum_R / (number * t)
        pull_R = torch.full_like(mean_R, -1.0) / (t * number)
        if self.positive_in_denominator:
            log_all_R = torch.logaddexp(logit_RP.logsumexp(1), lse_R)
            push_RP = torch.exp(logit_RP - log_all_R.unsqueeze(1)) / t
        else:  # a row without negatives has only its positives left
            log_all_R, push_RP = lse_R.masked_fill(lse_R < EMPTY, 0.0), torch.zeros_like(logit_RP)
        return Terms(
            loss_R=log_all_R - mean_R,
            d_lse_R=torch.exp(lse_R - log_all_R),
            d_own_RP=push_RP + pull_R.unsqueeze(1),
            d_kin_R=pull_R,
            d_temperature_R=(mean_R - (push_RP * rows.own_RP).sum(1)) / t if rows.learned else None,
        )

    def __repr__(self) -> str:
        usual = {"positive_in_denominator": True, "rescale_kept": False}
        return self._call(**{name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value})


def _of_one_positive(rows: Rows, lse_R: Tensor) -> Terms:
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
