"""SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022; as in GloFND, equations 3 and 5.

Dimension key: R rows of a block, P own positives, N data set.
"""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.objectives.base import Shared, pulls
from kinfolk.objectives.moving_average import Averaged


class SogCLR(Averaged):
    """The global contrastive loss: the batch's mean over negatives is replaced by a moving average kept for each sample.

        ĝ_i = Σ_j w_ij exp(s_ij / t) / Σ_j w_ij                     (kept negatives; the positive is not among them)
        u_i ← (1 − γ) u_i + γ ĝ_i,  u_i = ĝ_i on the first visit
        value    mean_i( −s_i,pos + t·log u_i )
        gradient mean_i( −∇s_i,pos + (t / u_i) ∇ĝ_i )

    With `attract`, kin are positives too (mean of similarities) and, like the own positive, leave ĝ. State per sample: u, kept as its
    logarithm so that no temperature overflows; 0 before the first visit. Both views read the same old u; the mean of their two
    new values is stored. With γ = 1 the gradient is that of −s_pos + t·log ĝ of the batch.

    Args:
        num_samples: N; ids are in [0, N).
        gamma: γ, the weight of the new value.
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.SogCLR(num_samples=100, temperature=0.1)
        >>> z1, z2, ids = torch.eye(4), torch.eye(4), torch.arange(4)
        >>> round(loss_fn(z1, z2, ids).item(), 4)
        -1.0
    """

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float = 0.9,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_samples, temperature, gamma, **shared)

    def terms(self, rows: Rows) -> Terms:
        t, weight_R = rows.temperature, rows.weight_R
        assert weight_R is not None
        bare_R = weight_R == 0  # no negatives at all: nothing to estimate, and only the positives are left
        log_g_R = (rows.lse_R - weight_R.log()).masked_fill(bare_R, torch.nan)
        log_u_R, stored_b = self.averaged(rows, log_g_R)
        pull = pulls(rows, self.own_weight)
        weighted_R = (t * log_u_R).masked_fill(bare_R, 0.0)
        return Terms(
            loss_R=weighted_R - pull.sum_R,
            d_lse_R=(t * torch.exp(log_g_R - log_u_R)).masked_fill(bare_R, 0.0),
            d_own_RP=-pull.own_R.unsqueeze(1).expand_as(rows.own_RP),
            d_kin_R=-pull.kin_R,
            d_temperature_R=weighted_R / t if rows.learned else None,
            update={"state": stored_b.unsqueeze(1)},
        )

    def __repr__(self) -> str:
        return self._call(num_samples=self.num_samples, gamma=self.gamma)
