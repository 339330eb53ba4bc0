"""FastCLIP: Wei et al., 2024, version 3; with GloFND: Balmaseda et al., ICML 2025, section 4.2.

Dimension key: R rows of a block, b samples of a block, N data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.contrast import Rows, State
from kinfolk.errors import require_at_least, require_choice
from kinfolk.objectives.base import may_read
from kinfolk.objectives.bimodal import BimodalLoss, LearnedTemperature
from kinfolk.objectives.sogclr import AveragedLoss

_SLOW_BELOW, _SLOW = 0.03, 1 / 3
TemperatureGradient = Literal["released", "exact"]


@dataclass(kw_only=True, eq=False, repr=False)
class RobustContrastLoss(AveragedLoss):
    """One direction of `FastCLIPLoss`, whose s_ii is, with "attract", the mean over positives and
    kin.

    With γ = 1 and ε = ρ = 0 it is `SogCLRLoss` with γ = 1. `halved`: log(ε + u_i) and ρ count half
    in the gradient by t.
    """

    rho: float = 0.0
    epsilon: float = 1e-14
    halved: bool = False

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        require_at_least(0, epsilon=self.epsilon)

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        t, weight, pull = rows.t, rows.weight(), rows.pull(self.own_weight)
        bare = weight == 0
        log_g = rows.log_sum() - weight.where(~bare, 1.0).log() - (pull / t).masked_fill(bare, 0.0)
        log_u, stored = self.average(rows, log_g, bare)
        if self.epsilon:
            least = torch.full_like(log_u, math.log(self.epsilon))
            log_u = torch.logaddexp(log_u, least).masked_fill(bare, 0.0)
        gradient = t.detach() * torch.exp(log_g - log_u)  # t / (ε + u) · ∇ĝ, also by t
        value, share = t * log_u + self.rho * t, 0.5 if self.halved else 1.0
        value = share * value + (1 - share) * value.detach()
        return gradient - gradient.detach() + value - pull.where(bare, 0.0), {"log_u": stored}


@dataclass(kw_only=True, eq=False, repr=False)
class FastCLIPLoss(BimodalLoss[RobustContrastLoss]):
    """The robust global contrastive loss of image and text, with a learned temperature.

        ĝ_I,i = mean over the kept texts j ≠ i of exp((s_ij − s_ii) / t)
        u_I,i ← (1 − γ) u_I,i + γ ĝ_I,i
        value           mean_i( ½ t·log(ε + u_I,i) + ½ t·log(ε + u_T,i) ) + ρ·t
        gradient        mean_i( ½ t / (ε + u_I,i) · ∇ĝ_I,i + ½ t / (ε + u_T,i) · ∇ĝ_T,i )
        gradient by t   mean_i( ½ log(ε + u_I,i) + c · ½ t / (ε + u_I,i) · ∂ĝ_I,i/∂t + … ) + ρ

    c is 2 in the published code ("released") and 1 in the gradient of the value ("exact"), with
    which t keeps falling if there are fewer than exp(ρ) negatives (665 with ρ = 6.5).

    The temperature needs a separate learning rate, which falls to a third while t < 0.03:

        own = {"params": loss_fn.temperature_parameters(), "lr": 2e-4, "weight_decay": 0}
        optimizer = AdamW([{"params": towers}, own])
        schedule = LambdaLR(optimizer, [other, lambda step: loss_fn.temperature_lr_factor])

    State: `learned.logit_scale` = −log t; u of each direction; the detectors'.

    Args:
        num_samples, gamma, decay_epochs: see `SogCLRLoss`.
        rho: ρ; the larger, the lower t settles.
        epsilon: ε. Samples whose u_i is far below it have little effect.
        min_temperature: the least t.
        temperature_gradient: "released", with which the published ρ were chosen, or "exact".
        temperature, detector, …: see `Settings`.

    Deviates from the paper in: half of its sum of the two directions, and the default gradient by
    t, both as in the published code.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.FastCLIPLoss(num_samples=100, rho=6.5)
        >>> loss_fn(torch.eye(4), torch.eye(4), torch.arange(4)).backward()
        >>> round(loss_fn.current_temperature, 4), loss_fn.temperature_lr_factor
        (0.07, 1.0)
    """

    temperature: float = 0.07
    num_samples: int
    rho: float = 6.5
    gamma: float = 0.2
    decay_epochs: int | None = 18
    epsilon: float = 1e-14
    min_temperature: float = 0.01
    temperature_gradient: TemperatureGradient = "released"

    refused = AveragedLoss.refused

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        kind = self.temperature_gradient
        require_choice("temperature_gradient", kind, get_args(TemperatureGradient))
        halved = kind == "released"  # log u and ρ; then doubled
        factor = 2.0 if halved else 1.0
        learned = LearnedTemperature(self.temperature, self.min_temperature, gradient_factor=factor)
        names = ("num_samples", "gamma", "decay_epochs", "rho", "epsilon")
        given = {name: getattr(self, name) for name in names}
        self.build(RobustContrastLoss, learned, halved=halved, **given)
        self._calls, self._factor = 0, 1.0

    @property
    def temperature_lr_factor(self) -> float:
        """1, or a third while t < 0.03."""
        if may_read(self._calls, *self.temperature_parameters()):
            self._factor = _SLOW if self.current_temperature < _SLOW_BELOW else 1.0
        self._calls += 1
        return self._factor
