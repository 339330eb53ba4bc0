"""Close neighbours by clusters, background by similarity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import Neighbours
from kinfolk.detectors.clusters import distant
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import OUT
from tests.detectors.blocks import dropped, kin, random_block

NUM_SAMPLES = 60


def features(seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(
        torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def test_kin_share_a_cluster_in_any_clustering() -> None:
    detector = Neighbours(num_samples=NUM_SAMPLES, num_clusters=5, num_clusterings=3)
    detector.refresh(features(), 0.0)
    block = random_block(0, [3, 17, 40, 8, 59, 21, 0], num_views=2)
    found, labels = kin(detector, block), detector.clusters.labels
    rows, columns = block.row_ids.tolist(), block.candidate_ids.tolist()
    for r, i in enumerate(rows):
        for c, j in enumerate(columns):
            assert bool(found[r, c]) == (
                i != j and any(labels[level, i] == labels[level, j] for level in range(3))
            )
    assert len({tuple(level) for level in labels.tolist()}) == 3, "the clusterings differ"


def test_nothing_is_kin_before_the_first_refresh() -> None:
    assert not kin(
        Neighbours(num_samples=NUM_SAMPLES, num_clusters=5),
        random_block(0, [3, 17, 40, 8], num_views=1),
    ).any()


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`space` \(='pixels'\) must be one of projected, features"
    ):
        Neighbours(num_samples=NUM_SAMPLES, space="pixels")  # type: ignore[arg-type]


def test_an_id_outside_of_the_data_is_refused() -> None:
    detector = Neighbours(num_samples=NUM_SAMPLES, num_clusters=5)
    detector.refresh(features(), 0.0)
    ids = torch.tensor([3, -1, 40, 8])  # the last sample's clusters would be read for it
    with pytest.raises(
        ValueError, match=r"`ids` \(=-1\) must be in \[0, 60\): the number of samples of `detector`"
    ):
        NTXentLoss(detector=detector)(torch.eye(4), torch.eye(4), ids)


@pytest.mark.parametrize(("number", "columns"), [(1, 40), (7, 40), (39, 40), (300, 4000)])
def test_the_background_are_the_nearest(number: int, columns: int) -> None:
    sim = torch.randn(9, columns, generator=torch.Generator().manual_seed(number))
    sim[torch.arange(9), torch.arange(9)] = OUT
    far_RC = distant(sim, number)
    assert far_RC is not None
    for row in range(9):
        nearest = sorted(range(columns), key=lambda j: -sim[row, j].item())[:number]
        assert set((~far_RC[row]).nonzero().flatten().tolist()) == set(nearest)


def test_a_background_of_all_samples_leaves_none_out() -> None:
    sim = torch.randn(3, 10)
    assert distant(sim, None) is None
    assert distant(sim, 10) is None
    block = random_block(0, [1, 2, 3, 4], num_views=1)
    found = Neighbours(num_samples=NUM_SAMPLES, num_background=2).find(block)
    assert (~dropped(found, block)).sum(1).tolist() == [3, 3, 3, 3], "two, and the own"


def test_the_state_is_saved_and_the_clusters_go_on() -> None:
    whole, first = (
        Neighbours(num_samples=NUM_SAMPLES, num_clusters=5, num_clusterings=2) for _ in range(2)
    )
    for detector in (whole, first):
        detector.refresh(features(0), 0.0)
    again = Neighbours(num_samples=NUM_SAMPLES, num_clusters=5, num_clusterings=2)
    again.load_state_dict(first.state_dict())
    for detector in (whole, again):
        detector.refresh(features(1), 0.5)
    assert whole.state_dict().keys() == again.state_dict().keys()
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items()
    )


def test_the_default_number_of_clusters_and_the_epochs_of_refreshes() -> None:
    assert Neighbours(num_samples=86_000).num_clusters == 2000
    assert [Neighbours(num_samples=NUM_SAMPLES, every=2).due(epoch) for epoch in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    for name in ("num_clusterings", "num_background", "every"):
        with pytest.raises(ValueError, match=rf"`{name}` \(=0\) must be at least 1"):
            Neighbours(num_samples=60, num_clusters=5, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`num_clusters` \(=60\)"):
        Neighbours(num_samples=60, num_clusters=60)
