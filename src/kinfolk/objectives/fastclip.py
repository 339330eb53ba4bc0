"""FastCLIP: Wei et al., FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training
with Limited Resources, 2024, version 3; with GloFND: Balmaseda et al., ICML 2025, section 4.2. With
a temperature for each sample: Qiu et al., Not All Semantics are Created Equal (iSogCLR), ICML 2023.

Dimension key: A anchors, R rows of a block, b samples of a block, N data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.contrast import Outcome, Rows, State
from kinfolk.errors import require
from kinfolk.objectives.base import may_read
from kinfolk.objectives.bimodal import BimodalLoss, LearnedTemperature
from kinfolk.objectives.sogclr import AveragedLoss
from kinfolk.pairs import Pairs

_NEW, _CLIP = 0.5, 5.0  # iSogCLR: weight and largest size of an individual temperature's gradient
_SLOW_BELOW, _SLOW = 0.03, 1 / 3
TemperatureGradient = Literal["released", "exact"]


@dataclass(kw_only=True, eq=False, repr=False)
class RobustContrastLoss(AveragedLoss):
    """One direction of `FastCLIPLoss`: a global contrastive loss whose temperature is learned.

        ĝ_i = Σ_j w_ij exp((s_ij − s_i,pos) / t) / Σ_j w_ij,   u_i as in `SogCLRLoss`
        value             mean_i( t·log(ε + u_i) + ρ·t )
        gradient          mean_i( t / (ε + u_i) · ∇ĝ_i )
        gradient by t     mean_i( log(ε + u_i) + t / (ε + u_i) · ∂ĝ_i/∂t + ρ )

    s_i,pos is the similarity to the positive, with "attract" the mean over positives and kin. With
    γ = 1 and ε = ρ = 0 it is `SogCLRLoss` with γ = 1. State per sample: u; with individual
    temperatures also t and its momentum.

    Args:
        lowest, highest: of individual temperatures.
        halved: log(ε + u_i) and ρ count half in the gradient by t.
        rho, epsilon, individual_lr: see `FastCLIPLoss`.
        temperature, detector, action, …: see `Settings`.
    """

    rho: float = 0.0
    epsilon: float = 1e-14
    individual_lr: float | None = None
    lowest: float = 0.01
    highest: float = 1.0
    halved: bool = False

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        lr = self.individual_lr
        require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        require(lr is None or lr > 0, "individual_lr", lr, "above 0, or None for one temperature")

    def state_fields(self) -> Mapping[str, float]:
        own = {"temperature": self.temperature, "momentum": 0.0}
        return {} if self.individual_lr is None else own

    @property
    def temperatures(self) -> Tensor:
        """(N,) the temperature of each sample."""
        if self.individual_lr is None:
            return torch.tensor(self.temperature).expand(self.num_samples)
        own: Tensor = self.store.temperature
        return own

    def anchor_temperature(self, pairs: Pairs) -> Tensor:
        if self.individual_lr is None:
            return super().anchor_temperature(pairs)
        own: Tensor = self.store.temperature[pairs.ids].to(pairs.anchors.dtype)
        return own.repeat_interleave(pairs.num_views).requires_grad_()

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

    def state_of(self, outcome: Outcome, ids: Tensor) -> State:
        """With individual temperatures, a step with momentum by the gradient of each."""
        proposed = super().state_of(outcome, ids)
        if outcome.t_grad is None or self.individual_lr is None:
            return proposed
        state, gradient_A = self.store.read(ids), outcome.t_grad.clamp(-_CLIP, _CLIP)
        gradient_b = gradient_A.view(len(ids), -1).mean(1).to(state["momentum"].dtype)
        momentum_b = torch.lerp(state["momentum"], gradient_b, _NEW)
        # a sample without negatives is left as it is
        momentum_b = momentum_b.masked_fill(proposed["log_u"].isnan(), torch.nan)
        stepped_b = state["temperature"] - self.individual_lr * momentum_b
        stepped_b = stepped_b.clamp(self.lowest, self.highest)
        return {**proposed, "temperature": stepped_b, "momentum": momentum_b}


@dataclass(kw_only=True, eq=False, repr=False)
class FastCLIPLoss(BimodalLoss[RobustContrastLoss]):
    """The robust global contrastive loss of image and text: moving averages per direction, and a
    temperature learned by its own rule.

        ĝ_I,i = mean over the kept texts j ≠ i of exp((s_ij − s_ii) / t)
        u_I,i ← (1 − γ) u_I,i + γ ĝ_I,i
        value           mean_i( ½ t·log(ε + u_I,i) + ½ t·log(ε + u_T,i) ) + ρ·t
        gradient        mean_i( ½ t / (ε + u_I,i) · ∇ĝ_I,i + ½ t / (ε + u_T,i) · ∇ĝ_T,i )
        gradient by t   mean_i( ½ log(ε + u_I,i) + c · ½ t / (ε + u_I,i) · ∂ĝ_I,i/∂t + … ) + ρ

    c is 2 in the published code ("released"), where ∂ĝ/∂t enters with the anchors' and with the
    candidates' part of the loss, and 1 in the gradient of the value ("exact"). With c = 1 and fewer
    than exp(ρ) negatives (665 with ρ = 6.5) t falls until ε or `min_temperature` stops it.

    The temperature needs a separate learning rate, which falls to a third while t < 0.03:

        own = {"params": loss_fn.temperature_parameters(), "lr": 2e-4, "weight_decay": 0}
        optimizer = AdamW([{"params": towers}, own])
        schedule = LambdaLR(optimizer, [other, lambda step: loss_fn.temperature_lr_factor])

    State: `learned.logit_scale` = −log t, or `image.temperatures` and `text.temperatures`; u of
    each direction; the detectors'.

    Args:
        num_samples, gamma, decay_epochs: see `SogCLRLoss`.
        rho: ρ, which keeps t from growing; the larger, the lower t settles.
        epsilon: ε. Samples whose u_i is far below it hardly pull or push.
        min_temperature: t never falls below.
        individual_lr: the step of a temperature of each image and each text, learned within the
            loss (iSogCLR); None: one temperature, a parameter.
        temperature_gradient: "released", with which the published values of ρ were chosen, or
            "exact". Individual temperatures have the exact one, as in the published code.
        temperature, detector, action, …: see `Settings`.

    Deviates from the paper in: half of its sum of the two directions, and the default gradient by
    t, both as in the published code; individual temperatures follow iSogCLR's rule.

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
    individual_lr: float | None = None
    temperature_gradient: TemperatureGradient = "released"

    refused = AveragedLoss.refused

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        kind, kinds = self.temperature_gradient, get_args(TemperatureGradient)
        require(kind in kinds, "temperature_gradient", kind, f"one of {', '.join(kinds)}")
        halved = kind == "released" and self.individual_lr is None  # log u and ρ; then doubled
        factor = 2.0 if halved else 1.0
        learned = LearnedTemperature(self.temperature, self.min_temperature, gradient_factor=factor)
        self.build(
            RobustContrastLoss,
            learned if self.individual_lr is None else None,
            num_samples=self.num_samples,
            gamma=self.gamma,
            decay_epochs=self.decay_epochs,
            rho=self.rho,
            epsilon=self.epsilon,
            individual_lr=self.individual_lr,
            lowest=learned.lowest,
            highest=learned.highest,
            halved=halved,
        )
        self._calls, self._factor = 0, 1.0

    @property
    def current_temperature(self) -> float:
        """t, as it is now; the mean of individual ones."""
        if self.individual_lr is None:
            return super().current_temperature
        means = [each.temperatures.float().mean() for each in self.objectives]
        return float(sum(means) / 2)

    @property
    def temperature_lr_factor(self) -> float:
        """1, or a third while t < 0.03."""
        if may_read(self._calls, *self.temperature_parameters(), self.image.store.rows):
            self._factor = _SLOW if self.current_temperature < _SLOW_BELOW else 1.0
        self._calls += 1
        return self._factor
