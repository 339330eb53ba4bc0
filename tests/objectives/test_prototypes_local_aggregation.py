"""Local Aggregation: kin inside the logarithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import FNC, Oracle
from kinfolk.objectives import LocalAggregationLoss, NTXentLoss
from kinfolk.pairs import Kin, Pairs
from tests.reference import multiview
from tests.scripted import Say, Scripted, same_class

NUM_SAMPLES, T = 30, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 4


def batch(
    seed: int = 0, size: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, their ids, and a bank of unit vectors."""
    g = torch.Generator().manual_seed(seed)
    z, bank = (
        torch.randn(size, 5, generator=g, dtype=torch.float64),
        torch.randn(NUM_SAMPLES, 5, generator=g, dtype=torch.float64),
    )
    return (
        z.to(dtype),
        torch.randperm(NUM_SAMPLES, generator=g)[:size],
        torch.nn.functional.normalize(bank, dim=1).to(dtype),
    )


def pairs(z: Tensor, ids: Tensor, bank: Tensor, order: Tensor | None = None) -> Pairs:
    order = torch.arange(len(bank)) if order is None else order
    return Pairs(z, bank[order], bank[ids].unsqueeze(1), ids, order)


@pytest.mark.parametrize("block_rows", [None, 2])
def test_it_is_the_paper_s_loss_with_the_whole_bank_as_background(block_rows: int | None) -> None:
    z, ids, bank = batch()
    z.requires_grad_()
    loss = LocalAggregationLoss(temperature=T, detector=Oracle(LABELS), block_rows=block_rows).on(
        pairs(z, ids, bank)
    )
    for averaged in (False, True):  # equation 5 differs from it by a constant
        slow = multiview.la(z, ids.tolist(), bank, [LABELS.tolist()], NUM_SAMPLES, T, averaged)
        torch.testing.assert_close(
            torch.autograd.grad(loss, z, retain_graph=True)[0], torch.autograd.grad(slow, z)[0]
        )
        assert torch.isclose(loss, slow) != averaged


@pytest.mark.parametrize("action", ["eliminate", "reweight"])
def test_what_is_not_attracted_is_the_base_loss(action: Any) -> None:
    z, ids, bank = batch()
    made = [
        kind(temperature=T, detector=Oracle(LABELS), action=action).on(pairs(z, ids, bank))
        for kind in (LocalAggregationLoss, NTXentLoss)
    ]
    torch.testing.assert_close(made[0], made[1])


def test_no_close_sample_is_the_base_loss_and_all_close_is_none() -> None:
    z, ids, bank = batch()
    z.requires_grad_()
    base = NTXentLoss(temperature=T).on(pairs(z, ids, bank))
    for detector in (None, FNC(min_similarity=1.0), Oracle(torch.arange(NUM_SAMPLES))):
        torch.testing.assert_close(
            LocalAggregationLoss(temperature=T, detector=detector).on(pairs(z, ids, bank)), base
        )
    nothing = LocalAggregationLoss(
        temperature=T, detector=Oracle(torch.zeros(NUM_SAMPLES, dtype=torch.int64))
    ).on(pairs(z, ids, bank))
    (gradient,) = torch.autograd.grad(nothing, z)
    torch.testing.assert_close(nothing, torch.zeros_like(nothing))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_one_kin_near_is_enough() -> None:
    """What sets it apart from SupCon: a far kin costs nothing once another is near."""
    z, ids = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    bank = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]])
    both, near = Scripted(flag({1, 2})), Scripted(flag({1}))
    la = [
        LocalAggregationLoss(temperature=0.1, detector=detector).on(pairs(z, ids, bank)).item()
        for detector in (both, near)
    ]
    supcon = [
        NTXentLoss(temperature=0.1, detector=detector, action="attract")
        .on(pairs(z, ids, bank))
        .item()
        for detector in (both, near)
    ]
    assert la[0] == pytest.approx(la[1], abs=1e-3)
    assert supcon[0] > supcon[1] + 1


def flag(kin: set[int]) -> Say:
    """One anchor's kin by their ids."""
    return lambda row, col: Kin(torch.tensor([[int(j) in kin for j in col[0]]]))


def test_the_gradient_is_right_for_anchors_and_candidates() -> None:
    z1, z2 = (
        torch.randn(
            5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
        ).requires_grad_()
        for i in (0, 1)
    )
    loss_fn = LocalAggregationLoss(
        temperature=T, detector=Scripted(same_class(2)), block_rows=4
    ).eval()
    assert torch.autograd.gradcheck(lambda a, b: loss_fn(a, b, torch.arange(5)), (z1, z2))


def test_half_precision_at_a_low_temperature_is_computed_in_single() -> None:
    z, ids, bank = batch(dtype=torch.bfloat16)
    exact = z.double().requires_grad_()
    expected = multiview.la(
        exact,
        ids.tolist(),
        torch.nn.functional.normalize(bank.double(), dim=1),
        [LABELS.tolist()],
        NUM_SAMPLES,
        0.01,
    )
    (wanted,) = torch.autograd.grad(expected, exact)
    loss = LocalAggregationLoss(temperature=0.01, detector=Oracle(LABELS)).on(
        pairs(z.requires_grad_(), ids, bank)
    )
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z.grad, wanted.bfloat16(), rtol=2e-2, atol=1e-3)


def test_the_order_of_candidates_does_not_matter() -> None:
    z, ids, bank = batch()
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(3))
    loss_fn = LocalAggregationLoss(temperature=T, detector=Oracle(LABELS))
    torch.testing.assert_close(
        loss_fn.on(pairs(z, ids, bank)), loss_fn.on(pairs(z, ids, bank, order))
    )


def test_the_call_is_shown() -> None:
    assert repr(LocalAggregationLoss(temperature=0.07)) == "LocalAggregationLoss()"
    assert (
        repr(LocalAggregationLoss(temperature=0.07, action="eliminate"))
        == "LocalAggregationLoss(action='eliminate')"
    )
