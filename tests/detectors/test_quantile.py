"""The visit's own quantile, the normal distribution's levels, and the common drift."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.detectors import quantile
from tests.reference import detection


@given(n=st.integers(1, 40), alpha=st.floats(0, 1), own=st.integers(0, 5), seed=st.integers(0, 50))
def test_batch_quantile_is_torch_s(n: int, alpha: float, own: int, seed: int) -> None:
    x = torch.rand(1, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    row = torch.cat((x, torch.full((1, own), -torch.inf, dtype=torch.float64)), 1)
    got = quantile.batch_quantile(row, torch.tensor([n]), alpha).item()
    assert got == pytest.approx(torch.quantile(x, 1 - alpha).item(), abs=1e-12)
    assert got == pytest.approx(detection.quantile(row[0].tolist(), alpha), abs=1e-12)


def test_batch_quantile_with_other_numbers_in_each_row() -> None:
    inf = -torch.inf
    rows = torch.tensor([[0.1, 0.9, 0.5, inf], [0.3, inf, inf, inf], [inf, inf, inf, inf], [0.0, 0.4, 0.8, 0.2]])
    got = quantile.batch_quantile(rows, torch.tensor([3, 1, 0, 4]), 0.5)
    assert got.tolist() == pytest.approx([0.5, 0.3, 1.0, 0.3])


def test_drift_goes_where_the_share_is_off_and_rests_where_it_is_right() -> None:
    zero, expected = torch.tensor(0.0, dtype=torch.float64), torch.tensor(200.0, dtype=torch.float64)
    assert quantile.followed(zero, expected, expected) == 0
    assert quantile.followed(zero, expected, expected * 2) > 0
    assert quantile.followed(zero, expected, expected * 0) < 0
    assert quantile.followed(zero, zero, zero) == 0
    for found in (0.0, 1e9):
        drift = zero
        for _ in range(200):
            drift = quantile.followed(drift, expected, torch.tensor(found, dtype=torch.float64))
        assert abs(drift.item()) == 2


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.3, 0.9])
def test_normal_level_and_excess(share: float) -> None:
    normal = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = quantile.normal_level(torch.tensor(share, dtype=torch.float64))
    assert NormalDist().cdf(-level.item()) == pytest.approx(share, rel=1e-6)
    if share > 1e-3:
        excess = quantile.normal_excess(torch.tensor(share, dtype=torch.float64)).item()
        assert excess == pytest.approx((normal[normal > level] - level).mean().item(), rel=0.03)


def test_batch_quantile_with_an_alpha_for_each_row() -> None:
    rows = torch.rand(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    got = quantile.batch_quantile(rows, torch.full((3,), 50), alpha)
    assert got.tolist() == pytest.approx([quantile.batch_quantile(rows[[i]], torch.tensor([50]), alpha[i].item()).item() for i in range(3)])
