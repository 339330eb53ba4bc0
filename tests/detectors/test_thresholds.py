"""The exact quantile of a batch, and the parts of "tracking"."""

from __future__ import annotations

from statistics import NormalDist

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
    rows = torch.tensor(
        [[0.1, 0.9, 0.5, inf], [0.3, inf, inf, inf], [inf, inf, inf, inf], [0.0, 0.4, 0.8, 0.2]]
    )
    got = thresholds.batch_quantile(rows, torch.tensor([3, 1, 0, 4]), 0.5)
    assert got.tolist() == pytest.approx([0.5, 0.3, 1.0, 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_share_above_a_level(dtype: torch.dtype) -> None:
    sim = (torch.rand(6, 700, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)
    sim[:, :3] = -torch.inf
    before, level, n = sim.clone(), torch.linspace(-0.9, 1.0, 6), torch.full((6,), 697)
    share = thresholds.share_above(sim.unsqueeze(1), n, level)
    assert share.tolist() == pytest.approx(
        ((sim > level.to(dtype).unsqueeze(1)).sum(1) / 697).tolist()
    )
    assert torch.equal(sim, before)


@pytest.mark.parametrize("width", [40, 5000, 20_000])
def test_mean_and_spread_are_those_of_the_negatives(width: int) -> None:
    sim = 0.97 + 0.001 * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    sim[:, :7], sim[3] = -torch.inf, -torch.inf
    mean, spread, _ = thresholds.moments(sim.unsqueeze(1), torch.tensor([width - 7] * 3 + [0]))
    others = sim[:3, 7:].double()
    wanted = others.mean(1, keepdim=True)
    exact = width < 8000  # of more, every few are read
    assert mean[:3].tolist() == pytest.approx(
        wanted.flatten().tolist(), abs=1e-6 if exact else 1e-4
    )
    assert spread[:3].tolist() == pytest.approx(
        (others - wanted).relu().mean(1).tolist(), rel=1e-3 if exact else 0.1
    )
    assert mean[3].isnan()
    assert spread[3].isnan()


def test_mean_and_spread_of_candidates_that_are_sorted_by_class() -> None:
    """As those of a bank may be."""
    g = torch.Generator().manual_seed(0)
    sim = 0.3 * torch.randn(6, 100, generator=g).repeat_interleave(200, 1) + 0.1 * torch.randn(
        6, 20_000, generator=g
    )
    mean, spread, _ = thresholds.moments(sim.unsqueeze(1), torch.full((6,), 20_000))
    torch.testing.assert_close(mean, sim.mean(1), atol=0.02, rtol=0)
    torch.testing.assert_close(
        spread, (sim - sim.mean(1, keepdim=True)).relu().mean(1), atol=0, rtol=0.05
    )


@pytest.mark.parametrize("alpha", [0.3, 0.01, 1e-4])
def test_the_start_is_that_of_a_normal_distribution(alpha: float) -> None:
    """In units of its spread, the mean of x₊, which is the density at 0."""
    normal = NormalDist()
    level = normal.inv_cdf(1 - alpha)
    place, tail = thresholds.normal(alpha)
    assert place == pytest.approx(level / normal.pdf(0), rel=1e-6)
    assert tail == pytest.approx((normal.pdf(level) / alpha - level) / normal.pdf(0), rel=1e-4)


@pytest.mark.parametrize("expected", [0.2, 1.0, 5.0, 100.0])
def test_steps_cancel_where_the_mean_of_the_flags_is_as_expected(expected: float) -> None:
    flags = torch.poisson(
        torch.full((200_000,), expected), generator=torch.Generator().manual_seed(0)
    )
    steps = thresholds.step(flags, torch.tensor(expected))
    assert steps.mean().item() == pytest.approx(0, abs=0.01)
    assert thresholds.step(torch.tensor(1e6), torch.tensor(expected)) == steps.new_tensor(
        float("inf")
    ).clamp(max=thresholds._LARGEST)


def test_a_change_within_the_noise_is_averaged_and_a_jump_is_followed() -> None:
    def follow(mean: float, spread: float, *now: float) -> list[float]:
        old, seen = torch.tensor([[mean], [spread]]), torch.tensor(now).unsqueeze(1)
        return [x.item() for x in thresholds.follow(old[0], old[1], (seen[0], seen[1], seen[2]))]

    small, large = (follow(0.3, 0.04, 0.3 + by, 0.04, 400.0)[0] for by in (0.002, 0.5))
    assert 0.3 < small < 0.301
    assert large == pytest.approx(0.8, abs=0.025)
    assert follow(0.0, 0.0, 0.7, 0.1, 50.0) == pytest.approx([0.7, 0.1])


@pytest.mark.parametrize("width", [300, 9000])
def test_a_visit_is_one_graph(width: int) -> None:
    sim = 0.3 + 0.1 * torch.randn(4, 1, width, generator=torch.Generator().manual_seed(0))
    state, n, drift = (
        torch.tensor([[1.0, 5.8, 0.3, 0.04]]).repeat(4, 1),
        torch.full((4,), width),
        torch.tensor(0.1),
    )
    graph = torch.compile(thresholds.track, dynamic=True, fullgraph=True, backend="eager")
    for got, want in zip(
        graph(sim, n, state, drift, 0.01, 0.85),
        thresholds.track(sim, n, state, drift, 0.01, 0.85),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
