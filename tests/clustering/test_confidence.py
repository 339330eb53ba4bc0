"""Confidence against loops over the papers' equations, and exact acceptance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kinfolk.clustering import kmeans
from kinfolk.clustering import labels as pseudo_labels
from tests.reference import ifnd, prototypes


def clustered(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.nn.functional.normalize(
        torch.randn(50, 5, generator=torch.Generator().manual_seed(seed)), dim=1
    )
    found = kmeans(x, 6, seed=0)
    return x, found.centroids, found.labels


@pytest.mark.parametrize("block", [1 << 22, 20])
def test_confidence_of_a_sample(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pseudo_labels, "_BLOCK_ELEMENTS", block)
    x, centroids, labels = clustered(0)
    unit = torch.nn.functional.normalize(centroids, dim=1)
    want = ifnd.confidence(x.double(), centroids.double(), labels.tolist(), 0.1)
    torch.testing.assert_close(
        pseudo_labels.sample_confidence(x, unit, labels, 0.1),
        torch.tensor(want),
        rtol=1e-4,
        atol=1e-6,
    )


def test_confidence_at_a_low_temperature() -> None:
    """Of samples nearly between two centroids; the exponents are beyond float32."""
    angle = torch.tensor([0.0, 0.7850, 0.7854, 0.7858, 1.5])
    x, centroids, labels = (
        torch.stack((angle.cos(), angle.sin()), 1),
        torch.eye(2),
        torch.tensor([0, 0, 1, 1, 1]),
    )
    got = pseudo_labels.sample_confidence(x, centroids, labels, 0.001)
    want = torch.sigmoid((1 - 2 * labels) * (x[:, 0] - x[:, 1]).double() / 0.001)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    assert ((got > 0.2) & (got < 0.8)).sum() == 3


def test_confidence_of_a_cluster() -> None:
    x, centroids, labels = clustered(2)
    phi = torch.tensor(prototypes.concentration(x, labels.tolist(), centroids, 1.0, 10.0))
    low, high = phi.quantile(torch.tensor([0.1, 0.9]))
    want = phi.clamp(low, high)
    torch.testing.assert_close(
        pseudo_labels.cluster_confidence(x, centroids, labels), (want.mean() / want)[labels]
    )


def test_clusters_without_a_spread_have_that_of_the_widest() -> None:
    """Of one sample, of equal samples, or empty."""
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.9], [0.6, 0.8]])
    labels = torch.tensor([0, 0, 1, 1, 2])
    centroids = torch.tensor([[1.0, 0.0], [0.0, 0.95], [0.6, 0.8], [5.0, 5.0]])
    torch.testing.assert_close(
        pseudo_labels.cluster_confidence(x, centroids, labels),
        torch.ones(5),
        msg="one cluster has a spread",
    )
    assert pseudo_labels.cluster_confidence(x[4:], centroids, labels[4:]).tolist() == [1.0], (
        "none has"
    )


@pytest.mark.parametrize("rate", [0.0, 0.1, 1 / 3, 0.5, 0.999, 1.0])
def test_acceptance_is_exact(rate: float) -> None:
    # many ties
    values = torch.rand(40, generator=torch.Generator().manual_seed(0)).mul(8).round() / 8
    got = pseudo_labels.accept_most_confident(values, rate)
    assert set(got.nonzero().flatten().tolist()) == ifnd.acceptance(values.tolist(), rate)
    assert int(got.sum()) == round(rate * 40)


def test_equally_confident_samples_are_accepted_by_distance_not_in_data_set_order() -> None:
    """A folder is sorted by class: by their numbers, the first classes would be accepted first."""
    confidences, distances = (
        torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0]),
        torch.tensor([9.0, 0.4, 0.3, 0.1, 0.2]),
    )
    assert pseudo_labels.accept_most_confident(confidences, 0.6, distances).tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_distance_to_the_own_centroid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pseudo_labels, "_BLOCK_ELEMENTS", 20)
    x, centroids, labels = clustered(3)
    want = torch.cdist(x.double(), centroids.double()).gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(
        pseudo_labels.centroid_distance(x, centroids, labels).double(), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("num_epochs", [2, 3, 200])
def test_the_last_epoch_of_a_linear_schedule_has_the_final_rate(num_epochs: int) -> None:
    last = pseudo_labels.last_clustering(1, num_epochs)
    rates = [
        pseudo_labels.rate_at("linear", 0.8, epoch / num_epochs, last=last)
        for epoch in range(num_epochs)
    ]
    assert rates == pytest.approx([0.8 * epoch / (num_epochs - 1) for epoch in range(num_epochs)])
    assert rates[-1] == 0.8


@pytest.mark.parametrize(
    ("every", "num_epochs", "first", "want"),
    [
        (20, 1000, 0, 980),
        (20, 21, 0, 20),
        (3, 6, 1, 4),
        (2, 7, 3, 5),
        (20, 20, 0, 20),
        (1, 1, 0, 1),
    ],
)
def test_when_the_last_clustering_is(every: int, num_epochs: int, first: int, want: int) -> None:
    """At the end of the training, where none but that before the first epoch is made earlier."""
    assert pseudo_labels.last_clustering(every, num_epochs, first) == want / num_epochs


def test_without_ties_the_least_accepted_is_above_the_most_refused() -> None:
    values = torch.randn(101, generator=torch.Generator().manual_seed(1))
    got = pseudo_labels.accept_most_confident(values, 0.4)
    assert values[got].min() > values[~got].max()
    assert math.isclose(got.float().mean().item(), 40 / 101, rel_tol=1e-6)
