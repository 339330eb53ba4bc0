"""The robust global contrastive loss of one direction: Qiu et al., Not All Semantics are Created Equal: Contrastive Self-supervised
Learning with Automatic Temperature Individualization (iSogCLR), ICML 2023, and with one temperature for all samples Wei et al., FastCLIP:
A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources, 2024.

Dimension key: A anchors, R rows of a block, b samples of a block, P own positives, N data set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.objectives.base import Shared, pulls
from kinfolk.objectives.moving_average import Averaged
from kinfolk.pairs import Pairs

_NEW, _CLIP = 0.5, 5.0  # weight of a new gradient of an individual temperature, and its largest size: iSogCLR's published values


class RobustContrast(Averaged):
    """A global contrastive loss whose temperature is learned: the term ρ·t keeps it from growing.

        ĝ_i = Σ_j w_ij exp((s_ij − s_i,pos) / t) / Σ_j w_ij,   u_i as in `SogCLR`
        value             mean_i( t·log(ε + u_i) + ρ·t )
        gradient          mean_i( t / (ε + u_i) · ∇ĝ_i )
        gradient by t     mean_i( log(ε + u_i) + t / (ε + u_i) · ∂ĝ_i/∂t + ρ )

    s_i,pos is the similarity to the positive, with `attract` the mean over positives and kin. With γ = 1 and ε = ρ = 0 it is `SogCLR` with
    γ = 1. State per sample: u and whether it was seen; with individual temperatures also t and its momentum.

    Args:
        num_samples, gamma: see `SogCLR`.
        temperature: t, or where each sample has its own the first one.
        rho: ρ.
        epsilon: ε; pairs that are apart by far more than it takes are left in peace.
        individual_lr: the step of a temperature of each sample's own; None: there is one for all.
        lowest, highest: of the individual temperatures.
        halved: whether log(ε + u_i) and ρ count half in the gradient by one temperature for all: this is half of the gradient that the
            published code of FastCLIP has; see there.
        detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`.
    """

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float,
        rho: float,
        epsilon: float = 1e-14,
        individual_lr: float | None = None,
        lowest: float = 0.01,
        highest: float = 1.0,
        halved: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        more = {} if individual_lr is None else {"temperature": temperature, "momentum": 0.0}
        super().__init__(num_samples, temperature, gamma, more, **shared)
        if epsilon < 0:
            raise ValueError(f"`epsilon` (={epsilon}) must be at least 0")
        if individual_lr is not None and individual_lr <= 0:
            raise ValueError(f"`individual_lr` (={individual_lr}) must be above 0, or None for one temperature of all samples")
        self.rho, self.epsilon, self.individual_lr, self.lowest, self.highest = rho, epsilon, individual_lr, lowest, highest
        self.halved = halved

    @property
    def temperatures(self) -> Tensor:
        """(N,) the temperature of each sample."""
        own: Tensor = torch.tensor(self.temperature).expand(self.num_samples) if self.individual_lr is None else self.store.temperature
        return own

    def temperature_of(self, pairs: Pairs) -> float | Tensor:
        if self.individual_lr is None:
            return self.temperature
        return self.store.read(pairs.ids)["temperature"].to(pairs.anchors.dtype).repeat_interleave(pairs.num_views)

    def terms(self, rows: Rows) -> Terms:
        t, weight_R = rows.temperature, rows.weight_R
        assert weight_R is not None
        pull = pulls(rows, self.own_weight)
        mean_R, bare_R = pull.sum_R, weight_R == 0  # no negatives at all: only the positives are left
        log_g_R = (rows.lse_R - weight_R.log() - mean_R / t).masked_fill(bare_R, torch.nan)
        log_u_R, stored_b = self.averaged(rows, log_g_R)
        if self.epsilon:
            log_u_R = torch.logaddexp(log_u_R, torch.full_like(log_u_R, math.log(self.epsilon)))
        ratio_R = torch.exp(log_g_R - log_u_R)
        push_R = ratio_R.masked_fill(bare_R, 1.0)
        share = 0.5 if self.halved else 1.0
        d_temperature_R = (share * log_u_R + ratio_R * mean_R / t).masked_fill(bare_R, 0.0) + share * self.rho
        state = [stored_b]
        if self.individual_lr is not None and rows.mean_sim_R is not None:
            state += self._stepped(rows, d_temperature_R - ratio_R * rows.mean_sim_R / t)
        return Terms(
            loss_R=torch.where(bare_R, -mean_R, t * log_u_R) + self.rho * t,
            d_lse_R=(t * ratio_R).masked_fill(bare_R, 0.0),
            d_own_RP=-(push_R * pull.own_R).unsqueeze(1).expand_as(rows.own_RP),
            d_kin_R=-push_R * pull.kin_R,
            d_temperature_R=d_temperature_R,
            update={"state": torch.stack(state, 1)},
        )

    def _stepped(self, rows: Rows, gradient_R: Tensor) -> tuple[Tensor, Tensor]:
        """(b,), (b,) the samples' temperatures after a step with momentum, and the momentum; NaN where the gradient is."""
        assert self.individual_lr is not None
        state = self.store.read(rows.ids)
        gradient_b = gradient_R.clamp(-_CLIP, _CLIP).view(-1, rows.num_views).mean(1).to(state["momentum"].dtype)
        momentum_b = (1 - _NEW) * state["momentum"] + _NEW * gradient_b
        return (state["temperature"] - self.individual_lr * momentum_b).clamp(self.lowest, self.highest), momentum_b

    def __repr__(self) -> str:
        shown = {"num_samples": self.num_samples, "gamma": self.gamma, "rho": self.rho, "epsilon": self.epsilon}
        own = {} if self.individual_lr is None else {"individual_lr": self.individual_lr, "lowest": self.lowest, "highest": self.highest}
        return self._call(**shown, **own)
