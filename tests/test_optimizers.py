"""Optimisers: LARS against a slow transcription and against SGD, groups, scaling, exact resume."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from kinfolk.optimizers import (
    LARS,
    build_optimizer,
    build_scheduler,
    lr_factor,
    parameter_groups,
    scale_lr,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    module.zero_grad()
    module(x).square().mean().backward()


def slow_lars(
    w: list[float],
    g: list[float],
    m: list[float],
    kernel: bool,
    lr: float,
    momentum: float,
    decay: float,
    trust: float,
    nesterov: bool,
) -> tuple[list[float], list[float]]:
    """One LARS step on one flattened parameter, number by number."""
    d = list(g)
    if kernel:
        d = [gi + decay * wi for gi, wi in zip(g, w, strict=True)]
        w_norm, d_norm = math.sqrt(sum(wi * wi for wi in w)), math.sqrt(sum(di * di for di in d))
        if w_norm > 0 and d_norm > 0:
            d = [trust * w_norm / d_norm * di for di in d]
    m = [momentum * mi + di for mi, di in zip(m, d, strict=True)]
    move = [di + momentum * mi for mi, di in zip(m, d, strict=True)] if nesterov else m
    return [wi - lr * vi for wi, vi in zip(w, move, strict=True)], m


@pytest.mark.parametrize(("nesterov", "momentum"), [(False, 0.9), (True, 0.9), (False, 0.0)])
def test_lars_equals_a_slow_transcription(nesterov: bool, momentum: float) -> None:
    module = net().double()
    lars = LARS(
        module.parameters(),
        0.3,
        momentum=momentum,
        weight_decay=0.01,
        trust=0.02,
        nesterov=nesterov,
    )
    slow_w = [param.detach().flatten().tolist() for param in module.parameters()]
    slow_m = [[0.0] * len(w) for w in slow_w]
    for step in range(4):
        x = torch.randn(
            6, 3, 8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        module.zero_grad()
        module(x).square().mean().backward()
        for index, param in enumerate(module.parameters()):
            assert param.grad is not None
            g = param.grad.flatten().tolist()
            slow_w[index], slow_m[index] = slow_lars(
                slow_w[index], g, slow_m[index], param.ndim > 1, 0.3, momentum, 0.01, 0.02, nesterov
            )
        lars.step()
        for w, param in zip(slow_w, module.parameters(), strict=True):
            torch.testing.assert_close(
                param.detach().flatten(),
                torch.tensor(w, dtype=torch.float64),
                rtol=1e-10,
                atol=1e-12,
            )


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_sgd_on_biases_and_norms(nesterov: bool) -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    lars = LARS([ours], 0.1, weight_decay=0.5, nesterov=nesterov)
    sgd = torch.optim.SGD([theirs], 0.1, momentum=0.9, nesterov=nesterov)
    for step in range(3):
        for param, optimizer in ((ours, lars), (theirs, sgd)):
            param.grad = torch.arange(3.0) + step
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_weight_moves_by_trust_times_its_norm_whatever_its_gradients_size() -> None:
    for size in (1e-4, 1.0, 1e4):
        param = nn.Parameter(torch.full((2, 2), 3.0))
        param.grad = torch.full((2, 2), size)
        LARS([param], 1.0, trust=0.1).step()
        torch.testing.assert_close((3.0 - param.detach()).norm(), torch.tensor(0.6))


def test_zero_weights_and_zero_gradients_stay_finite() -> None:
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    LARS([zero, still], 0.5).step()
    assert torch.equal(zero.detach(), torch.full((2, 2), -0.5))
    assert torch.equal(still.detach(), torch.ones(2, 2))


def test_gradients_are_read_only_and_absent_ones_skipped() -> None:
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    used.grad = torch.ones(2, 2)
    lars = LARS([used, unused], 0.5, weight_decay=0.1)
    assert lars.step(lambda: 7.0) == 7.0
    assert torch.equal(used.grad, torch.ones(2, 2))
    assert torch.equal(unused.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_resume_is_exact(name: Literal["sgd", "lars", "adamw"]) -> None:
    def start() -> tuple[nn.Module, Any, Any]:
        module = net()
        optimizer = build_optimizer(name, module, 0.1, weight_decay=0.01)
        return (
            module,
            optimizer,
            build_scheduler(
                optimizer, lambda step: lr_factor(step, total_steps=10, warmup_steps=2)
            ),
        )

    def go(module: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            backward(module, step)
            optimizer.step()
            scheduler.step()

    whole = start()
    go(*whole, range(8))
    first = start()
    go(*first, range(5))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = start()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, range(5, 8))
    for expected, got in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(expected, got)
    assert second[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]


def test_decay_is_on_matrices_and_kernels_only() -> None:
    module = net()
    module[0].requires_grad_(False)
    decayed, plain = parameter_groups(module, 0.1)
    assert [tuple(param.shape) for param in decayed["params"]] == [(5, 144)]
    assert decayed["weight_decay"] == 0.1
    assert [tuple(param.shape) for param in plain["params"]] == [(4,), (4,), (5,)]
    assert plain["weight_decay"] == 0.0
    assert len(parameter_groups(nn.BatchNorm1d(3), 0.1)) == 1


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_built_optimisers_decay_what_they_should(name: Literal["sgd", "lars", "adamw"]) -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(1.0)
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    build_optimizer(name, module, 0.1, weight_decay=0.5, trust=0.5).step()
    assert bool((module.weight < 1).all())
    assert torch.equal(module.bias.detach(), torch.ones(2))


def test_the_rate_scales_linearly_or_by_the_root_of_the_batch() -> None:
    assert scale_lr(0.3, 512, "linear") == pytest.approx(0.6)
    assert scale_lr(0.075, 128, "sqrt") == pytest.approx(0.075 * math.sqrt(128))
    assert scale_lr(0.3, 512, "none") == 0.3


def one() -> list[Tensor]:
    return [nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LARS(one(), -1.0), r"`lr` \(=-1.0\)"),
        (lambda: LARS(one(), math.nan), r"`lr` \(=nan\)"),
        (lambda: LARS(one(), 1.0, trust=-1), r"`trust` \(=-1\)"),
        (lambda: LARS(one(), 1.0, momentum=0, nesterov=True), "nesterov"),
        (lambda: build_optimizer("sgd", nn.ReLU(), 0.1), "no parameters to train"),
    ],
)
def test_settings_of_optimizers_out_of_range_are_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()
