"""Split and merge decisions against slow loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.clustering.hierarchy_update import (
    TEMPERATURE,
    Level,
    Rings,
    components,
    merged,
    peaks,
    possibility,
    propagate,
    select_units,
    split,
)
from tests.reference import hierarchy as slow


@given(seed=st.integers(0, 10**6), parts=st.integers(2, 4), duplicates=st.booleans())
@settings(max_examples=60, deadline=None)
def test_split_equals_the_loop(seed: int, parts: int, duplicates: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    centre = F.normalize(torch.randn(5, 7, 3, generator=g, dtype=torch.float64), dim=2)
    if duplicates:
        centre[:, 3] = centre[:, 2]
    number = torch.randint(1, 8, (5,), generator=g)
    rest = torch.rand(5, generator=g) < 0.5
    valid = torch.arange(7) < number.unsqueeze(1)
    found = split(centre, valid, rest, parts, "centres")
    for k in range(5):
        n = int(number[k])
        assert found[k, :n].tolist() == slow.density_peaks(centre[k, :n].tolist(), parts, bool(rest[k]))


@given(seed=st.integers(0, 10**6), number=st.integers(1, 40), similarity=st.sampled_from([-0.5, 0.3, 0.8, 0.99]))
@settings(max_examples=60, deadline=None)
def test_merge_equals_the_loop(seed: int, number: int, similarity: float) -> None:
    g = torch.Generator().manual_seed(seed)
    centre = F.normalize(torch.randn(number, 3, generator=g, dtype=torch.float64), dim=1)
    border = torch.randint(0, 4, (number,), generator=g).sort().values
    assert merged(centre, border, similarity, "centres").tolist() == slow.merge(centre.tolist(), border.tolist(), similarity)


def test_merge_in_chunks_equals_the_whole() -> None:
    g = torch.Generator().manual_seed(0)
    centre = F.normalize(torch.randn(900, 4, generator=g), dim=1)
    border = torch.randint(0, 40, (900,), generator=g).sort().values
    found = merged(centre, border, 0.9, "centres")
    alike = (centre @ centre.T > 0.9) & (border.unsqueeze(0) == border.unsqueeze(1))
    assert found.tolist() == components(alike.triu(1).nonzero(), 900).tolist()


def test_components_of_a_long_chain() -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    chain = torch.stack((order[:-1], order[1:]), 1)
    assert components(chain, 501).tolist() == [0] * 500 + [500]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_propagation_equals_stepping(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    centre = F.normalize(torch.randn(6, 3, generator=g, dtype=torch.float64), dim=1)
    sim = centre @ centre.T
    weights = ((sim - sim.triu(1).add(torch.tril(torch.full((6, 6), -2.0))).max()) / TEMPERATURE).exp().tolist()
    proto = torch.tensor([[4, 1]])
    found = propagate(sim.unsqueeze(0), torch.ones(1, 6, dtype=torch.bool), proto)[0]
    for row, label in zip(found, (4, 1), strict=True):
        assert row.tolist() == pytest.approx(slow.spread(weights, label), abs=1e-6)


def test_two_alone_propagate_as_their_centres_say_and_a_third_helps() -> None:
    for cos, wanted in ((0.69, False), (0.71, True)):
        sim = torch.tensor([[1.0, cos], [cos, 1.0]], dtype=torch.float64)
        assert (possibility(sim, torch.ones(2, 2, dtype=torch.bool), 0.7)[0, 1] > 0.5).item() is wanted
    sim = torch.tensor([[1.0, 0.65, 0.9], [0.65, 1.0, 0.9], [0.9, 0.9, 1.0]], dtype=torch.float64)
    assert possibility(sim, torch.ones(3, 3, dtype=torch.bool), 0.7)[0, 1] > 0.5
    apart = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    assert possibility(sim, apart, 0.7)[0, 1] < 0.5


def test_of_a_large_cluster_the_touched_units_are_looked_at_first() -> None:
    N = 20
    parent = torch.tensor([0] * 12 + [1] * 8)
    rings = Rings(torch.zeros(N).long(), torch.zeros(N).long(), torch.zeros(N).long(), torch.zeros(N).long())
    rings.rebuild(parent, N)
    level = Level(rings, torch.zeros(N, 1), parent, rings, torch.zeros(N, 1), torch.zeros(N).long())
    unit, valid, rest = select_units(level, torch.tensor([1, 5, 9, 14]), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1]), 8)
    assert rest.tolist() == [True, False]
    assert valid.all()
    assert unit[0, :3].tolist() == [1, 5, 9]
    assert len(set(unit[0].tolist())) == 8
    assert set(unit[0].tolist()) <= set(range(12))
    assert set(unit[1].tolist()) == set(range(12, 20))
    unit, valid, rest = select_units(level, torch.tensor([1, 5, 9, 14]), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1]), 2)
    assert unit[0].tolist() == [1, 5]


@pytest.mark.parametrize("place", [0, 1])
def test_rounding_does_not_decide_which_of_two_units_is_the_prototype(place: int) -> None:
    sim = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]], dtype=torch.float64)
    sim[0, place, place] -= 1e-15
    sim[0, place, 1 - place] -= 1e-15
    prototypes, known = peaks(sim, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, dtype=torch.bool), parts=3)
    assert prototypes[0, :2].tolist() == [0, 1]
    assert known[0].tolist() == [True, True, False]
