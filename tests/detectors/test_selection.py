"""Order statistics equal a sort: ties, what is left out, tiny and large rows, and bounds that miss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.detectors import selection as order
from kinfolk.pairs import LEFT_OUT


def check(sim: Tensor, place: Tensor) -> None:
    (found,), wanted = order.cut(sim, place), sim.sort(1).values.gather(1, place.unsqueeze(1))
    assert torch.equal(found.value_R, wanted.squeeze(1))
    assert torch.equal(found.below_R, (sim < wanted).sum(1))


@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), columns=st.integers(1, 40), levels=st.integers(1, 6))
def test_small_rows_with_ties(seed: int, rows: int, columns: int, levels: int) -> None:
    g = torch.Generator().manual_seed(seed)
    sim = torch.randint(-levels, levels, (rows, columns), generator=g) / 8
    sim[torch.rand(rows, columns, generator=g) < 0.2] = LEFT_OUT
    check(sim, torch.randint(columns, (rows,), generator=g))
    check(sim, torch.full((rows,), columns // 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_large_rows(share: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    sim = torch.randn(7, 20_001, generator=g, dtype=torch.float64).to(dtype)
    sim[:, 5:9] = LEFT_OUT
    check(sim, torch.full((7,), int(share * 20_001)))
    check(sim, (torch.full((7,), int(share * 20_001)) + torch.tensor([0, 1, 2, -2, 3, 0, 0])).clamp(0, 20_000))
    check(sim, torch.arange(7) * 2_800)  # each row another place


def kinds(sim: Tensor) -> dict[str, Tensor]:
    few = (sim * 2).round() / 2
    spiked = sim.clone()
    spiked[:, order.sampled(torch.arange(sim.shape[1]).float().unsqueeze(0), 2048).long()[0]] += 100  # the sample sees another distribution
    return {"sorted": sim.sort(1).values, "constant": torch.ones_like(sim), "few values": few, "misleading sample": spiked}


@pytest.mark.parametrize("kind", ["sorted", "constant", "few values", "misleading sample"])
@pytest.mark.parametrize("share", [0.02, 0.9, 0.999])
def test_rows_that_are_hard_to_bracket(kind: str, share: float) -> None:
    sim = kinds(torch.randn(4, 10_000, generator=torch.Generator().manual_seed(1)))[kind]
    check(sim, torch.full((4,), int(share * 10_000)))


def test_a_sample_is_spread_over_all_columns_and_each_turn_takes_others() -> None:
    columns = torch.arange(10_000.0).unsqueeze(0)
    first, second = (order.sampled(columns, 2048, turn) for turn in (0, 1))
    assert first.shape == second.shape == (1, 2048)
    assert not torch.isin(first, second).any()
    assert first.max() > 9_000
    assert order.sampled(columns, 10_000) is columns
    together = torch.cat([order.sampled(columns, 2048, turn) for turn in range(63)], 1)
    assert len(torch.unique(together)) > 9_900


def test_no_rows() -> None:
    assert order.cut(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))[0].value_R.shape == (0,)


def test_several_places_at_once() -> None:
    sim, places = torch.randn(5, 9_000, generator=torch.Generator().manual_seed(2)), (torch.full((5,), 8_100), torch.full((5,), 30))
    for found, place in zip(order.cut(sim, *places), places, strict=True):
        assert torch.equal(found.value_R, order.cut(sim, place)[0].value_R)
        assert torch.equal(found.below_R, place)
