"""LA: Zhuang et al., Local Aggregation for Unsupervised Learning of Visual Embeddings, ICCV 2019, section 3; equation 5 of Wu et al.,
Conditional Negative Sampling for Contrastive Learning of Visual Representations, ICLR 2021, up to a constant.

Dimension key: R rows of a block, P own positives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.objectives.base import Objective, Shared


class LocalAggregation(Objective):
    """The probability that the anchor is one of its close neighbours, among its background neighbours.

        loss_i = −log [ ( Σ_own exp(s/t) + Σ_{j ∈ C_i ∩ B_i} exp(s_ij/t) ) / ( Σ_own exp(s/t) + Σ_{j ∈ B_i} exp(s_ij/t) ) ]

    C_i, the close neighbours, are the kin that the detector finds; B_i, the background, are the candidates that it does not drop. The kin
    stand inside the logarithm, so that some of them have to be near, where `NTXent` asks it of each. So it is with "attract", which the
    paper means. With "eliminate" kin leave the background, with "reweight" they count there by a factor, and in both the own positives
    alone stand above: this is then `NTXent`, as it is without a detector. No state.

    Args:
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.

    Example:
        >>> import torch, kinfolk as kf
        >>> z1, z2 = torch.eye(4), torch.eye(4)
        >>> loss_fn = kf.LocalAggregation(temperature=0.5, detector=kf.Oracle(torch.tensor([0, 0, 0, 0])))
        >>> loss_fn(z1, z2, torch.arange(4)).item()  # everybody is close to everybody
        0.0
    """

    attracted_stay: ClassVar[bool] = True
    shares_pull: ClassVar[bool] = False
    pools_kin: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"),
        "close neighbours are in the numerator and in the denominator, and a denominator that is estimated by itself could be the smaller",
    )

    def __init__(
        self,
        temperature: float,
        **shared: Unpack[Shared],
    ) -> None:
        shared.setdefault("action", "attract")
        super().__init__(temperature, **shared)

    def terms(self, rows: Rows) -> Terms:
        t = rows.temperature
        logit_RP = rows.own_RP / t
        log_own_R = logit_RP.logsumexp(1)
        kin_lse_R = torch.full_like(log_own_R, -torch.inf) if rows.kin_lse_R is None else rows.kin_lse_R
        log_close_R = torch.logaddexp(log_own_R, kin_lse_R)
        log_all_R = torch.logaddexp(log_own_R, rows.lse_R)
        d_own_RP = (torch.exp(logit_RP - log_all_R.unsqueeze(1)) - torch.exp(logit_RP - log_close_R.unsqueeze(1))) / t
        return Terms(
            loss_R=log_all_R - log_close_R,
            d_lse_R=torch.exp(rows.lse_R - log_all_R),
            d_own_RP=d_own_RP,
            d_kin_R=torch.zeros_like(log_own_R),
            d_kin_lse_R=-torch.exp(kin_lse_R - log_close_R),
            d_temperature_R=-(d_own_RP * rows.own_RP).sum(1) / t,
        )

    def __repr__(self) -> str:
        return self._call(**({} if self.action == "attract" else {"action": self.action}))
