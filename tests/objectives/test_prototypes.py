"""Prototype cross-entropy equals the loops over its equation, plain and symmetric, at several
numbers of prototypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.objectives.prototypes import PrototypeCrossEntropy, prototype_cross_entropy
from tests.reference import spcl as slow

LABELS = torch.tensor([[0, 3, 3, -1, 2, 1], [6, 0, 1, 1, -1, 5]])


def logits(number: int = 4, seed: int = 0) -> Tensor:
    return (
        3
        * torch.randn(
            6, number, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        ).requires_grad_()
    )


@pytest.mark.parametrize(("weight", "log_zero"), [(0.0, -4.0), (1.0, -4.0), (0.3, -9.2)])
def test_it_is_equation_4(weight: float, log_zero: float) -> None:
    x = logits()
    loss = prototype_cross_entropy(x, LABELS[0], weight, log_zero).mean()
    expected = slow.cross_entropy(x, LABELS[0].tolist(), weight, log_zero)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))


def test_the_gradient_is_right() -> None:
    assert torch.autograd.gradcheck(
        lambda x: prototype_cross_entropy(x, LABELS[0], 0.5), (logits(),)
    )


def test_several_numbers_of_prototypes_are_averaged() -> None:
    torch.manual_seed(0)
    loss_fn, h = (
        PrototypeCrossEntropy(5, (4, 7), reverse_weight=0.5).double(),
        torch.randn(6, 5, dtype=torch.float64),
    )
    first, second = loss_fn.head(h).split([4, 7], 1)
    expected = (
        slow.cross_entropy(first, LABELS[0].tolist(), 0.5)
        + slow.cross_entropy(second, LABELS[1].tolist(), 0.5)
    ) / 2
    torch.testing.assert_close(loss_fn(h, LABELS), expected)


def test_the_reverse_is_bounded_and_nothing_without_a_weight() -> None:
    sure = torch.tensor([[50.0, -50.0]])
    wrong = prototype_cross_entropy(sure, torch.tensor([1]), 1.0) - prototype_cross_entropy(
        sure, torch.tensor([1])
    )
    torch.testing.assert_close(wrong, torch.tensor([4.0]))
    assert prototype_cross_entropy(sure, torch.tensor([0]), 1.0).eq(0).all()


def test_permuting_the_prototypes_changes_nothing() -> None:
    order = torch.tensor([2, 0, 3, 1])
    renamed = order.argsort()[LABELS[0].clamp(min=0)].where(LABELS[0] >= 0, -1)
    torch.testing.assert_close(
        prototype_cross_entropy(logits()[:, order], renamed, 0.5),
        prototype_cross_entropy(logits(), LABELS[0], 0.5),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_far_off_and_without_labels(dtype: torch.dtype) -> None:
    x = (logits().detach() * 300).to(dtype).requires_grad_()
    for labels in (LABELS[0], torch.full((6,), -1)):
        loss = prototype_cross_entropy(x, labels, 1.0).mean()
        (gradient,) = torch.autograd.grad(loss, x)
        apart = x.detach().double() - x.detach().double().amax(1, keepdim=True)
        log_p = apart - apart.exp().sum(1, keepdim=True).log()
        own = log_p.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).where(labels >= 0, 0.0)
        torch.testing.assert_close(
            loss.double(), (4 * (1 - own.exp()) - own).mean(), rtol=1e-5, atol=1e-6
        )
        one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 4)
        slope = (1 + 4 * own.exp()).unsqueeze(1) * (log_p.exp() - one_hot)
        torch.testing.assert_close(
            gradient, (slope * (labels >= 0).unsqueeze(1) / 6).to(dtype), rtol=2e-2, atol=1e-6
        )


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    with pytest.raises(ValueError, match=r"`reverse_weight` \(=-1\)"):
        PrototypeCrossEntropy(4, (3,), reverse_weight=-1)
    with pytest.raises(ValueError, match=r"`log_zero` \(=0\)"):
        PrototypeCrossEntropy(4, (3,), log_zero=0)
