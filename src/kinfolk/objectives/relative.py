"""The relative contrastive loss: Tang et al., Relative Contrastive Loss for Unsupervised Representation Learning, ECCV 2022, equation 3.

Dimension key: R rows of a block, P keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from kinfolk.contrast import Rows, Terms
from kinfolk.objectives.base import Objective


class RelativeContrast(Objective):
    """Contrasts each key with the negatives. A key is attracted if a criterion calls it positive, and only repelled if not.

        loss_i = mean_{keys k} ( log( exp(s_ik / t) + Σ_j w_ij exp(s_ij / t) ) − y_ik · s_ik / t )

    The keys are the own positives of `Pairs`, and y_ik their degrees: 1 if the labels of anchor and key are equal under the criterion, 0 if
    not. With several criteria and one prediction for all, y is the share of criteria that agree, P_c of equation 9, which equals the mean
    over criteria of equation 2. w_ij of a negative is 1; for kin it is 0 with `eliminate` and a factor with `reweight`. With `attract` kin
    are further keys with y = 1, which are in the sum already. No state. With one key that is positive, it is `NTXent`.

    Args:
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.

    Example:
        >>> import torch
        >>> from kinfolk.pairs import Pairs
        >>> z, ids = torch.eye(3), torch.arange(3)
        >>> keys, degree = torch.stack((z, z.roll(1, 0)), 1), torch.tensor([[1.0, 0.0]]).expand(3, 2)
        >>> round(RelativeContrast(temperature=1.0).on(Pairs(z, z, keys, ids, ids, degree=degree)).item(), 4)
        0.825
    """

    attracted_stay: ClassVar[bool] = True
    shares_pull: ClassVar[bool] = False
    grades: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"),
        "retrieved keys are entries of the queue too, so the sum over negatives contains positives, which would count as the hardest",
    )

    def terms(self, rows: Rows) -> Terms:
        t = rows.temperature
        logit_RP, lse_R1 = rows.own_RP / t, rows.lse_R.unsqueeze(1)
        degree_RP = torch.ones_like(logit_RP) if rows.degree_RP is None else rows.degree_RP.to(logit_RP.dtype)
        absent_RP, pull_RP = degree_RP < 0, degree_RP.clamp(min=0)
        kin_sum_R = torch.zeros_like(rows.lse_R) if rows.kin_sum_R is None else rows.kin_sum_R
        attracted_R = torch.zeros_like(rows.lse_R) if rows.kin_sum_R is None or rows.flagged_R is None else rows.flagged_R
        number_R = (~absent_RP).sum(1) + attracted_R
        log_all_RP = torch.logaddexp(logit_RP, lse_R1)
        kin_R = torch.where(attracted_R > 0, attracted_R * rows.lse_R - kin_sum_R / t, 0.0)
        loss_R = (log_all_RP - pull_RP * logit_RP).masked_fill(absent_RP, 0.0).sum(1) + kin_R
        push_RP = torch.exp(lse_R1 - log_all_RP).masked_fill(absent_RP, 0.0)
        d_own_RP = (torch.exp(logit_RP - log_all_RP) - pull_RP).masked_fill(absent_RP, 0.0)
        d_own_RP = d_own_RP / (t * number_R).unsqueeze(1)
        kin_pull_R = torch.where(attracted_R > 0, kin_sum_R / (t * number_R), 0.0)
        return Terms(
            loss_R=loss_R / number_R,
            d_lse_R=(push_RP.sum(1) + attracted_R) / number_R,
            d_own_RP=d_own_RP,
            d_kin_R=-1 / (t * number_R),
            d_temperature_R=(kin_pull_R - (d_own_RP * rows.own_RP).sum(1)) / t,
        )

    def __repr__(self) -> str:
        return self._call()
