"""What the global contrastive losses share: a moving average, kept for each sample, of the mean over its negatives.

GloFND, equation 5, of SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022.

Dimension key: R rows of a block, N data set.

SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022; as in GloFND, equations 3 and 5.

Dimension key: R rows of a block, P own positives, N data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.objectives.base import Objective, Shared, pulls
from kinfolk.stores.per_sample import PerSample


class Averaged(Objective):
    """Abstract. An objective that keeps u for each sample, as its logarithm so that no temperature overflows.

        u_i ← (1 − γ) u_i + γ ĝ_i,  u_i = ĝ_i on the first visit

    All views of a sample read the same old u; the mean of their new values is stored. A sample without negatives is left as it is. A sample
    that was never visited has u = 0. Of several occurrences of a sample in one batch, the mean of log u is stored.

    Args:
        num_samples: N; ids are in [0, N).
        gamma: γ, the weight of the new value.
        more: further fields of the store, with their initial values.
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.
    """

    attracted_stay: ClassVar[bool] = False
    addresses: ClassVar[bool] = True
    reads_weight: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {
        "prior": "its maximum with the least possible sum is not linear, so it does not carry over to a moving average of the mean",
        "hardness": "it weighs negatives by a ratio of two means, and the average of ratios over batches is not the ratio over the data",
        "decoupled": "the positive is not in the mean over negatives anyway",
    }

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float,
        more: Mapping[str, float] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(temperature, **shared)
        if not 0 < gamma <= 1:
            raise ValueError(f"`gamma` (={gamma}) must be in (0, 1]")
        self.num_samples, self.gamma = num_samples, gamma
        self.store = PerSample(num_samples, log_u=-math.inf, **(more or {}))

    @property
    def u(self) -> Tensor:
        """(N,) the moving averages; 0 where the sample was not seen."""
        log_u: Tensor = self.store.log_u
        return log_u.exp()

    def averaged(self, rows: Rows, log_g_R: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) log of the new u, and (b,) what to store of it. NaN in, for a row without negatives, is NaN out and changes no state."""
        old_b1 = self.store.read_rows(rows.ids)[:, :1].to(log_g_R.dtype)
        log_g_bV = log_g_R.view(-1, rows.num_views)
        if self.gamma == 1:
            log_u_bV = log_g_bV
        else:
            log_u_bV = torch.logaddexp(old_b1 + math.log1p(-self.gamma), log_g_bV + math.log(self.gamma))
            log_u_bV = torch.where(old_b1 == -torch.inf, log_g_bV, log_u_bV)
        stored_b = log_u_bV.squeeze(1) if rows.num_views == 1 else log_u_bV.logsumexp(1) - math.log(rows.num_views)
        return log_u_bV.view(-1), stored_b

    def over_levels(self, updates: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The mean of the levels' u, and of whatever else they propose."""
        if len(updates) == 1:
            return updates[0]
        state_LbF = torch.stack([update["state"] for update in updates])
        log_u_b1 = state_LbF[:, :, :1].logsumexp(0) - math.log(len(updates))
        return {"state": torch.cat((log_u_b1, state_LbF[:, :, 1:].mean(0)), 1)}

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.store.write_rows(ids, update["state"], sound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        seen = state_dict.pop(f"{prefix}store.seen", None)  # as version 0.1.0 saved it
        if seen is not None:
            log_u = state_dict[f"{prefix}store.log_u"]
            state_dict[f"{prefix}store.log_u"] = torch.where(seen, log_u, -math.inf)
        super()._load_from_state_dict(state_dict, prefix, *others)


def cosine_gamma(gamma: float, epoch: int, decay_epochs: int | None) -> float:
    """γ of an epoch: from 1 down to `gamma` along half a cosine in `decay_epochs`, then constant; None: constant from the start."""
    if decay_epochs is None or epoch >= decay_epochs:
        return gamma
    return gamma + (1 - gamma) * (1 + math.cos(math.pi * epoch / decay_epochs)) / 2


def check_decay(decay_epochs: int | None) -> int | None:
    """The epochs in which γ falls, if there is at least one."""
    if decay_epochs is not None and decay_epochs < 1:
        raise ValueError(f"`decay_epochs` (={decay_epochs}) must be at least 1, or None for a constant gamma")
    return decay_epochs


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
            d_lse_R=(log_g_R - log_u_R).exp_().mul_(t).masked_fill_(bare_R, 0.0),
            d_own_RP=-pull.own_R.unsqueeze(1).expand_as(rows.own_RP),
            d_kin_R=None if rows.kin_sum_R is None else -pull.kin_R,
            d_temperature_R=weighted_R / t if rows.learned else None,
            update={"state": stored_b.unsqueeze(1)},
        )

    def __repr__(self) -> str:
        return self._call(num_samples=self.num_samples, gamma=self.gamma)
