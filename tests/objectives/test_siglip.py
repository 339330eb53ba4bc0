from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kinfolk.objectives import SigLIPLoss
from kinfolk.pairs import Kin
from tests.scripted import Scripted, everybody, same_class

B = 6


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, 4, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )  # type: ignore[return-value]


def slow(
    images: Tensor, texts: Tensor, t: Tensor, b: Tensor, label: Any, weight: Any = lambda i, j: 1.0
) -> Tensor:
    """Equation 1 in loops; `label` in [−1, 1]: a label d between them stands for a share (1 + d) /
    2 of a positive."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(images)):
        for j in range(len(texts)):
            logit = images[i] / images[i].norm() @ (texts[j] / texts[j].norm()) / t + b
            share = (1 + label(i, j)) / 2
            total = total - weight(i, j) * (
                share * torch.log(torch.sigmoid(logit))
                + (1 - share) * torch.log(torch.sigmoid(-logit))
            )
    return total / len(images)


def require_equal(
    loss_fn: SigLIPLoss, ours: Tensor, label: Any, weight: Any, images: Tensor, texts: Tensor
) -> None:
    scale, bias = loss_fn.learned.logit_scale, cast(Tensor, loss_fn.bias)
    expected = slow(images, texts, torch.exp(-scale), bias, label, weight)
    torch.testing.assert_close(ours, expected)
    inputs = (images, texts, scale, bias)
    for one, other in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(one, other)


def same(i: int, j: int) -> float:
    return 1.0 if i == j else -1.0


@pytest.mark.parametrize("block_rows", [None, 4])
def test_equals_the_equation(block_rows: int | None) -> None:
    images, texts = batch()
    loss_fn = SigLIPLoss(temperature=0.3, bias=-2.0, block_rows=block_rows).double()
    require_equal(loss_fn, loss_fn(images, texts), same, lambda i, j: 1.0, images, texts)


def test_a_group_is_a_positive_for_each_of_its_texts() -> None:
    images, texts = batch()
    loss_fn = SigLIPLoss(temperature=0.3, bias=-2.0).double()
    groups = torch.tensor([0, 0, 1, -1, 1, -1])
    label = lambda i, j: 1.0 if i == j or (groups[i] == groups[j] and groups[i] >= 0) else -1.0  # noqa: E731
    require_equal(
        loss_fn, loss_fn(images, texts, group_ids=groups), label, lambda i, j: 1.0, images, texts
    )


@pytest.mark.parametrize(("action", "weight"), [("eliminate", 0.0), ("reweight", 0.25)])
def test_kin_lose_their_weight(action: Any, weight: float) -> None:
    images, texts = batch()
    loss_fn = SigLIPLoss(
        temperature=0.3,
        bias=-2.0,
        detector=Scripted(same_class(2)),
        action=action,
        kin_weight=0.25,
        block_rows=4,
    ).double()
    kin = lambda i, j: weight if i != j and i % 2 == j % 2 else 1.0  # noqa: E731
    require_equal(loss_fn, loss_fn(images, texts), same, kin, images, texts)
    assert int(loss_fn.stats.flagged) == 12


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_degrees_are_shares_of_a_positive_or_of_a_weight(action: Any) -> None:
    images, texts = batch()

    def say(row: Tensor, col: Tensor) -> Kin:
        degree = ((row + col) % 4 / 4).double()
        return Kin(degree)

    loss_fn = SigLIPLoss(temperature=0.3, bias=-2.0, detector=Scripted(say), action=action).double()

    def degree(i: int, j: int) -> float:
        return (i + j) % 4 / 4 if i != j else 0.0

    if action == "attract":
        require_equal(
            loss_fn,
            loss_fn(images, texts),
            lambda i, j: 1 if i == j else 2 * degree(i, j) - 1,
            lambda i, j: 1,
            images,
            texts,
        )
    else:
        require_equal(
            loss_fn, loss_fn(images, texts), same, lambda i, j: 1 - degree(i, j), images, texts
        )


def test_several_levels_are_the_mean_of_their_losses() -> None:
    images, texts = batch()
    says = [(same_class(2), same_class(3)), (same_class(2),), (same_class(3),)]
    both, one, two = (
        SigLIPLoss(temperature=0.3, bias=-2.0, detector=Scripted(*each), action="attract")(
            images, texts
        )
        for each in says
    )
    torch.testing.assert_close(both, (one + two) / 2)


def test_all_kin_stay_finite_and_the_pairs_alone_are_left() -> None:
    images, texts = batch()
    loss_fn = SigLIPLoss(temperature=0.3, bias=-2.0, detector=Scripted(everybody)).double()
    require_equal(loss_fn, loss_fn(images, texts), same, lambda i, j: float(i == j), images, texts)


def test_nothing_is_learned_where_it_should_not() -> None:
    images, texts = batch()
    loss_fn = SigLIPLoss(temperature=0.3, bias=-2.0, learnable=False)
    loss_fn(images, texts).backward()
    assert all(p.grad is None for p in loss_fn.parameters())
    assert images.grad is not None
    assert repr(loss_fn) == "SigLIPLoss(temperature=0.3, learnable=False)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_bits_and_a_low_temperature_stay_finite(dtype: torch.dtype) -> None:
    images, texts = (z.detach().to(dtype).requires_grad_() for z in batch())
    loss = SigLIPLoss(temperature=0.01, bias=-10.0)(images, texts)
    loss.backward()
    torch.testing.assert_close(
        loss.double(),
        SigLIPLoss(temperature=0.01, bias=-10.0).double()(images.double(), texts.double()),
        rtol=1e-3,
        atol=1e-3,
    )
    assert images.grad is not None
    assert images.grad.isfinite().all()


def test_shapes_and_settings_are_checked() -> None:
    images, texts = batch()
    with pytest.raises(ValueError, match="must have one shape"):
        SigLIPLoss()(images, texts[:2])
    with pytest.raises(ValueError, match=r"`own_weight` \(=0.5\) must be None with SigLIPLoss"):
        SigLIPLoss(detector=Scripted(everybody), action="attract", own_weight=0.5)
    assert math.isclose(SigLIPLoss(temperature=0.2).current_temperature, 0.2, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["ids", "group_ids"])
def test_ids_of_another_length_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"`{name}` \(=\(3,\)\) must have the shape \(4,\): one for each pair"
    ):
        SigLIPLoss()(torch.eye(4), torch.eye(4), **{name: torch.arange(3)})
