"""LARS, the optimiser of a training, its learning rate and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        for name, value in defaults.items():
            if not value >= 0:
                raise ValueError(f"`{name}` (={value}) must not be negative")
        if nesterov and momentum == 0:
            raise ValueError("`momentum` (=0) must be above 0 with `nesterov`")
        super().__init__(params, {**defaults, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for is_kernel in (True, False):
                part = [param for param in params if (param.ndim > 1) == is_kernel]
                grads = [param.grad for param in part]
                if part and is_kernel:
                    grads = _adapt(part, grads, group["weight_decay"], group["trust"])
                if part:
                    self._move(part, grads, group)
        return loss

    def _move(self, params: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if momentum != 0:
            states = [self.state[param] for param in params]
            for state, param in zip(states, params, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
            buffers = [state["momentum_buffer"] for state in states]
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


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Only parameters with more than one dimension are decayed."""
    trainable = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param.ndim > 1], "weight_decay": weight_decay},
        {"params": [param for param in trainable if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    name: Literal["sgd", "lars", "adamw"],
    module: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    trust: float = 0.001,
) -> Optimizer:
    groups = parameter_groups(module, weight_decay)
    if not groups:
        raise ValueError(f"{type(module).__name__} has no parameters to train")
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    if name == "lars":
        return LARS(groups, lr, momentum=momentum, trust=trust, nesterov=nesterov)
    return AdamW(groups, lr=lr, betas=betas)


def move_to_own_group(optimizer: Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    moved = list(parameters)
    ids = {id(parameter) for parameter in moved}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
    optimizer.add_param_group({"params": moved, "lr": lr, "weight_decay": 0.0})


def scale_lr(lr: float, batch_size: int, rule: Literal["linear", "sqrt", "none"]) -> float:
    """Learning rate for a batch of `batch_size` samples over all devices.

    "linear": lr · B / 256 (Goyal et al., 2017); "sqrt": lr · √B (SimCLR, appendix B.1; GloFND
    trains with 0.075 · √128); "none": lr.
    """
    return lr * {"linear": batch_size / 256, "sqrt": math.sqrt(batch_size), "none": 1}[rule]


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    kind: Literal["cosine", "steps", "constant"] = "cosine",
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
) -> float:
    """The factor of the learning rate at `step` (from 0).

    Warm-up rises as (step + 1) / warmup_steps. Then, with p = (step − warmup_steps) / (total_steps
    − warmup_steps), at most 1:

        cosine    (1 + cos(π p)) / 2
        steps     gamma to the number of `milestones` ≤ step
        constant  1
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "steps":
        return float(gamma ** sum(milestone <= step for milestone in milestones))
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return (1 + math.cos(math.pi * progress)) / 2


def build_scheduler(
    optimizer: Optimizer, factor: Callable[[int], float], others: Sequence[Callable[[], float]] = ()
) -> LambdaLR:
    """The last groups, one for each of `others`, use these factors."""
    # plain functions are not saved in a checkpoint
    own: list[Callable[[int], float]] = [lambda _, other=other: other() for other in others]  # type: ignore[misc]
    shared = [lambda step: factor(step)] * (len(optimizer.param_groups) - len(own))
    return LambdaLR(optimizer, [*shared, *own])
