"""Split and merge decisions against slow loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.clustering.hierarchy_update import (
    Rings,
    components,
    merge_groups,
    peaks,
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
    found = split(centre, valid, rest, parts)
    for k in range(5):
        n = int(number[k])
        assert found[k, :n].tolist() == slow.density_peaks(
            centre[k, :n].tolist(), parts, bool(rest[k])
        )


@given(
    seed=st.integers(0, 10**6),
    number=st.integers(1, 40),
    similarity=st.sampled_from([-0.5, 0.3, 0.8, 0.99]),
)
@settings(max_examples=60, deadline=None)
def test_merge_equals_the_loop(seed: int, number: int, similarity: float) -> None:
    g = torch.Generator().manual_seed(seed)
    centre = F.normalize(torch.randn(number, 3, generator=g, dtype=torch.float64), dim=1)
    border = torch.randint(0, 4, (number,), generator=g).sort().values
    assert merge_groups(centre, border, similarity).tolist() == slow.merge(
        centre.tolist(), border.tolist(), similarity
    )


def test_merge_in_chunks_equals_the_whole() -> None:
    g = torch.Generator().manual_seed(0)
    centre = F.normalize(torch.randn(900, 4, generator=g), dim=1)
    border = torch.randint(0, 40, (900,), generator=g).sort().values
    found = merge_groups(centre, border, 0.9)
    alike = (centre @ centre.T > 0.9) & (border.unsqueeze(0) == border.unsqueeze(1))
    assert found.tolist() == components(alike.triu(1).nonzero(), 900).tolist()


def test_components_of_a_long_chain() -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    chain = torch.stack((order[:-1], order[1:]), 1)
    assert components(chain, 501).tolist() == [0] * 500 + [500]


def test_of_a_large_cluster_the_touched_units_are_looked_at_first() -> None:
    N = 20
    parent = torch.tensor([0] * 12 + [1] * 8)
    rings = Rings(*[*(torch.zeros(N).long() for _ in range(5)), torch.zeros(N, 1)])
    rings.rebuild(parent, N)
    unit, valid, rest = select_units(
        rings, torch.tensor([1, 5, 9, 14]), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1]), 8
    )
    assert rest.tolist() == [True, False]
    assert valid.all()
    assert unit[0, :3].tolist() == [1, 5, 9]
    assert len(set(unit[0].tolist())) == 8
    assert set(unit[0].tolist()) <= set(range(12))
    assert set(unit[1].tolist()) == set(range(12, 20))
    unit, valid, rest = select_units(
        rings, torch.tensor([1, 5, 9, 14]), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1]), 2
    )
    assert unit[0].tolist() == [1, 5]


@pytest.mark.parametrize("place", [0, 1])
def test_rounding_does_not_decide_which_of_two_units_is_the_prototype(place: int) -> None:
    sim = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]], dtype=torch.float64)
    sim[0, place, place] -= 1e-15
    sim[0, place, 1 - place] -= 1e-15
    prototypes, known = peaks(
        sim, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, dtype=torch.bool), parts=3
    )
    assert prototypes[0, :2].tolist() == [0, 1]
    assert known[0].tolist() == [True, True, False]
