"""Optimisers: SGD, LARS and AdamW over two parameter groups, and the scaling of the learning rate with the batch.

Weight decay concerns the matrices and kernels alone: biases and norms (parameters with at most one dimension) are never decayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

OptimizerName = Literal["sgd", "lars", "adamw"]
Scaling = Literal["linear", "sqrt", "none"]


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: SGD whose step on each weight is proportional to that weight's own norm.

        d = g + weight_decay · w
        d ← trust · ‖w‖ / ‖d‖ · d
        m ← momentum · m + d
        w ← w − lr · m            (nesterov: w − lr · (d + momentum · m))

    You et al., Large Batch Training of Convolutional Networks, 2017. Biases and norms (ndim ≤ 1) take the plain SGD step with neither
    decay nor adaptation; so does a weight with ‖w‖ = 0 or ‖d‖ = 0 (without the factor). State kept: `momentum_buffer`.

    Deviates from the paper as SimCLR's, MoCo v3's and SogCLR's code do: the norm is taken of the decayed gradient, not of the two
    apart; and as torch's SGD does, the learning rate multiplies the momentum rather than what goes into it.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum, nesterov: as in `torch.optim.SGD`.
        weight_decay: ℓ2 penalty on parameters with ndim > 1.
        trust: η, how much of its own norm a weight moves by at lr 1.
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
        _check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        if nesterov and momentum == 0:
            raise ValueError("`momentum` (=0) must be above 0 with `nesterov`")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "nesterov": nesterov}
        super().__init__(params, defaults)

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
                self._move(kernels, _adapted(kernels, grads, group["weight_decay"], group["trust"]), group)
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
            directions = list(torch._foreach_add(directions, buffers, alpha=momentum)) if group["nesterov"] else buffers
        torch._foreach_add_(params, directions, alpha=-group["lr"])


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices and kernels with `weight_decay`, biases and norms (ndim ≤ 1) with none."""
    trainable = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param.ndim > 1], "weight_decay": weight_decay},
        {"params": [param for param in trainable if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    name: OptimizerName,
    module: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    trust: float = 0.001,
) -> Optimizer:
    """The optimiser called `name` over the trainable parameters of `module`; `lr` is taken as it is (see `scaled_lr`).

    `momentum` and `nesterov` concern sgd and lars, `trust` lars, `betas` adamw.
    """
    _check_not_negative(lr=lr, weight_decay=weight_decay, momentum=momentum)
    groups = parameter_groups(module, weight_decay)
    if not groups:
        raise ValueError(f"{type(module).__name__} has no parameters to train")
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    if name == "lars":
        return LARS(groups, lr, momentum=momentum, trust=trust, nesterov=nesterov)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas)
    raise ValueError(f"`name` (={name!r}) must be one of {', '.join(get_args(OptimizerName))}")


def take_out(optimizer: Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Gives `parameters` a group of their own, with a rate of their own and without decay."""
    own = list(parameters)
    chosen = {id(parameter) for parameter in own}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
    optimizer.add_param_group({"params": own, "lr": lr, "weight_decay": 0.0})


def scaled_lr(lr: float, batch_size: int, rule: Scaling) -> float:
    """Learning rate for a batch of `batch_size` samples over all devices.

    "linear": lr · B / 256 (Goyal et al., 2017); "sqrt": lr · √B (SimCLR, appendix B.1; GloFND trains with 0.075 · √128); "none": lr.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 1")
    if rule == "linear":
        return lr * batch_size / 256
    if rule == "sqrt":
        return lr * math.sqrt(batch_size)
    if rule == "none":
        return lr
    raise ValueError(f"`rule` (={rule!r}) must be one of {', '.join(get_args(Scaling))}")


def _adapted(params: list[Tensor], grads: list[Tensor], weight_decay: float, trust: float) -> list[Tensor]:
    """Decayed gradients, each scaled to `trust` times the norm of its weight."""
    directions = list(torch._foreach_add(grads, params, alpha=weight_decay))
    ratios = []
    for own, moved in zip(torch._foreach_norm(params), torch._foreach_norm(directions), strict=True):
        ratios.append(torch.where((own > 0) & (moved > 0), trust * own / moved, 1.0))
    torch._foreach_mul_(directions, ratios)
    return directions


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}` (={value}) must not be negative")
