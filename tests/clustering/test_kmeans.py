"""k-means: finds what is there, repairs what is empty, refuses what cannot be clustered, and lives
beside torch in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kinfolk.clustering import kmeans
from kinfolk.clustering.kmeans import first_centroids
from kinfolk.errors import KinfolkError
from tests.pretended.device import AVAILABLE, OnDevice, on_device, pretended
from tests.ranks import run_program


def blobs(
    number: int, each: int, dim: int = 6, spread: float = 0.05, seed: int = 0
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(number, dim, generator=g) * 3
    labels = torch.arange(number).repeat_interleave(each)
    return centres[labels] + spread * torch.randn(number * each, dim, generator=g), labels


def same_partition(a: Tensor, b: Tensor) -> bool:
    return bool(((a.unsqueeze(0) == a.unsqueeze(1)) == (b.unsqueeze(0) == b.unsqueeze(1))).all())


def test_well_separated_groups_are_found() -> None:
    x, labels = blobs(3, 40)
    found = kmeans(x, 3, seed=1)
    assert same_partition(found.labels, labels)
    assert (found.labels.dtype, found.centroids.shape) == (torch.int64, (3, 6))
    for cluster in range(3):
        torch.testing.assert_close(
            found.centroids[cluster], x[found.labels == cluster].mean(0), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("dim", "spread"), [(6, 0.2), (32, 1.0), (128, 1.5)])
def test_twelve_separate_groups_are_found(dim: int, spread: float) -> None:
    """From centroids drawn uniformly, two groups share one and another group has two: a purity of
    11/12."""
    for seed in range(5):
        x, truth = blobs(12, 250, dim, spread, seed)
        labels = kmeans(x, 12, seed=seed).labels
        counts = torch.zeros(12, 12).index_put_((labels, truth), torch.ones(()), accumulate=True)
        assert counts.amax(1).sum() / len(x) >= 0.99


@pytest.mark.parametrize("number", [5, 256, 257, 600])
def test_first_centroids_are_distinct_samples(number: int) -> None:
    x = torch.randn(700, 3, generator=torch.Generator().manual_seed(0))
    drawn = first_centroids(x, number, torch.Generator().manual_seed(1))
    assert len(drawn) == number
    assert (torch.cdist(drawn.double(), x.double()).amin(1) == 0).all()
    if number < 257:  # one at a time: none is drawn twice
        assert len({tuple(row) for row in drawn.tolist()}) == number


def test_every_sample_has_its_nearest_centroid() -> None:
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(3))
    found = kmeans(x, 17, seed=0)
    assert torch.equal(torch.cdist(x.double(), found.centroids.double()).argmin(1), found.labels)


def test_spherical_centroids_have_unit_norm() -> None:
    x = torch.nn.functional.normalize(
        torch.randn(300, 8, generator=torch.Generator().manual_seed(3)), dim=1
    )
    found = kmeans(x, 9, seed=0, spherical=True)
    torch.testing.assert_close(found.centroids.norm(dim=1), torch.ones(9))
    assert torch.equal((x @ found.centroids.T).argmax(1), found.labels)


@pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
def test_the_result_is_on_the_device_that_is_asked_for() -> None:
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(3))
    with pretended():
        found = kmeans(on_device(x), 17, seed=0), kmeans(x, 17, seed=0, device=torch.device("cuda"))
    for each in found:
        assert isinstance(each.labels, OnDevice)
        assert torch.equal(each.labels.held, kmeans(x, 17, seed=0).labels)


def test_the_seed_decides() -> None:
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    first, again, other = (kmeans(x, 20, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.labels, other.labels)


def test_warm_start_begins_at_the_given_centroids() -> None:
    x, _ = blobs(5, 30)
    end = kmeans(x, 5, seed=0)
    again = kmeans(x, 5, seed=99, init=end.centroids, iterations=1)
    assert torch.equal(again.labels, end.labels)  # and the clusters keep their numbers


def test_few_samples_of_each_cluster_will_do() -> None:
    x, labels = blobs(4, 300)
    assert same_partition(kmeans(x, 4, seed=2, points_per_cluster=30).labels, labels)


def test_empty_clusters_are_repaired() -> None:
    x, _ = blobs(4, 20)
    start = x[:1].repeat(12, 1) + 100 * torch.arange(12).unsqueeze(1)  # all but one attract nothing
    assert len(kmeans(x, 12, seed=0, init=start, iterations=1).labels.unique()) == 12  # type: ignore[no-untyped-call]


def test_duplicates_are_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]).repeat(10, 1)
    for number in (2, 3, 7, 29):
        found = kmeans(x, number, seed=0)
        assert found.centroids.isfinite().all()
        assert len({int(label) for label in found.labels}) <= 3
        assert torch.equal(found.labels[:3].repeat(10), found.labels)
    assert len(kmeans(x, 7, seed=0).labels.unique()) == 3  # type: ignore[no-untyped-call]
    assert capfd.readouterr() == ("", "")


def test_all_samples_equal() -> None:
    found = kmeans(torch.ones(10, 3), 4, seed=0)
    assert len(found.labels.unique()) == 1  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("number", [0, 10, 11])
def test_as_many_clusters_as_samples_are_refused(number: int) -> None:
    with pytest.raises(
        KinfolkError,
        match=(
            rf"`num_clusters` \(={number}\) must be at least 1 and below the number of samples"
            r" \(10\)"
        ),
    ):
        kmeans(torch.randn(10, 3), number, seed=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(bad: float) -> None:
    x = torch.randn(10, 3)
    x[4, 1] = bad
    with pytest.raises(KinfolkError, match="the features of sample 4 are not finite"):
        kmeans(x, 2, seed=0)


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    x = torch.randn(10, 3)
    with pytest.raises(ValueError, match=r"`init` \(=\(2, 4\)\) must be of the shape \(2, 3\)"):
        kmeans(x, 2, seed=0, init=torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"`iterations` \(=0\)"):
        kmeans(x, 2, seed=0, iterations=0)
    with pytest.raises(ValueError, match=r"`features` \(=\(10,\)\)"):
        kmeans(x[:, 0], 2, seed=0)


def take_turns() -> None:
    """faiss and torch bring an OpenMP each."""
    torch.set_num_threads(2)
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        kmeans(x, 20, seed=0, iterations=2)
        weights = torch.randn(256, 256, requires_grad=True)
        (weights @ weights).softmax(1).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.get_num_threads() == 2


def test_faiss_and_torch_in_one_process(tmp_path: Path) -> None:
    assert run_program(take_turns, tmp_path) == (0, "", "")
