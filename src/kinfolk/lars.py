"""LARS: stochastic gradient descent for large batches, for training and for the linear probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: SGD whose step on each weight is proportional to that
    weight's norm (You et al., Large Batch Training of Convolutional Networks, 2017).

        d = g + weight_decay · w
        d ← trust · ‖w‖ / ‖d‖ · d
        m ← momentum · m + d
        w ← w − lr · m            (nesterov: w − lr · (d + momentum · m))

    Biases and norms (ndim ≤ 1) take the plain SGD step without decay and adaptation; a weight with
    ‖w‖ = 0 or ‖d‖ = 0 is not scaled. State kept: `momentum_buffer`.

    Deviates from the paper as SimCLR's, MoCo v3's and SogCLR's code do: the norm is taken of the
    decayed gradient, and the learning rate multiplies the momentum rather than what goes into it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        if nesterov and momentum == 0:
            raise ValueError("`momentum` (=0) must be above 0 with `nesterov`")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "nesterov": nesterov})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            kernels = [param for param in params if param.ndim > 1]
            others = [param for param in params if param.ndim <= 1]
            if kernels:
                grads = [param.grad for param in kernels]
                adapted = _adapt(kernels, grads, group["weight_decay"], group["trust"])
                self._move(kernels, adapted, group)
            if others:
                self._move(others, [param.grad for param in others], group)
        return loss

    def _move(self, params: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if momentum != 0:
            for param in params:
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param)
            buffers = [self.state[param]["momentum_buffer"] for param in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, directions)
            if group["nesterov"]:
                directions = list(torch._foreach_add(directions, buffers, alpha=momentum))
            else:
                directions = buffers
        torch._foreach_add_(params, directions, alpha=-group["lr"])


def _adapt(
    params: list[Tensor], grads: list[Tensor], weight_decay: float, trust: float
) -> list[Tensor]:
    """Decayed gradients, each scaled to `trust` times the norm of its weight."""
    directions = list(torch._foreach_add(grads, params, alpha=weight_decay))
    norms = zip(torch._foreach_norm(params), torch._foreach_norm(directions), strict=True)
    ratios = [
        torch.where((size > 0) & (moved > 0), trust * size / moved, 1.0) for size, moved in norms
    ]
    torch._foreach_mul_(directions, ratios)
    return directions


def check_not_negative(**values: float) -> None:
    """Refuses negative arguments by their name."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}` (={value}) must not be negative")
