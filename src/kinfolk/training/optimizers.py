"""Optimisers: SGD, LARS and AdamW over two parameter groups, and the scaling of the learning rate with the batch.

Weight decay concerns the matrices and kernels alone: biases and norms (parameters with at most one dimension) are never decayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from kinfolk.lars import LARS, check_not_negative

OptimizerName = Literal["sgd", "lars", "adamw"]
Scaling = Literal["linear", "sqrt", "none"]


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
