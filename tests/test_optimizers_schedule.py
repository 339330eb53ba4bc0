"""Schedules: values by hand, and the scheduler as the same function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from kinfolk.optimizers import build_scheduler, lr_factor


def test_warm_up_rises_to_one() -> None:
    values = [lr_factor(step, 100, warmup_steps=4) for step in range(5)]
    assert values == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_by_hand() -> None:
    assert lr_factor(0, 100) == 1.0
    assert lr_factor(50, 100) == pytest.approx(0.5)
    assert lr_factor(25, 100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert lr_factor(100, 100) == pytest.approx(0.0)
    assert lr_factor(1000, 100) == lr_factor(100, 100)
    assert lr_factor(60, 110, warmup_steps=10) == pytest.approx(0.5)


def test_steps_and_constant() -> None:
    def at(step: int) -> float:
        return lr_factor(step, 100, warmup_steps=2, kind="steps", milestones=(60, 80), gamma=0.1)

    assert [at(step) for step in (0, 1, 59)] == [0.5, 1.0, 1.0]
    assert at(60) == pytest.approx(0.1)
    assert at(79) == pytest.approx(0.1)
    assert at(80) == pytest.approx(0.01)
    assert lr_factor(99, 100, kind="constant") == 1.0


def test_warm_up_may_take_all() -> None:
    assert lr_factor(4, 5, warmup_steps=5) == 1.0
    assert lr_factor(5, 5, warmup_steps=5) == 1.0  # nothing is left to fall over


def test_the_scheduler_is_the_function() -> None:
    groups: list[dict[str, Any]] = [
        {"params": nn.Linear(2, 2).parameters(), "lr": 0.3},
        {"params": nn.Linear(2, 2).parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=2.0)
    scheduler = build_scheduler(optimizer, lambda step: lr_factor(step, 10, warmup_steps=3))
    for step in range(12):
        factor = lr_factor(step, 10, warmup_steps=3)
        assert [group["lr"] for group in optimizer.param_groups] == [0.3 * factor, 2.0 * factor]
        optimizer.step()
        scheduler.step()
