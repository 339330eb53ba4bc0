from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import Components, Oracle
from kinfolk.detectors.components import components
from kinfolk.objectives import NTXent
from kinfolk.pairs import LEFT_OUT, Block


def searched(z: Tensor, ids: list[int]) -> list[set[int]]:
    """The components as sets of sample ids, by a search along the links of a graph of samples."""
    samples = sorted(set(ids))
    links: dict[int, set[int]] = {sample: set() for sample in samples}
    for one in samples:
        near = {
            other: max(float(z[i] @ z[j]) for i in range(len(ids)) if ids[i] == one for j in range(len(ids)) if ids[j] == other)
            for other in samples
            if other != one
        }
        nearest = max(near, key=lambda other: near[other])
        links[one].add(nearest)
        links[nearest].add(one)
    found, left = [], set(samples)
    while left:
        reached, frontier = set[int](), [left.pop()]
        while frontier:
            one = frontier.pop()
            reached.add(one)
            frontier += [other for other in links[one] if other not in reached]
        left -= reached
        found.append(reached)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_equals_a_search_along_the_links(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(40, 3, dtype=torch.float64, generator=g), dim=1)
    ids = torch.randint(0, 25, (40,), generator=g)
    key = components(z, ids)
    parts: dict[int, set[int]] = {}
    for label, sample in zip(key.tolist(), ids.tolist(), strict=True):
        parts.setdefault(label, set()).add(sample)
    assert sorted(map(sorted, parts.values())) == sorted(map(sorted, searched(z, ids.tolist())))


def test_equal_similarities_leave_no_one_out() -> None:
    assert len(set(components(torch.ones(9, 2), torch.arange(9)).tolist())) == 1
    assert components(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("block_rows", [None, 3])
def test_attracts_the_component_and_nothing_else(block_rows: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(8, 4, dtype=torch.float64, generator=g) for _ in range(2))
    z = F.normalize(torch.stack((z1, z2), 1).flatten(0, 1), dim=1)
    key = components(z, torch.arange(8).repeat_interleave(2))[::2]
    assert 1 < len(set(key.tolist())) < 8
    loss_fn = NTXent(0.3, detector=Components(), action="attract", block_rows=block_rows)
    expected = NTXent(0.3, detector=Oracle(key), action="attract")(z1, z2, torch.arange(8))
    torch.testing.assert_close(loss_fn(z1, z2, torch.arange(8)), expected)


def test_an_anchor_outside_the_candidates_joins_the_nearest() -> None:
    queue = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    anchors = torch.tensor([[0.2, 0.8], [0.8, 0.2]])
    block = Block(anchors @ queue.T, torch.tensor([7, 8]), torch.arange(4), 1, torch.full((2,), 4), candidates_CD=queue)
    (roles,) = Components().find(block).levels
    assert roles.kin is not None
    assert roles.kin.mask(block.sim_RC).tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    own = Block(torch.full((1, 4), LEFT_OUT), torch.tensor([0]), torch.zeros(4, dtype=torch.int64), 1, torch.zeros(1), candidates_CD=queue)
    assert len(Components().find(own).levels) == 1


def test_candidates_written_in_place_are_looked_at_again() -> None:
    bank, detector = torch.eye(4), Components()
    ids, number = torch.tensor([9]), torch.full((1,), 4)
    masks = []
    for rows in ([0, 0, 1, 1], [0, 1, 0, 1]):
        bank.copy_(torch.eye(4)[rows])
        (roles,) = detector.find(Block(bank[:1] @ bank.T, ids, torch.arange(4), 1, number, candidates_CD=bank)).levels
        assert roles.kin is not None
        masks.append(roles.kin.mask(bank[:1]).tolist())
    assert masks[0] != masks[1]


def test_a_copy_remembers_no_batch() -> None:
    detector = Components()
    NTXent(0.3, detector=detector)(torch.eye(4), torch.eye(4))
    assert detector._last is not None
    assert copy.deepcopy(detector)._last is None
