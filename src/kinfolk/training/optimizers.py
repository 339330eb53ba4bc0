"""Optimisers (SGD, LARS, AdamW), the scaling of the learning rate with the batch, and its schedule.
Biases and norms are never decayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kinfolk.errors import require, require_choice
from kinfolk.lars import LARS, check_not_negative

OptimizerName = Literal["sgd", "lars", "adamw"]
Scaling = Literal["linear", "sqrt", "none"]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: those with more than one dimension with `weight_decay`,
    biases and norms with none."""
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
    """The optimiser called `name` over the trainable parameters of `module`."""
    check_not_negative(lr=lr, weight_decay=weight_decay, momentum=momentum)
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


def move_to_own_group(optimizer: Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Moves `parameters` to a group with learning rate `lr` and without weight decay."""
    own = list(parameters)
    chosen = {id(parameter) for parameter in own}
    for group in optimizer.param_groups:
        group["params"] = [
            parameter for parameter in group["params"] if id(parameter) not in chosen
        ]
    optimizer.add_param_group({"params": own, "lr": lr, "weight_decay": 0.0})


def scaled_lr(lr: float, batch_size: int, rule: Scaling) -> float:
    """Learning rate for a batch of `batch_size` samples over all devices.

    "linear": lr · B / 256 (Goyal et al., 2017); "sqrt": lr · √B (SimCLR, appendix B.1; GloFND
    trains with 0.075 · √128); "none": lr.
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


Schedule = Literal["cosine", "steps", "constant"]


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    kind: Schedule = "cosine",
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
    final: float = 0.0,
) -> float:
    """The factor of the learning rate at `step` (from 0).

    Warm-up rises as (step + 1) / warmup_steps. Then, with p = (step − warmup_steps) / (total_steps
    − warmup_steps), at most 1:

        cosine    final + (1 − final) · (1 + cos(π p)) / 2
        steps     gamma to the number of `milestones` ≤ step
        constant  1
    """
    require_choice("kind", kind, get_args(Schedule))
    require(total_steps >= 1, "total_steps", total_steps, "at least 1")
    within = f"in [0, total_steps={total_steps}]"
    require(0 <= warmup_steps <= total_steps, "warmup_steps", warmup_steps, within)
    require(0 <= final <= 1, "final", final, "in [0, 1]")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "steps":
        return float(gamma ** sum(milestone <= step for milestone in milestones))
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def build_scheduler(
    optimizer: Optimizer, factor: Callable[[int], float], others: Sequence[Callable[[], float]] = ()
) -> LambdaLR:
    """A scheduler that is stepped after every optimiser step. The last groups of the optimiser, one
    for each of `others`, use these factors instead."""
    own: list[Callable[[int], float]] = [_independent_of_step(other) for other in others]
    # a plain function is not saved in a checkpoint
    shared = [lambda step: factor(step)] * (len(optimizer.param_groups) - len(own))
    return LambdaLR(optimizer, [*shared, *own])


def _independent_of_step(factor: Callable[[], float]) -> Callable[[int], float]:
    return lambda _: factor()
