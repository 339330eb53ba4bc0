"""The relative contrastive loss: Tang et al., Relative Contrastive Loss for Unsupervised
Representation Learning, ECCV 2022, equation 3.

Dimension key: R rows of a block, P keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.contrast import Rows, State
from kinfolk.objectives.base import Objective


@dataclass(kw_only=True, eq=False, repr=False)
class RelativeContrastLoss(Objective):
    """Contrasts each key with the negatives. A key is attracted if a criterion calls it positive,
    and only repelled if not.

        loss_i = mean_{keys k} ( log( exp(s_ik / t) + Σ_j w_ij exp(s_ij / t) ) − y_ik · s_ik / t )

    The keys are the positives of `Pairs`, and y_ik their degrees: 1 if the labels of anchor and key
    are equal under the criterion, 0 if not, the share of criteria that agree (P_c of equation 9)
    where there are several. w_ij: see `NTXentLoss`. With "attract" kin are further keys with y = 1,
    which are in the sum already. With one key that is positive, it is `NTXentLoss`.

    Args:
        temperature, detector, action, …: see `Settings`.

    Example:
        >>> import torch
        >>> from kinfolk.pairs import Pairs
        >>> z, ids = torch.eye(3), torch.arange(3)
        >>> keys, degree = torch.stack((z, z.roll(1, 0)), 1), torch.tensor([[1.0, 0.0]] * 3)
        >>> pairs = Pairs(z, z, keys, ids, ids, degree=degree)
        >>> round(RelativeContrastLoss(temperature=1.0).on(pairs).item(), 4)
        0.825
    """

    uses_degrees: ClassVar[bool] = True
    shares_pull: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"),
        "retrieved keys are entries of the queue too, so the sum over negatives contains positives",
    )

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        lse, logit_RP = rows.log_sum(), rows.pos / rows.t.unsqueeze(1)
        degree_RP = torch.ones_like(logit_RP) if rows.degree is None else rows.degree.to(lse.dtype)
        key_RP = torch.logaddexp(logit_RP, lse.unsqueeze(1)) - degree_RP * logit_RP
        loss, number = torch.where(degree_RP < 0, 0.0, key_RP).sum(1), (degree_RP >= 0).sum(1)
        if rows.y is not None:  # attracted kin are keys that are in the sum already
            num_kin = (rows.y > 0).sum(1)
            kin = num_kin * lse - (rows.y * rows.sim).sum(1) / rows.t
            loss, number = loss + torch.where(num_kin > 0, kin, 0.0), number + num_kin
        return loss / number, {}
