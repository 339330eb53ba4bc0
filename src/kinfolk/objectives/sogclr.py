"""SogCLR: Yuan et al., ICML 2022; as in GloFND, equations 3 and 5.

Dimension key: R rows of a block, b samples of a block, N data set.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kinfolk.contrast import Rows, State
from kinfolk.errors import require, require_at_least
from kinfolk.objectives.base import Objective
from kinfolk.stores.per_sample import PerSample


@dataclass(kw_only=True, eq=False, repr=False)
class AveragedLoss(Objective, ABC):
    """Abstract. A loss that keeps a moving average u of each sample's mean over negatives.

    The logarithm of its mean over a sample's views is stored, so that no temperature overflows. A
    sample without negatives is left as it is.

    Args:
        num_samples: N; ids are in [0, N).
        gamma: γ in (0, 1], the weight of the new value.
        decay_epochs: epochs in which γ falls from 1 to `gamma` along a cosine.
        temperature, detector, …: see `Settings`.
    """

    num_samples: int
    gamma: float = 0.9
    decay_epochs: int | None = None

    attracted_stay: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {
        "prior": "its maximum with the least possible sum is not linear, and an average needs that",
        "hardness": "it is a ratio of two means, and the mean of ratios is not the ratio of means",
        "decoupled": "the positive is not in the mean over negatives anyway",
    }

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        require(0 < self.gamma <= 1, "gamma", self.gamma, "in (0, 1]")
        require_at_least(1, decay_epochs=self.decay_epochs)
        self._set_gamma(0)
        self.store = PerSample(self.num_samples, log_u=-math.inf)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self._set_gamma(int(epoch))

    def _set_gamma(self, epoch: int) -> None:
        gamma = self.gamma
        if self.decay_epochs is not None and epoch < self.decay_epochs:
            gamma += (1 - gamma) * (1 + math.cos(math.pi * epoch / self.decay_epochs)) / 2
        self.current_gamma = torch.tensor(gamma, dtype=torch.float64)  # in a compiled graph

    @property
    def u(self) -> Tensor:
        """(N,) the moving averages; 0 before the first visit."""
        log_u: Tensor = self.store.log_u
        return log_u.exp()

    @torch.no_grad()
    def average(self, rows: Rows, log_g: Tensor, bare: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) log of the new u, 0 in `bare` rows (without negatives), and (b,) what to store."""
        gamma = self.current_gamma.to(log_g.dtype)
        old_b1 = self.store.log_u[rows.ids].to(log_g.dtype).unsqueeze(1)
        log_g_bV = log_g.masked_fill(bare, torch.nan).view(-1, rows.num_views)
        new_bV = torch.logaddexp(old_b1 + (1 - gamma).log(), log_g_bV + gamma.log())
        new_bV = torch.where(old_b1 == -torch.inf, log_g_bV, new_bV)
        return new_bV.flatten().masked_fill(bare, 0.0), log_mean(new_bV)

    def state_of(self, proposed: State) -> State:
        return {"log_u": log_mean(proposed["log_u"])}

    def observe(self, ids: Tensor, update: State, is_finite: Tensor | None = None) -> None:
        self.store.write_rows(ids, update["log_u"].unsqueeze(1), is_finite)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        seen = state_dict.pop(f"{prefix}store.seen", None)  # as version 0.1.0 saved it
        if seen is not None:
            log_u = state_dict[f"{prefix}store.log_u"]
            state_dict[f"{prefix}store.log_u"] = torch.where(seen, log_u, -math.inf)
        super()._load_from_state_dict(state_dict, prefix, *others)


def log_mean(logs: Tensor) -> Tensor:
    """The logarithm of the mean over the columns, given logarithms."""
    return logs.logsumexp(1) - math.log(logs.shape[1])


@dataclass(kw_only=True, eq=False, repr=False)
class SogCLRLoss(AveragedLoss):
    """The global contrastive loss: a moving average of each sample instead of the batch's mean.

        ĝ_i = Σ_j w_ij exp(s_ij / t) / Σ_j w_ij       (the positive is not among them)
        u_i ← (1 − γ) u_i + γ ĝ_i,  u_i = ĝ_i on the first visit
        value    mean_i( −s_i,pos + t·log u_i )
        gradient mean_i( −∇s_i,pos + (t / u_i) ∇ĝ_i )

    With "attract", kin are positives and leave ĝ. With γ = 1 the gradient is that of −s_pos + t·log
    ĝ of the batch. State: u.

    Args:
        num_samples, gamma, decay_epochs: see `AveragedLoss`.
        temperature, detector, …: see `Settings`.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.SogCLRLoss(num_samples=100, temperature=0.1)
        >>> z1, z2, ids = torch.eye(4), torch.eye(4), torch.arange(4)
        >>> round(loss_fn(z1, z2, ids).item(), 4)
        -1.0
    """

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        weight = rows.weight()
        log_g = rows.log_sum() - weight.where(weight > 0, 1.0).log()
        log_u, stored = self.average(rows, log_g, weight == 0)
        gradient = rows.t.detach() * torch.exp(log_g - log_u)  # (t / u) ∇ĝ
        value = rows.t * log_u - rows.pull(self.own_weight)
        return gradient - gradient.detach() + value, {"log_u": stored}
