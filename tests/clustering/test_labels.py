"""The labels of all samples: before and after a refresh, saved and loaded, and equal on all
ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk.clustering import PseudoLabels, kmeans
from tests.ranks import end_rank, spawn


def features(seed: int, number: int = 60, dim: int = 4) -> Tensor:
    return torch.randn(number, dim, generator=torch.Generator().manual_seed(seed))


def made(**changed: object) -> PseudoLabels:
    arguments: dict[str, object] = {"num_samples": 60, "num_clusters": (5, 9), "seed": 3}
    return PseudoLabels(**{**arguments, **changed})  # type: ignore[arg-type]


def test_at_first_every_sample_is_alone() -> None:
    clusters = made()
    assert torch.equal(clusters.labels, torch.arange(60).repeat(2, 1))
    assert not clusters.refreshed
    assert not clusters.centroids.any()


def test_a_refresh_is_one_clustering_a_level() -> None:
    clusters = made()
    clusters.refresh(features(0))
    for level, number in enumerate((5, 9)):
        want = kmeans(features(0), number, seed=3 + level)
        assert torch.equal(clusters.labels[level], want.labels)
        assert torch.equal(clusters.level(level), want.centroids)
    assert clusters.refreshed


@pytest.mark.parametrize("warm", [True, False])
def test_the_second_refresh_starts_from_the_first(warm: bool) -> None:
    clusters = made(warm_start=warm)
    clusters.refresh(features(0))
    before = clusters.level(1).clone()
    clusters.refresh(features(1))
    want = (
        kmeans(features(1), 9, seed=4, init=before, iterations=5)
        if warm
        else kmeans(features(1), 9, seed=4)
    )
    assert torch.equal(clusters.labels[1], want.labels)


def test_iterations_and_points_are_those_that_were_given() -> None:
    clusters = made(iterations=1, warm_iterations=2, points_per_cluster=4)
    clusters.refresh(features(0))
    assert torch.equal(
        clusters.labels[1],
        kmeans(features(0), 9, seed=4, iterations=1, points_per_cluster=4).labels,
    )
    before = clusters.level(1).clone()
    clusters.refresh(features(1))
    want = kmeans(features(1), 9, seed=4, init=before, iterations=2, points_per_cluster=4)
    assert torch.equal(clusters.level(1), want.centroids)
    for name in ("iterations", "warm_iterations", "points_per_cluster"):
        with pytest.raises(ValueError, match=rf"`{name}` \(=0\) must be at least 1"):
            made(**{name: 0})


def test_saved_and_continued_labels_equal_uninterrupted_ones() -> None:
    whole, fresh = made(), made()
    whole.refresh(features(0))
    fresh.load_state_dict(whole.state_dict())
    for clusters in (whole, fresh):
        clusters.refresh(features(1))
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), fresh.state_dict().values(), strict=True)
    )


def test_an_unrefreshed_state_loads() -> None:
    clusters = made()
    clusters.refresh(features(0))
    clusters.load_state_dict(made().state_dict())
    assert not clusters.refreshed
    assert torch.equal(clusters.labels, torch.arange(60).repeat(2, 1))


def test_another_data_set_is_refused() -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            "`labels` has the size 2 × 60, but `levels` × `num_samples` is 2 × 61: use the same"
            " data set"
        ),
    ):
        made(num_samples=61).load_state_dict(made().state_dict())
    with pytest.raises(
        RuntimeError,
        match=(
            r"`centroids` has the size .*, but `clusters` is 13: .* the same `num_clusters` \(=\(5,"
            r" 8\)\)"
        ),
    ):
        made(num_clusters=(5, 8)).load_state_dict(made().state_dict())


def test_a_cast_for_weights_spares_the_centroids() -> None:
    clusters = made()
    clusters.refresh(features(0))
    before = clusters.centroids.clone()
    clusters.bfloat16()
    assert torch.equal(clusters.centroids, before)


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    with pytest.raises(
        ValueError,
        match=r"`num_clusters` \(=60\) must be at least 1 and below the number of samples \(60\)",
    ):
        made(num_clusters=(60,))
    with pytest.raises(ValueError, match=r"`num_clusters` \(=\(\)\) must be at least one number"):
        made(num_clusters=())
    with pytest.raises(ValueError, match=r"`features` \(=\(59, 4\)\) must be of the shape \(60, "):
        made().refresh(features(0, number=59))


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    clusters = made(seed=3 + rank)  # were each rank to cluster for itself, they would differ
    for seed in (0, 1):
        clusters.refresh(features(seed))
    torch.save(clusters.state_dict(), f"{folder}/{rank}.pt")
    end_rank()


def test_ranks_share_one_clustering(tmp_path: Path) -> None:
    spawn(_child, (str(tmp_path),), nprocs=2)
    alone = made()
    for seed in (0, 1):
        alone.refresh(features(seed))
    for rank in (0, 1):
        state = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(state[name], value) for name, value in alone.state_dict().items())


def cosine(z: Tensor, centroids: Tensor, labels: Tensor, level: int) -> Tensor:
    return torch.cosine_similarity(z, centroids[labels])


@pytest.mark.parametrize("subset", [False, True])
def test_the_most_confident_clusters_become_labels(subset: bool) -> None:
    clusters, ids = made(accepts=True), torch.arange(59, 9, -1) if subset else torch.arange(60)
    everyone = torch.arange(60)
    assert not clusters.has_labels
    assert (clusters.of(everyone) == -1).all()
    z = features(0)[ids]
    clusters.refresh(z, ids if subset else None)
    assert not clusters.has_labels, "a cluster is no label before it is accepted"
    clusters.accept(z, 0.3, cosine, ids if subset else None)
    for level, number in enumerate((5, 9)):
        found, cluster = clusters.of(everyone)[level], clusters.labels[level]
        sure = {
            int(i): float(cosine(z[k : k + 1], clusters.level(level), cluster[i].view(1), level))
            for k, i in enumerate(ids)
        }
        best = sorted(sure, key=lambda i: -sure[i])[: round(0.3 * len(ids))]
        assert sorted(best) == (found >= 0).nonzero().flatten().tolist()
        assert all(found[i] == cluster[i] for i in best)
        own = [int(x) for i, x in enumerate(clusters.distinct[level]) if i not in best]
        assert own == [number + i for i in range(60) if i not in best], "the others are alone"
    clusters.set_acceptance()
    assert not clusters.has_labels
    assert (clusters.of(everyone) == -1).all()


def test_labels_that_are_not_chosen_from_are_there_from_the_first_refresh_on() -> None:
    clusters, ids = made(), torch.tensor([[3, 9], [3, 0]])
    assert torch.equal(clusters.of(ids), torch.full((2, 2, 2), -1))
    assert len(set(clusters.distinct[0].tolist())) == 60
    clusters.refresh(features(0))
    assert torch.equal(clusters.of(ids), clusters.labels[:, ids])
    assert torch.equal(clusters.distinct, clusters.labels)
