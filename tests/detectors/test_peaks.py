from __future__ import annotations

import pytest
import torch

from kinfolk.detectors.peaks import Peaks

LEVEL, SCALE = torch.linspace(-0.9, 0.9, 6), torch.linspace(0.01, 0.5, 6)


def similarities(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    sim = (torch.rand(6, 700, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)
    sim[:, :3] = -torch.inf
    return sim


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_number_and_height_equal_a_pass_over_all(dtype: torch.dtype) -> None:
    sim = similarities(dtype)
    peaks = Peaks.above(sim, LEVEL - 0.2)
    excess = sim.double() - LEVEL.double().unsqueeze(1)
    number, height = peaks.measure(LEVEL, SCALE)
    assert number.tolist() == (excess > 0).sum(1).tolist()
    want = (excess.clamp(min=0) / SCALE.unsqueeze(1)).clamp(max=1).sum(1)
    assert height.tolist() == pytest.approx(want.tolist(), rel=2e-3, abs=1e-2)


@pytest.mark.parametrize("shift", [0.3, 0.0, -0.1, -0.5])
@pytest.mark.parametrize("candidates", [700, 699, 5, 4, 1])
def test_places_are_those_above_whether_the_level_is_over_or_under_the_floor(shift: float, candidates: int) -> None:
    sim = similarities()[:, -candidates:]
    level = LEVEL + shift * torch.tensor([1.0, 0.0, 1.0, -1.0, 1.0, 1.0])
    rows, cols = Peaks.above(sim, LEVEL - 0.2).places(level)
    found = torch.zeros_like(sim, dtype=torch.int64)
    found.index_put_((rows, cols), torch.tensor(1), accumulate=True)
    assert torch.equal(found, (sim > level.unsqueeze(1)).long())


def test_nothing_is_above_an_infinite_level() -> None:
    rows, _ = Peaks.above(similarities(), LEVEL).places(torch.full((6,), torch.inf))
    assert len(rows) == 0
