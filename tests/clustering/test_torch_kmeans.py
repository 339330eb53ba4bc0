"""k-means in torch, as an accelerator runs it: as good as faiss, shared by ranks, and without
waiting for the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk.clustering import kmeans
from kinfolk.clustering.kmeans import Clusters, first_centroids, lloyd_iterations, torch_kmeans
from tests.clustering.test_kmeans import blobs, same_partition
from tests.collectives import collectives
from tests.pretended.device import AVAILABLE, LOG, OnDevice, on_device, pretended
from tests.ranks import end_rank, spawn

CPU = torch.device("cpu")


def in_torch(
    features: Tensor, number: int, *, seed: int = 0, shared: bool = False, **changed: Any
) -> Clusters:
    given: dict[str, Any] = {
        "init": None,
        "iterations": 20,
        "spherical": False,
        "points_per_cluster": 256,
        "device": CPU,
    }
    return torch_kmeans(features, number, seed, shared=shared, **{**given, **changed})


def inertia(features: Tensor, found: Clusters) -> float:
    return (features - found.centroids[found.labels]).double().square().sum().item()


def test_separated_groups_are_found() -> None:
    x, labels = blobs(3, 40)
    found = in_torch(x, 3)
    assert same_partition(found.labels, labels)
    for cluster in range(3):
        torch.testing.assert_close(
            found.centroids[cluster], x[found.labels == cluster].mean(0), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("spherical", [False, True])
def test_the_inertia_is_that_of_faiss(spherical: bool) -> None:
    x = torch.nn.functional.normalize(
        torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)), dim=1
    )
    found, expected = (
        in_torch(x, 40, spherical=spherical),
        kmeans(x, 40, seed=0, spherical=spherical),
    )
    assert inertia(x, found) == pytest.approx(inertia(x, expected), rel=0.01)
    if spherical:
        torch.testing.assert_close(found.centroids.norm(dim=1), torch.ones(40))


def test_a_warm_start_keeps_the_numbers_of_clusters() -> None:
    x, _ = blobs(5, 30)
    end = in_torch(x, 5)
    again = in_torch(x, 5, seed=99, init=end.centroids, iterations=1)
    assert torch.equal(again.labels, end.labels)


def test_empty_clusters_take_halves_of_the_largest() -> None:
    """All samples are nearest to the first centroid, so the others are empty after the first
    iteration."""
    x, labels = blobs(4, 50)
    start = torch.cat((x[:1], x[:1] + 1000 * torch.arange(1, 4).unsqueeze(1)))
    assert same_partition(lloyd_labels(x, start, 30), labels)


def lloyd_labels(x: Tensor, start: Tensor, iterations: int) -> Tensor:
    return torch.cdist(x, lloyd_iterations(x, start, iterations, spherical=False)).argmin(1)


def test_duplicates_and_few_points() -> None:
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]).repeat(10, 1)
    for number in (2, 3, 7, 29):
        found = in_torch(x, number)
        assert found.centroids.isfinite().all()
        assert torch.equal(found.labels[:3].repeat(10), found.labels)
    x, labels = blobs(4, 300)
    assert same_partition(in_torch(x, 4, points_per_cluster=30).labels, labels)


@pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
@pytest.mark.parametrize("most", [4 << 30, 0])
def test_features_on_the_host_are_clustered_on_the_device(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved once, or, where they are too large for that, block by block."""
    monkeypatch.setattr(sys.modules["kinfolk.clustering.kmeans"], "_RESIDENT_BYTES", most)
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(3))
    with pretended():
        found = kmeans(x, 17, seed=0, device=torch.device("cuda"))
    assert isinstance(found.labels, OnDevice)
    assert torch.equal(found.labels.held, in_torch(x, 17).labels)


def child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    x = torch.randn(701, 8, generator=torch.Generator().manual_seed(3))
    found = {}
    for iterations in (4, 8):
        with collectives() as log:
            clusters = in_torch(x, 30, iterations=iterations, shared=True, points_per_cluster=20)
        found[iterations] = (clusters.labels, clusters.centroids, log.calls["all_reduce"])
    # the ranks' seeds differ: rank zero's counts
    on_cpu = kmeans(x, 30, seed=rank, over_ranks=True)
    torch.save({"torch": found, "faiss": (on_cpu.labels, on_cpu.centroids)}, f"{folder}/{rank}.pt")
    end_rank()


def test_ranks_share_the_rows_and_agree(tmp_path: Path) -> None:
    spawn(child, (str(tmp_path),), nprocs=3)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    x = torch.randn(701, 8, generator=torch.Generator().manual_seed(3))
    for iterations in (4, 8):
        alone = in_torch(x, 30, iterations=iterations, points_per_cluster=20)
        for rank in ranks:
            labels, centroids, reductions = rank["torch"][iterations]
            assert torch.equal(labels, alone.labels)
            assert torch.equal(centroids, ranks[0]["torch"][iterations][1])
            torch.testing.assert_close(centroids, alone.centroids)
            assert reductions <= iterations, "one collective in an iteration"
    alone = kmeans(x, 30, seed=0)
    for rank in ranks:
        assert torch.equal(rank["faiss"][0], alone.labels)
        assert torch.equal(rank["faiss"][1], alone.centroids)


@pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
@pytest.mark.parametrize("spherical", [False, True])
def test_no_iteration_waits_for_the_device(spherical: bool) -> None:
    x = torch.nn.functional.normalize(
        torch.randn(300, 8, generator=torch.Generator().manual_seed(3)), dim=1
    )
    # two that start empty
    start = x[:12] * torch.where(torch.arange(12) > 9, 100.0, 1.0).unsqueeze(1)
    expected = lloyd_iterations(x, start, 5, spherical)
    with pretended():
        moved, first = on_device(x), on_device(start)
        LOG.reset()
        found = lloyd_iterations(moved, first, 5, spherical)
        assert not LOG.waits, LOG.waits
        assert isinstance(found, OnDevice)
        torch.testing.assert_close(found.held, expected)
        LOG.reset()
        drawn = first_centroids(moved, 12, torch.Generator().manual_seed(0))
        assert sum(LOG.waits.values()) <= 2, (
            "the first sample and the uniform numbers are copied to the device; no round waits"
        )
        assert isinstance(drawn, OnDevice)
        torch.testing.assert_close(
            drawn.held, first_centroids(x, 12, torch.Generator().manual_seed(0))
        )
        clusters = kmeans(moved, 12, seed=0, spherical=spherical)
        assert isinstance(clusters.labels, OnDevice)
    expected_clusters = in_torch(x, 12, spherical=spherical)
    assert torch.equal(clusters.labels.held, expected_clusters.labels)
