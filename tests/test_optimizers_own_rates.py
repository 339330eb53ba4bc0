"""Parameters with a learning rate of their own: outside the schedule, by a factor of the present
state."""

from __future__ import annotations

import torch
from torch import nn

from kinfolk.optimizers import (
    build_optimizer,
    build_scheduler,
    lr_factor,
    move_to_own_group,
)


def test_a_temperature_outside_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    temperature = nn.Parameter(torch.tensor(0.07))
    model.register_parameter("temperature", temperature)
    optimizer = build_optimizer("adamw", model, 0.1, weight_decay=0.2)
    move_to_own_group(optimizer, (temperature,), 0.002)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]
    assert optimizer.param_groups[2]["weight_decay"] == 0.0
    scheduler = build_scheduler(
        optimizer,
        lambda step: lr_factor(step, 10, 2),
        others=[lambda: 1 / 3 if temperature < 0.03 else 1.0],
    )
    for step in range(1, 6):
        (model[0](torch.ones(1, 3)).sum() + temperature).backward()
        optimizer.step()
        if step == 3:
            temperature.data.fill_(0.02)
        scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == rates[1] == 0.1 * lr_factor(step, 10, 2)
        torch.testing.assert_close(rates[2], 0.002 * (1 / 3 if step >= 3 else 1))
    assert temperature < 0.02
