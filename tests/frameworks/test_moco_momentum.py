"""The momentum copy: it follows, and is trained in no other way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kinfolk.frameworks import NNCLR, RCL, MoCo
from kinfolk.frameworks.moco import MomentumCopy
from kinfolk.models import projection_head
from kinfolk.optimizers import build_optimizer


def test_the_momentum_copy_follows_the_weights() -> None:
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 2)
    copy = MomentumCopy(encoder, head, 0.75)
    x, first = torch.randn(5, 3), [p.detach().clone() for p in copy.parameters()]
    assert torch.equal(copy(x), head(encoder(x)))
    with torch.no_grad():
        for param in (*encoder.parameters(), *head.parameters()):
            param.add_(1.0)
    for step in range(1, 4):
        copy.follow(encoder, head)
        for slow, start in zip(copy.parameters(), first, strict=True):
            torch.testing.assert_close(slow.detach(), start + 1 - 0.75**step)
    assert not copy(x).requires_grad


def test_it_is_not_the_optimiser_s() -> None:
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), projection_head(4, 4, 2)
    framework = MoCo(encoder, head, num_samples=20, queue_size=8)
    optimizer = build_optimizer("sgd", framework, 0.1, weight_decay=1e-4)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for part in (encoder, head) for p in part.parameters()}
    before = [p.clone() for p in framework.slow.parameters()]
    framework(torch.randn(2, 6, 3, 2, 2), torch.arange(6)).backward()
    optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(before, framework.slow.parameters(), strict=True)
    ), "it waits for `after_step`"
    assert all(p.grad is None for p in framework.slow.parameters())
    framework.after_step()
    assert not all(
        torch.equal(a, b) for a, b in zip(before, framework.slow.parameters(), strict=True)
    )


def test_its_norms_keep_their_own_statistics() -> None:
    head = projection_head(4, 4, 2)
    copy = MomentumCopy(nn.Identity(), head, 0.5)
    copy(torch.randn(16, 4) + 5)
    means = [module.running_mean for module in copy.modules() if isinstance(module, nn.BatchNorm1d)]
    assert all(mean is not None and mean.abs().sum() > 0 for mean in means)
    before = {name: value.clone() for name, value in copy.named_buffers()}
    copy.follow(nn.Identity(), head)
    assert all(torch.equal(value, before[name]) for name, value in copy.named_buffers())


def test_the_cosine_rises_from_the_momentum_to_one() -> None:
    """1 − (1 − m) (cos(π k / K) + 1) / 2, section 3.3 of BYOL."""
    start, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    constant, rising = (
        MomentumCopy(start, nn.Identity(), 0.9),
        MomentumCopy(start, nn.Identity(), 0.9, "cosine"),
    )
    for epoch, expected in ((0, 0.9), (1, 0.925), (3, 1.0), (2, 0.975)):
        for slow in (constant, rising):
            slow.set_progress(epoch, 3)
        assert constant.momentum == 0.9
        assert rising.momentum == pytest.approx(expected)
    with torch.no_grad():
        followed = 0.975 * start.weight + 0.025 * fast.weight
    rising.follow(fast, nn.Identity())
    torch.testing.assert_close(rising.get_parameter("encoder.weight").detach(), followed)
    with pytest.raises(
        ValueError, match=r"`momentum_schedule` \(='linear'\) must be one of constant, cosine"
    ):
        MomentumCopy(nn.Linear(2, 2), nn.Linear(2, 2), 0.9, "linear")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MoCo, NNCLR, RCL])
def test_frameworks_move_the_momentum_of_their_copy(
    kind: Callable[..., MoCo | NNCLR | RCL],
) -> None:
    framework = kind(
        nn.Flatten(), nn.Linear(12, 4), 50, queue_size=8, momentum=0.9, momentum_schedule="cosine"
    )
    framework.set_progress(20, 40)
    assert framework.slow.momentum == pytest.approx(0.95)
