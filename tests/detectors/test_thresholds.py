"""The exact quantile of a batch, and what a visit of "tracking" measures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.detectors import thresholds
from tests.reference import detection


@given(n=st.integers(1, 40), alpha=st.floats(0, 1), own=st.integers(0, 5), seed=st.integers(0, 50))
def test_batch_quantile_is_torch_s(n: int, alpha: float, own: int, seed: int) -> None:
    x = torch.rand(1, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    row = torch.cat((x, torch.full((1, own), -torch.inf, dtype=torch.float64)), 1)
    got = thresholds.batch_quantile(row, torch.tensor([n]), alpha).item()
    assert got == pytest.approx(torch.quantile(x, 1 - alpha).item(), abs=1e-12)
    assert got == pytest.approx(detection.quantile(row[0].tolist(), alpha), abs=1e-12)


def test_batch_quantile_with_other_numbers_in_each_row() -> None:
    inf = -torch.inf
    rows = torch.tensor([[0.1, 0.9, 0.5, inf], [0.3, inf, inf, inf], [inf, inf, inf, inf], [0.0, 0.4, 0.8, 0.2]])
    got = thresholds.batch_quantile(rows, torch.tensor([3, 1, 0, 4]), 0.5)
    assert got.tolist() == pytest.approx([0.5, 0.3, 1.0, 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_share_and_excess_equal_a_pass_over_all(dtype: torch.dtype) -> None:
    sim = (torch.rand(6, 700, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)
    sim[:, :3] = -torch.inf
    before, level, n = sim.clone(), torch.linspace(-0.9, 1.0, 6), torch.full((6,), 697)
    share, sums = thresholds.above(sim, n, level)
    excess = before.double() - level.double().unsqueeze(1)
    assert share.tolist() == pytest.approx(((excess > 0).sum(1) / 697).tolist())
    assert sums.tolist() == pytest.approx((excess.clamp(min=0).sum(1) / 697).tolist(), rel=1e-5, abs=1e-9)
    assert torch.equal(sim, before)


@pytest.mark.parametrize("width", [40, 5000, 20_000])
def test_mean_and_spread_are_those_of_the_negatives(width: int) -> None:
    sim = 0.97 + 0.001 * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    sim[:, :7], sim[3] = -torch.inf, -torch.inf
    mean, spread = thresholds.moments(sim, torch.tensor([width - 7] * 3 + [0]))
    others = sim[:3, 7:].double()
    wanted = others.mean(1, keepdim=True)
    exact = width < 10_000  # of more, every few are looked at
    assert mean[:3].tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-6 if exact else 1e-4)
    assert spread[:3].tolist() == pytest.approx((others - wanted).relu().mean(1).tolist(), rel=1e-3 if exact else 0.1)
    assert mean[3].isnan()
    assert spread[3].isnan()


def test_gains_are_numbers_for_a_number_and_the_same_for_a_tensor() -> None:
    one, each = thresholds.gains(0.01, 511), thresholds.gains(torch.full((3,), 0.01, dtype=torch.float64), 511)
    for name, value in vars(one).items():
        assert torch.as_tensor(getattr(each, name)).expand(3).tolist() == pytest.approx([value] * 3)
    assert one.weight == pytest.approx(5.11 / 11.11)


def test_batch_quantile_with_an_alpha_for_each_row() -> None:
    rows = torch.rand(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    got = thresholds.batch_quantile(rows, torch.full((3,), 50), alpha)
    assert got.tolist() == pytest.approx(
        [thresholds.batch_quantile(rows[[i]], torch.tensor([50]), alpha[i].item()).item() for i in range(3)]
    )
