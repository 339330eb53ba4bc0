"""The concentration of clusters against the loops over its equation, and clusters that have
none."""

from __future__ import annotations

import pytest
import torch

from kinfolk.clustering.labels import concentration
from tests.reference import prototypes as slow


@pytest.mark.parametrize("alpha", [10.0, 1.0])
def test_it_is_equation_12(alpha: float) -> None:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(30, 4, dtype=torch.float64, generator=g)
    labels = torch.tensor([0] * 10 + [1] * 15 + [2] * 4 + [3])  # the last cluster has one member
    centroids = torch.stack([features[labels == k].mean(0) for k in range(4)])
    phi = concentration(features, labels, centroids, temperature=0.2, alpha=alpha)
    expected = slow.concentration(features, labels.tolist(), centroids, 0.2, alpha)
    torch.testing.assert_close(phi, torch.tensor(expected, dtype=torch.float64))
    assert phi.mean().item() == pytest.approx(0.2)
    assert phi[3] == phi[:3].max()


def test_extremes_can_be_cut() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 20
    features = torch.randn(400, 3, generator=g) * (
        1 + 10 * (labels == 7).float() + 0.001 * labels
    ).unsqueeze(1)
    centroids = torch.stack([features[labels == k].mean(0) for k in range(20)])
    plain, cut = (concentration(features, labels, centroids, clip=clip) for clip in (0.0, 0.1))
    assert plain.max() / plain.median() > 5
    assert cut.max() / cut.median() < 2
    assert cut.mean().item() == pytest.approx(1.0)


def test_degenerate_clusters_stay_finite() -> None:
    labels, centroids = torch.tensor([0, 0, 1, 1, 3]), torch.tensor([[1.0], [5.0], [9.0], [7.0]])
    features = torch.tensor([[0.0], [2.0], [5.0], [5.0], [7.0]])
    phi = concentration(features, labels, centroids, temperature=0.1)
    # equal members and a single one: as the widest; the empty one 0
    torch.testing.assert_close(phi, torch.tensor([0.1, 0.1, 0.0, 0.1]))
    alone = concentration(torch.eye(3), torch.arange(3), torch.eye(3), temperature=0.3)
    torch.testing.assert_close(alone, torch.full((3,), 0.3))


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("alpha", -1.0), ("clip", 0.5)])
def test_wrong_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` \(={value}\) must be"):
        concentration(torch.eye(2), torch.arange(2), torch.eye(2), **{name: value})
