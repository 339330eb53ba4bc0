"""What tests of several frameworks do with a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def assert_writes_nothing(framework: nn.Module, views: Tensor, ids: Tensor) -> None:
    """Neither a step with a loss that is not finite, nor one in evaluation mode, changes the
    state."""
    before = {name: value.clone() for name, value in framework.state_dict().items()}
    assert framework(views * torch.nan, ids).isnan()
    framework.eval()
    framework(views, ids)
    assert all(torch.equal(value, before[name]) for name, value in framework.state_dict().items())
