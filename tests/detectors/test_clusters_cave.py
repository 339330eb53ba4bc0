"""Cave: negatives of the own cluster only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kinfolk.detectors import Cave
from kinfolk.objectives import NTXentLoss
from tests.detectors.blocks import dropped, mask, random_block

FEATURES = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0]])


def refreshed() -> Cave:
    detector = Cave(num_samples=6, num_clusters=3)
    detector.refresh(FEATURES, 0.0)
    # k-means may end elsewhere with so few
    detector.clusters.labels.copy_(torch.tensor([[0, 0, 0, 1, 1, 2]]))
    return detector


def test_only_the_own_cluster_is_kept_and_who_is_alone_keeps_all() -> None:
    block = random_block(0, list(range(6)))
    found = refreshed().find(block)
    group = [0, 0, 0, 1, 1, 2]
    for i, row in enumerate(block.row_ids.tolist()):
        for j, col in enumerate(block.candidate_ids.tolist()):
            wanted = row != col and group[row] != group[col] and row != 5
            assert dropped(found, block)[i, j] == wanted
    assert not mask(found, block).any()


def test_loss_equals_the_sum_over_the_cluster() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(2, 6, 4, generator=g, dtype=torch.float64), dim=2)
    loss = NTXentLoss(temperature=0.5, detector=refreshed())(z[0], z[1], torch.arange(6))
    group, slow = [0, 0, 0, 1, 1, 2], []
    for i in range(6):
        for v in range(2):
            positive = float(z[v, i] @ z[1 - v, i]) / 0.5
            others = [j for j in range(6) if j != i and (group[j] == group[i] or i == 5)]
            total = sum(math.exp(float(z[v, i] @ z[w, j]) / 0.5) for j in others for w in range(2))
            slow.append(math.log(math.exp(positive) + total) - positive)
    assert loss.item() == pytest.approx(sum(slow) / 12, rel=1e-10)


def test_before_the_first_clustering_it_is_the_base_loss() -> None:
    z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        NTXentLoss(temperature=0.1, detector=Cave(num_samples=6, num_clusters=3))(
            z[0], z[1], torch.arange(6)
        ),
        NTXentLoss(temperature=0.1)(z[0], z[1], torch.arange(6)),
    )


def test_gradient_and_cold_coarse_input() -> None:
    z = torch.randn(
        2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: NTXentLoss(temperature=0.5, detector=refreshed())(x[0], x[1], torch.arange(6)),
        (z,),
    )
    coarse = z.detach().bfloat16().requires_grad_()
    loss = NTXentLoss(temperature=0.01, detector=refreshed()).bfloat16()(
        coarse[0], coarse[1], torch.arange(6)
    )
    loss.backward()
    assert loss.isfinite()
    assert coarse.grad is not None
    assert coarse.grad.isfinite().all()


def test_it_is_due_every_so_often_and_saved_whole() -> None:
    assert [
        epoch for epoch in range(7) if Cave(num_samples=6, num_clusters=3, every=3).due(epoch)
    ] == [0, 3, 6]
    saved, loaded, z = refreshed(), Cave(num_samples=6, num_clusters=3), torch.randn(2, 6, 4)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(
        NTXentLoss(temperature=0.1, detector=saved)(z[0], z[1], torch.arange(6)),
        NTXentLoss(temperature=0.1, detector=loaded)(z[0], z[1], torch.arange(6)),
    )
    for detector in (saved, loaded):
        detector.refresh(FEATURES.flip(0), 0.5)
    assert torch.equal(saved.clusters.labels, loaded.clusters.labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 1, "num_clusters": 1}, r"`num_samples` \(=1\) must be at least 2"),
        (
            {"num_samples": 5, "num_clusters": 5},
            r"`num_clusters` \(=5\) must be at least 1 and below",
        ),
        ({"num_samples": 5, "num_clusters": 2, "every": 0}, r"`every` \(=0\) must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_with_name_value_and_rule(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Cave(**arguments)


def test_calls_without_features_or_with_unknown_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="`features` of all samples must be given"):
        Cave(num_samples=6, num_clusters=3).refresh(None, 0.0)
    with pytest.raises(ValueError, match=r"`ids` \(=6\) must be in \[0, 6\)"):
        NTXentLoss(temperature=0.1, detector=refreshed())(
            torch.eye(7), torch.eye(7), torch.arange(7)
        )
    assert (
        repr(eval(repr(Cave(num_samples=6, num_clusters=3, every=2))))
        == "Cave(num_samples=6, num_clusters=3, every=2)"
    )


def test_candidates_of_any_shared_cluster_are_dropped() -> None:
    detector = Cave(num_samples=30, num_clusters=(3, 5))
    assert repr(detector) == "Cave(num_samples=30, num_clusters=(3, 5))"
    detector.refresh(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), 0.0)
    block = random_block(0, [3, 17, 8, 21, 0, 29], num_views=1)
    dropped_RC = dropped(detector.find(block), block)
    labels = detector.clusters.labels
    for row, i in enumerate(block.row_ids.tolist()):
        members = [
            j != i and any(level[i] == level[j] for level in labels)
            for j in block.candidate_ids.tolist()
        ]
        if any(members):
            assert (~dropped_RC[row]).tolist() == [
                member or j == i
                for j, member in zip(block.candidate_ids.tolist(), members, strict=True)
            ]
