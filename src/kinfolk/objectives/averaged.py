"""What the global contrastive losses share: a moving average, kept for each sample, of the mean over its negatives.

GloFND, equation 5, of SogCLR: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning, ICML 2022.

Dimension key: R rows of a block, N data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows
from kinfolk.objectives.base import Objective, Shared
from kinfolk.stores.per_sample import PerSample, grouped


class Averaged(Objective):
    """Abstract. An objective that keeps u for each sample, as its logarithm so that no temperature overflows, and whether it was seen.

        u_i ← (1 − γ) u_i + γ ĝ_i,  u_i = ĝ_i on the first visit

    All views of a sample read the same old u; the mean of their new values is stored. A sample without negatives is left as it is.

    Args:
        num_samples: N; ids are in [0, N).
        gamma: γ, the weight of the new value.
        more: further fields of the store, with their initial values.
        temperature, detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.
    """

    attracted_stay: ClassVar[bool] = False
    addresses: ClassVar[bool] = True

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
        self.store = PerSample(num_samples, log_u=torch.tensor(0.0), seen=torch.tensor(False), **(more or {}))

    @property
    def u(self) -> Tensor:
        """(N,) the moving averages; 0 where the sample was not seen."""
        state = self.store.read(torch.arange(self.num_samples, device=self.store.log_u.device))
        return torch.where(state["seen"], state["log_u"].exp(), 0.0)

    def _averaged(self, rows: Rows, log_g_R: Tensor, bare_R: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """(R,) log ĝ and log of the new u, both the old one in a row that is bare of negatives, and the proposal for the store."""
        state = self.store.read(rows.ids)
        old_R = rows.per_row(state["log_u"].to(log_g_R.dtype))
        seen_R = rows.per_row(state["seen"])
        log_g_R = torch.where(bare_R, old_R, log_g_R)
        log_u_R = torch.where(seen_R & ~bare_R, moving_average(old_R, log_g_R, self.gamma), log_g_R)
        update = {
            "log_u": log_u_R.view(-1, rows.num_views).logsumexp(1) - math.log(rows.num_views),
            "seen": state["seen"] | ~bare_R.view(-1, rows.num_views).any(1),
        }
        return log_g_R, log_u_R, update

    def over_levels(self, updates: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The mean of the levels' u, and of whatever else they propose."""
        log_u = torch.stack([update["log_u"] for update in updates]).logsumexp(0) - math.log(len(updates))
        more = {name: torch.stack([update[name] for update in updates]).mean(0) for name in updates[0] if name not in ("log_u", "seen")}
        return {"log_u": log_u, "seen": updates[0]["seen"], **more}

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], sound: Tensor | None = None) -> None:
        self.store.write(ids, {**update, "log_u": mean_in_log_space(ids, update["log_u"])}, sound)


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


def moving_average(old_log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """log((1 − γ) u + γ g) from the logarithms; equation 5."""
    if gamma == 1:
        return log_g
    return torch.logaddexp(old_log_u + math.log1p(-gamma), log_g + math.log(gamma))


def mean_in_log_space(ids: Tensor, log_b: Tensor) -> Tensor:
    """(b,) log of the mean of the values of each row's id."""
    group_b, number_b1 = grouped(ids)
    top_b = log_b.new_full(log_b.shape, -torch.inf).scatter_reduce(0, group_b, log_b, "amax")[group_b]
    total_b = torch.zeros_like(log_b).index_add(0, group_b, (log_b - top_b).exp())
    return top_b + total_b[group_b].log() - number_b1.squeeze(1).to(log_b.dtype).log()
