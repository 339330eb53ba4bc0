from __future__ import annotations

import pytest
import torch

from kinfolk.detectors.peaks import LOOKED_AT, moments, peaks
from kinfolk.pairs import Block

LEVEL = torch.linspace(-0.9, 0.9, 6)


def block_of(dtype: torch.dtype) -> Block:
    sim = (torch.rand(6, 700, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)
    sim[:, :3] = -torch.inf
    ids = torch.arange(700)
    return Block(sim, ids[:6], ids, 1, torch.full((6,), 697))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_number_and_excess_equal_a_pass_over_all(dtype: torch.dtype) -> None:
    block = block_of(dtype)
    before = block.sim_RC.clone()
    number, sums = peaks(block, LEVEL)
    excess = before.double() - LEVEL.double().unsqueeze(1)
    assert number.tolist() == (excess > 0).sum(1).tolist()
    assert sums.tolist() == pytest.approx(excess.clamp(min=0).sum(1).tolist(), rel=1e-5)
    assert torch.equal(block.sim_RC, before)


def test_nothing_is_above_a_level_of_one() -> None:
    number, sums = peaks(block_of(torch.float32), torch.ones(6))
    assert number.tolist() == sums.tolist() == [0.0] * 6


@pytest.mark.parametrize("width", [40, LOOKED_AT, 5 * LOOKED_AT])
def test_moments_are_those_of_the_finite_entries_looked_at(width: int) -> None:
    sim = 0.97 + 0.001 * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    sim[:, :7], sim[3] = -torch.inf, -torch.inf
    mean, spread, top, number = moments(sim)
    known = sim[:3, 7:].double()
    exact = width <= LOOKED_AT
    assert number[3] == 0
    assert (number[:3] == width - 7).all() if exact else (number[:3] > LOOKED_AT - 8).all()
    assert mean[:3].tolist() == pytest.approx(known.mean(1).tolist(), abs=1e-7 if exact else 1e-4)
    below = [row[row < row.mean()] - row.mean() for row in known]
    assert spread[:3].tolist() == pytest.approx([row.square().mean().sqrt().item() for row in below], rel=1e-3 if exact else 0.1)
    assert not exact or top[:3].tolist() == sim[:3].amax(1).tolist()
