"""The robust global contrastive loss of one direction: Qiu et al., Not All Semantics are Created Equal: Contrastive Self-supervised
Learning with Automatic Temperature Individualization (iSogCLR), ICML 2023, and with one temperature for all samples Wei et al., FastCLIP:
A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources, 2024.

Dimension key: A anchors, R rows of a block, b samples of a block, P own positives, N data set.

FastCLIP: Wei et al., FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources, 2024, version 3;
with GloFND: Balmaseda et al., ICML 2025, section 4.2 and appendix D.2.

Dimension key: N data set.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from kinfolk.contrast import Rows, Terms
from kinfolk.detectors.base import Detector
from kinfolk.objectives.base import READ_EVERY, Shared, call, pulls, with_detector
from kinfolk.objectives.bimodal import Bimodal, LearnedTemperature
from kinfolk.objectives.sogclr import Averaged, check_decay, cosine_gamma
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
        epsilon: ε. Samples whose u_i is far below it hardly pull or push.
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


_SLOW_BELOW, _SLOW = 0.03, 1 / 3
TemperatureGradient = Literal["released", "exact"]


class FastCLIP(Bimodal[RobustContrast]):
    """The robust global contrastive loss of image and text: moving averages per direction, and a temperature learned by its own rule.

        ĝ_I,i = mean over the kept texts j ≠ i of exp((s_ij − s_ii) / t),   u_I,i ← (1 − γ) u_I,i + γ ĝ_I,i    and so for texts: ĝ_T, u_T
        value           mean_i( ½ t·log(ε + u_I,i) + ½ t·log(ε + u_T,i) ) + ρ·t
        gradient        mean_i( ½ t / (ε + u_I,i) · ∇ĝ_I,i + ½ t / (ε + u_T,i) · ∇ĝ_T,i )
        gradient by t   mean_i( ½ log(ε + u_I,i) + c · ½ t / (ε + u_I,i) · ∂ĝ_I,i/∂t + … ) + ρ        c = 2, or 1 if it is "exact"

    c = 2 is what the published code has: there ∂ĝ/∂t enters once with the anchors' and once with the candidates' part of the loss. With
    c = 1 it is the gradient of the value: where u is far above ε, ρ less the divergence of the negatives' shares from equal ones. That
    is at most the logarithm of their number, so with fewer than exp(ρ) negatives (665 with ρ = 6.5) t falls until ε stops it, or to
    `min_temperature`, also at the start of a training, where c = 2 keeps it up.
    Whatever shares the anchor's group, and with `eliminate` or `attract` its kin, is not in ĝ. γ falls from 1 to `gamma` along a cosine in
    `decay_epochs`, then stays; `set_progress` moves it. The temperature wants a learning rate of its own, which falls to a third while
    t < 0.03; that is the optimiser's part:

        optimizer = AdamW([{"params": towers}, {"params": loss_fn.temperature_parameters(), "lr": 2e-4, "weight_decay": 0}])
        schedule = LambdaLR(optimizer, [towers_schedule, lambda step: loss_fn.temperature_lr_factor])

    With `individual_lr`, every image and every text has a temperature of its own instead (iSogCLR), learned within the loss as the
    thresholds are: a step with momentum, clipped, within [`min_temperature`, 1]. State: `learned.logit_scale`, the logarithm of 1 / t, or
    the individual temperatures (`image.temperatures`, `text.temperatures`); u of each direction; and that of the two detectors.

    Args:
        num_samples: N; ids are in [0, N).
        temperature: t at the start.
        rho: ρ; the larger, the lower t settles.
        gamma: γ at its end.
        decay_epochs: epochs in which γ falls; None: it is constant.
        epsilon: ε.
        min_temperature: t never falls below.
        individual_lr: the step of individual temperatures; None: one temperature, a parameter.
        temperature_gradient: "released" (default), the published code's, which the published values of ρ were chosen with; or "exact", the
            gradient of the value. Individual temperatures have the exact one, as in the published code.
        detector, action, min_negatives, kin_weight, block_rows, gather: see `Objective`; the detector is copied for the second direction.

    Deviates from the paper in: the mean of the two directions, half of its sum, as the published code has it; the gradient by t by default,
    also as the published code has it; individual temperatures, which go by iSogCLR's rule, not by version 2's.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.FastCLIP(num_samples=100, rho=6.5)
        >>> loss_fn(torch.eye(4), torch.eye(4), torch.arange(4)).backward()
        >>> round(loss_fn.temperature, 4), loss_fn.temperature_lr_factor
        (0.07, 1.0)
    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.07,
        rho: float = 6.5,
        gamma: float = 0.2,
        decay_epochs: int | None = 18,
        epsilon: float = 1e-14,
        min_temperature: float = 0.01,
        individual_lr: float | None = None,
        temperature_gradient: TemperatureGradient = "released",
        **shared: Unpack[Shared],
    ) -> None:
        if temperature_gradient not in get_args(TemperatureGradient):
            allowed = ", ".join(get_args(TemperatureGradient))
            raise ValueError(f"`temperature_gradient` (={temperature_gradient!r}) must be one of {allowed}")
        halved = temperature_gradient == "released" and individual_lr is None  # of log u and ρ; all of it is doubled again
        learned = LearnedTemperature(temperature, min_temperature, gradient_factor=2.0 if halved else 1.0)

        def make(each: Detector | None) -> RobustContrast:
            return RobustContrast(
                num_samples,
                temperature,
                gamma,
                rho,
                epsilon,
                individual_lr,
                learned.lowest,
                learned.highest,
                halved,
                **with_detector(shared, each),
            )

        super().__init__(make, shared.get("detector"), learned if individual_lr is None else None)
        self.num_samples, self.gamma, self.decay_epochs = num_samples, gamma, check_decay(decay_epochs)
        self.temperature_gradient = temperature_gradient
        self._calls, self._factor = 0, 1.0
        self.set_progress(0, 1)

    @property
    def temperature(self) -> float:
        """t, as it is now; the mean of individual ones."""
        if self.image.individual_lr is None:
            return super().temperature
        return float(self.image.temperatures.float().mean() + self.text.temperatures.float().mean()) / 2

    @property
    def temperature_lr_factor(self) -> float:
        """1, or a third while t < 0.03. On an accelerator t is looked at once in `READ_EVERY` calls, because looking stops the step."""
        on_cpu = all(parameter.device.type == "cpu" for parameter in (*self.temperature_parameters(), self.image.store.rows))
        if on_cpu or self._calls % READ_EVERY == 0:
            self._factor = _SLOW if self.temperature < _SLOW_BELOW else 1.0
        self._calls += 1
        return self._factor

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.image.gamma = self.text.gamma = cosine_gamma(self.gamma, int(epoch), self.decay_epochs)

    def __repr__(self) -> str:
        one = self.image
        named = ("temperature", "rho", "epsilon", *(() if one.individual_lr is None else ("individual_lr",)))
        learning = {name: getattr(one, name) for name in named}
        schedule = {"gamma": self.gamma, "decay_epochs": self.decay_epochs, "min_temperature": one.lowest}
        gradient = {} if self.temperature_gradient == "released" else {"temperature_gradient": self.temperature_gradient}
        return call("FastCLIP", one, num_samples=self.num_samples, **learning, **schedule, **gradient)
