"""SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022; as in GloFND, equations 3 and 5.

Dimension key: R rows of a block, P own positives, b samples of a block, N data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.actions import Action
from kinfolk.contrast import Rows, Terms
from kinfolk.detectors.base import Detector
from kinfolk.objectives.base import Objective
from kinfolk.stores.per_sample import PerSample


class SogCLR(Objective):
    """The global contrastive loss: the batch's mean over negatives is replaced by a moving average kept for each sample.

        ĝ_i = Σ_j w_ij exp(s_ij / t) / Σ_j w_ij                     (kept negatives; the positive is not among them)
        u_i ← (1 − γ) u_i + γ ĝ_i,  u_i = ĝ_i on the first visit
        value    mean_i( −s_i,pos + t·log u_i )
        gradient mean_i( −∇s_i,pos + (t / u_i) ∇ĝ_i )

    With `attract`, kin are positives too (mean of similarities) and, like the own positive, leave ĝ. State per sample: u, kept as its
    logarithm so that no temperature overflows, and whether the sample was seen. Both views read the same old u; the mean of their two
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

    attracted_stay: ClassVar[bool] = False
    addresses: ClassVar[bool] = True

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float = 0.9,
        detector: Detector | None = None,
        action: Action = "eliminate",
        min_negatives: int = 1,
        block_rows: int | None = None,
        kin_weight: float = 0.5,
        gather: bool | None = None,
    ) -> None:
        super().__init__(temperature, detector, action, min_negatives, kin_weight, block_rows, gather)
        if not 0 < gamma <= 1:
            raise ValueError(f"`gamma` (={gamma}) must be in (0, 1]")
        self.num_samples, self.gamma = num_samples, gamma
        self.store = PerSample(num_samples, log_u=torch.tensor(0.0), seen=torch.tensor(False))

    @property
    def u(self) -> Tensor:
        """(N,) the moving averages; 0 where the sample was not seen."""
        state = self.store.read(torch.arange(self.num_samples, device=self.store.log_u.device))
        return torch.where(state["seen"], state["log_u"].exp(), 0.0)

    def terms(self, rows: Rows) -> Terms:
        state = self.store.read(rows.ids)
        old_R = state["log_u"].to(rows.lse_R.dtype).repeat_interleave(rows.num_views)
        seen_R = state["seen"].repeat_interleave(rows.num_views)
        bare_R = rows.log_weight_R == -torch.inf  # no negatives at all: nothing to estimate
        log_g_R = torch.where(bare_R, old_R, rows.lse_R - rows.log_weight_R)
        log_u_R = torch.where(seen_R & ~bare_R, moving_average(old_R, log_g_R, self.gamma), log_g_R)
        attracted_R = rows.kin_count_R if self.action == "attract" else torch.zeros_like(rows.kin_count_R)
        num_positives_R = (rows.own_RP.shape[1] + attracted_R).to(log_u_R.dtype)
        pull_R = -1 / num_positives_R
        mean_R = (rows.own_RP.sum(1) + rows.kin_sum_R) / num_positives_R
        push_R = torch.where(bare_R, 0.0, self.temperature * log_u_R)
        return Terms(
            loss_R=push_R - mean_R,
            d_lse_R=torch.where(bare_R, 0.0, self.temperature * torch.exp(log_g_R - log_u_R)),
            d_own_RP=pull_R.unsqueeze(1).expand_as(rows.own_RP),
            d_kin_R=pull_R,
            update={
                "log_u": log_u_R.view(-1, rows.num_views).logsumexp(1) - math.log(rows.num_views),
                "seen": state["seen"] | ~bare_R.view(-1, rows.num_views).any(1),
            },
        )

    def over_levels(self, updates: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The mean of the levels' u."""
        log_u = torch.stack([update["log_u"] for update in updates]).logsumexp(0) - math.log(len(updates))
        return {"log_u": log_u, "seen": updates[0]["seen"]}

    def observe(self, ids: Tensor, update: Mapping[str, Tensor]) -> None:
        unique, log_u = mean_in_log_space(ids, update["log_u"])
        _, seen = mean_in_log_space(ids, torch.where(update["seen"], 0.0, -torch.inf))
        self.store.write(unique, {"log_u": log_u, "seen": seen > -torch.inf})

    def __repr__(self) -> str:
        return self._call(num_samples=self.num_samples, gamma=self.gamma)


def moving_average(old_log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """log((1 − γ) u + γ g) from the logarithms; equation 5."""
    if gamma == 1:
        return log_g
    return torch.logaddexp(old_log_u + math.log1p(-gamma), log_g + math.log(gamma))


def mean_in_log_space(ids: Tensor, log_values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids, and log of the mean of the values of each."""
    unique, inverse, count = torch.unique(ids, return_inverse=True, return_counts=True)
    top = log_values.new_full(unique.shape, -torch.inf).scatter_reduce(0, inverse, log_values, "amax")
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros_like(top).index_add(0, inverse, (log_values - top[inverse]).exp())
    return unique, top + total.log() - count.to(top.dtype).log()
