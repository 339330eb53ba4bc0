"""The prototype term against the loops over its equation, and where it could break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.objectives.prototypes import proto_nce, prototype_nce
from tests.reference import prototypes as slow


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    anchors = torch.randn(6, 4, dtype=torch.float64, generator=g).requires_grad_()
    prototypes = 3 * torch.randn(5, 4, dtype=torch.float64, generator=g)
    phi = 0.1 + torch.rand(5, dtype=torch.float64, generator=g)
    return anchors, prototypes, phi, torch.tensor([0, 3, 3, -1, 4, 2])


@pytest.mark.parametrize("drawn", [None, [1, 3], [0, 1, 2, 3, 4]])
def test_it_is_equation_11(drawn: list[int] | None) -> None:
    anchors, prototypes, phi, labels = case()
    chosen = None if drawn is None else torch.tensor(drawn)
    loss = prototype_nce(anchors, prototypes, phi, labels, chosen)
    expected = slow.prototype_term(anchors, prototypes, phi.tolist(), labels.tolist(), drawn)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, anchors), torch.autograd.grad(expected, anchors)
    )
    if drawn is not None and len(drawn) == 5:
        torch.testing.assert_close(loss, prototype_nce(anchors, prototypes, phi, labels))


def test_the_gradient_is_right() -> None:
    anchors, prototypes, phi, labels = case()
    assert torch.autograd.gradcheck(lambda x: prototype_nce(x, prototypes, phi, labels), (anchors,))
    levels = [(prototypes, phi, labels), (prototypes[:3], phi[:3], labels.clamp(max=2))]
    assert torch.autograd.gradcheck(lambda x: proto_nce(x, levels), (anchors,))


def test_the_mean_over_levels() -> None:
    anchors, prototypes, phi, labels = case()
    levels = [(prototypes, phi, labels), (prototypes[:3], phi[:3], labels.clamp(max=2))]
    expected = [
        slow.prototype_term(anchors, c, phi.tolist(), labels.tolist()) for c, phi, labels in levels
    ]
    torch.testing.assert_close(proto_nce(anchors, levels), torch.stack(expected).mean())


def test_permuting_the_prototypes_changes_nothing() -> None:
    anchors, prototypes, phi, labels = case()
    order = torch.tensor([4, 2, 0, 1, 3])
    renamed = torch.argsort(order)[labels.clamp(min=0)].where(labels >= 0, -1)
    moved = prototype_nce(anchors, prototypes[order], phi[order], renamed)
    torch.testing.assert_close(moved, prototype_nce(anchors, prototypes, phi, labels))


def test_an_empty_cluster_is_no_negative() -> None:
    anchors, prototypes, phi, labels = case()
    phi[1] = 0
    others = torch.tensor([0, 2, 3, 4])
    loss = prototype_nce(anchors, prototypes, phi, labels)
    torch.testing.assert_close(loss, prototype_nce(anchors, prototypes, phi, labels, others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_temperature_and_alone(dtype: torch.dtype) -> None:
    anchors, prototypes, phi, labels = case()
    z = anchors.detach().to(dtype).requires_grad_()
    exact, cold = z.detach().double().requires_grad_(), phi * 0.01
    for few in (None, [3]):
        loss = prototype_nce(
            z, prototypes.float(), cold.float(), labels, None if few is None else torch.tensor(few)
        )
        (gradient,) = torch.autograd.grad(loss, z)
        expected = slow.prototype_term(exact, prototypes, cold.tolist(), labels.tolist(), few)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
        (wanted,) = torch.autograd.grad(expected, exact)
        torch.testing.assert_close(gradient.double(), wanted, rtol=2e-2, atol=1e-2)
    assert prototype_nce(z, prototypes.float(), phi.float() * 1e-5, labels).isfinite(), (
        "the exponents are beyond float32"
    )
    alone = prototype_nce(
        z, prototypes[:1].float(), phi[:1].float(), torch.zeros(6, dtype=torch.int64)
    )
    assert alone == 0
    assert not torch.autograd.grad(alone, z)[0].any()
