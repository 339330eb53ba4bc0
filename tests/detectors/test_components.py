from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import Components, Oracle
from kinfolk.detectors.components import find_components
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import OUT, Block, Pairs
from tests.detectors.blocks import kin


def searched(z: Tensor, ids: list[int]) -> list[set[int]]:
    """The components as sets of sample ids, by a search along the links of a graph of samples."""
    samples = sorted(set(ids))
    links: dict[int, set[int]] = {sample: set() for sample in samples}
    for one in samples:
        near = {
            other: max(
                float(z[i] @ z[j])
                for i in range(len(ids))
                if ids[i] == one
                for j in range(len(ids))
                if ids[j] == other
            )
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
    key = find_components(z, ids)
    parts: dict[int, set[int]] = {}
    for label, sample in zip(key.tolist(), ids.tolist(), strict=True):
        parts.setdefault(label, set()).add(sample)
    assert sorted(map(sorted, parts.values())) == sorted(map(sorted, searched(z, ids.tolist())))


def test_equal_similarities_leave_no_one_out() -> None:
    assert len(set(find_components(torch.ones(9, 2), torch.arange(9)).tolist())) == 1
    assert find_components(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)).tolist() == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("block_rows", [None, 3])
def test_attracts_the_component_and_nothing_else(block_rows: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    z1, z2 = (torch.randn(8, 4, dtype=torch.float64, generator=g) for _ in range(2))
    z = F.normalize(torch.stack((z1, z2), 1).flatten(0, 1), dim=1)
    key = find_components(z, torch.arange(8).repeat_interleave(2))[::2]
    assert 1 < len(set(key.tolist())) < 8
    loss_fn = NTXentLoss(
        temperature=0.3, detector=Components(), action="attract", block_rows=block_rows
    )
    expected = NTXentLoss(temperature=0.3, detector=Oracle(key), action="attract")(
        z1, z2, torch.arange(8)
    )
    torch.testing.assert_close(loss_fn(z1, z2, torch.arange(8)), expected)


def test_an_anchor_outside_the_candidates_joins_the_nearest() -> None:
    queue = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    anchors = torch.tensor([[0.2, 0.8], [0.8, 0.2]])
    block = prepared(anchors @ queue.T, torch.tensor([7, 8]), torch.arange(4), queue)
    assert kin(Components(), block).tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    own = prepared(
        torch.full((1, 4), OUT), torch.tensor([0]), torch.zeros(4, dtype=torch.int64), queue
    )
    assert not kin(Components(), own).any()


def prepared(sim: Tensor, ids: Tensor, candidate_ids: Tensor, candidates: Tensor) -> Block:
    found = Components().prepare(candidate_ids, candidates, None)
    return Block(sim, ids, candidate_ids, 1, (sim > -2).sum(1), prepared=found)


def test_candidates_written_in_place_are_looked_at_again() -> None:
    bank, loss_fn = torch.eye(4), NTXentLoss(detector=Components(), action="attract")
    ids, flagged = torch.tensor([9]), []
    for rows in ([0, 0, 1, 1], [0, 0, 0, 0]):
        bank.copy_(torch.eye(4)[rows])
        loss_fn.on(Pairs(torch.eye(4)[:1], bank, bank[:1].unsqueeze(1), ids, torch.arange(4)))
        flagged.append(int(loss_fn.stats.flagged))
    assert flagged == [2, 4]
