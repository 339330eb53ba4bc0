"""Which entries of the queue become keys: of the anchor's cluster, never its own, each as likely as
any other; or the nearest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.frameworks import rcl as retrieval
from kinfolk.frameworks.rcl import RowRandom, cluster_mates
from tests.reference import relative

NUM_SAMPLES = 20
CLUSTERS = torch.arange(NUM_SAMPLES) % 3


def queue(seed: int, size: int = 30) -> Tensor:
    """Ids of a queue with several entries of a sample."""
    return torch.randint(0, NUM_SAMPLES, (size,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("number", [1, 3, 50])
@pytest.mark.parametrize("size", [1, 5, 30])
def test_mates_are_others_of_the_cluster_each_once(number: int, size: int) -> None:
    ids, held = torch.arange(NUM_SAMPLES), queue(size, size)
    chance = torch.rand(
        NUM_SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    found = cluster_mates(CLUSTERS, ids, CLUSTERS[held], held, number, chance, NUM_SAMPLES)
    assert found.shape == (NUM_SAMPLES, number)
    for i, row in enumerate(found.tolist()):
        possible = {
            place for place, j in enumerate(held.tolist()) if j != i and CLUSTERS[j] == CLUSTERS[i]
        }
        places = [place for place in row if place >= 0]
        assert set(places) <= possible
        assert len(set(places)) == len(places) == min(number, len(possible))


@pytest.mark.parametrize("number", [1, 4])
def test_every_mate_is_as_likely(number: int) -> None:
    held, anchors, draws = queue(1), torch.full((9000,), 4), 9000
    chance = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = cluster_mates(
        CLUSTERS[anchors], anchors, CLUSTERS[held], held, number, chance, NUM_SAMPLES
    )
    counts = torch.bincount(found.flatten(), minlength=len(held))
    possible = (CLUSTERS[held] == CLUSTERS[4]) & (held != 4)
    assert (counts[~possible] == 0).all()
    share = draws * number / int(possible.sum())
    assert ((counts[possible] - share).abs() < 5 * share**0.5).all()


def test_the_nearest_is_the_most_similar_of_another_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    keys, entries = (
        F.normalize(torch.randn(n, 5, generator=g, dtype=torch.float64), dim=1) for n in (7, 30)
    )
    ids, held = torch.arange(7), queue(3)
    own = [(vector, int(j)) for vector, j in zip(entries, held, strict=True)]
    for limit in (1 << 22, 60):  # all at once, and two rows at a time
        monkeypatch.setattr(retrieval, "_BLOCK_ELEMENTS", limit)
        places = retrieval.nearest(keys, ids, entries, held).squeeze(1)
        for i, place in enumerate(places.tolist()):
            assert torch.equal(entries[place], relative.nearest(keys[i], i, own))


def test_chance_is_a_function_of_seed_count_and_place() -> None:
    torch.manual_seed(0)
    one, device = RowRandom(), torch.device("cpu")
    first = one.rows(6, device)
    assert torch.equal(first, one.rows(6, device)), "reading draws nothing"
    one.advance()
    assert not torch.equal(first, one.rows(6, device))
    other = RowRandom()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.rows(6, device), one.rows(6, device))


def test_the_nearest_in_mixed_precision_is_the_nearest() -> None:
    keys, support = (
        F.normalize(torch.randn(size, 16, generator=torch.Generator().manual_seed(size)), dim=1)
        for size in (64, 4096)
    )
    ids, others = torch.arange(64), torch.arange(4096) + 64
    plain = retrieval.nearest(keys, ids, support, others)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(retrieval.nearest(keys, ids, support, others), plain)
