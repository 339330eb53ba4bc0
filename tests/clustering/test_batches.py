"""Batches by clusters: each sample once, half of a cluster and half of others, whatever the
clusters are like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.frameworks.spcl import cluster_pair_batches


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS = {
    "equal": torch.arange(400) % 10,
    "tiny": torch.arange(400) // 2,
    "single": torch.arange(400),
    "two": torch.arange(400) % 2,
    "gaps": (torch.arange(400) % 7) * 1000 + 5,
    "dominating": (torch.arange(400) % 10 == 0).long() * torch.arange(400),
    "one": torch.zeros(400, dtype=torch.int64),
    "skewed": torch.arange(400).sqrt().long(),
    "negative": torch.where(torch.arange(400) < 100, -1 - torch.arange(400), torch.arange(400) % 4),
}


@pytest.mark.parametrize("size", [2, 3, 37, 64, 399, 400])
def test_every_sample_once_but_for_the_last_few(size: int) -> None:
    for kind in KINDS:
        order = cluster_pair_batches(KINDS[kind], size, draw())
        assert len(order) == 400 // size * size
        assert len(set(order.tolist())) == len(order), (
            "between zero and one visits; fewer than a batch is left out"
        )
        assert 0 <= order.min() <= order.max() < 400


def test_all_samples_are_visited_over_epochs() -> None:
    visits = torch.zeros(400)
    for epoch in range(40):
        visits[cluster_pair_batches(KINDS["skewed"], 64, draw(epoch))] += 1
    assert visits.min() > 20
    assert visits.mean() == 40 * 384 / 400


def halves(labels: Tensor, size: int, seed: int = 0) -> list[dict[int, int]]:
    """How often each cluster is in each batch."""
    batches = labels[cluster_pair_batches(labels, size, draw(seed))].view(-1, size)
    return [{int(k): int((batch == k).sum()) for k in batch.unique()} for batch in batches]


def test_half_of_a_batch_is_one_cluster_and_the_other_half_is_not() -> None:
    counts = halves(torch.arange(2000) % 8, 50)
    assert len(counts) == 40
    assert all(max(each.values()) == 25 for each in counts)
    assert all(len(each) > 4 for each in counts), "the others are of any clusters"
    assert len({max(each, key=lambda k: each[k]) for each in counts}) > 4, (
        "all clusters have their turn"
    )


def test_two_clusters_are_halved() -> None:
    assert all(set(each.values()) == {25} for each in halves(torch.arange(2000) % 2, 50, seed=1))


def test_tiny_clusters_stay_together() -> None:
    """Clusters of seven, thirty to a batch: four whole ones and a part of a fifth, and fifteen
    others at random."""
    labels = torch.arange(2100) // 7
    for each in halves(labels, 60):
        together = sorted(each.values(), reverse=True)
        assert sum(together[:5]) >= 28


def test_a_dominating_cluster_leaves_room_for_all_others() -> None:
    labels = (torch.arange(1000) % 10 == 0).long()
    counts = halves(labels, 50)
    assert sum(each.get(1, 0) for each in counts) == 100
    assert sum(1 for each in counts if len(each) == 2) > 10


def test_places_in_a_batch_are_random() -> None:
    """So that a rank's part has some of both halves."""
    labels = torch.arange(2000) % 8
    batches = labels[cluster_pair_batches(labels, 50, draw())].view(-1, 50)
    anchor = batches.mode(1).values.unsqueeze(1)
    shares = (batches[:, :25] == anchor).double().mean(1)
    assert 0.4 < shares.mean() < 0.6
    assert shares.max() < 0.9


def test_it_is_a_function_of_labels_and_generator() -> None:
    labels, renamed = KINDS["skewed"], KINDS["skewed"] * 3 - 40
    first = cluster_pair_batches(labels, 64, draw(1))
    assert torch.equal(cluster_pair_batches(labels, 64, draw(1)), first)
    assert torch.equal(cluster_pair_batches(renamed, 64, draw(1)), first)
    assert not torch.equal(cluster_pair_batches(labels, 64, draw(2)), first)
    assert not torch.equal(cluster_pair_batches(labels.flip(0), 64, draw(1)), first)


def test_what_cannot_be_is_refused() -> None:
    for size in (1, 401):
        with pytest.raises(
            ValueError,
            match=(
                rf"`batch_size` \(={size}\) must be at least 2 and at most the number of samples"
                r" \(=400\)"
            ),
        ):
            cluster_pair_batches(KINDS["equal"], size, draw())
