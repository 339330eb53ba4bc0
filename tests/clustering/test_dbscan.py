"""DBSCAN in blocks: scikit-learn's clusters, nested levels; and hierarchies that are not nested."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering import conforming, dbscan, dbscan_levels, kmeans_levels


def clumps(number: int = 240, dim: int = 6, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return F.normalize(
        torch.randn(8, dim, generator=g)[torch.arange(number) % 8]
        + 0.3 * torch.randn(number, dim, generator=g),
        dim=1,
    )


@pytest.mark.parametrize("elements", [1 << 22, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_equals_scikit_learn(seed: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.cluster import DBSCAN

    monkeypatch.setattr(import_module("kinfolk.clustering.dbscan"), "_CPU_ELEMENTS", elements)
    z, radii = clumps(seed=seed), [0.25, 0.35, 0.5]
    for radius, found in zip(radii, dbscan(z, radii, nested=False), strict=True):
        other = DBSCAN(eps=radius, min_samples=4).fit(z.numpy())
        label = torch.from_numpy(other.labels_)
        core = torch.from_numpy(other.core_sample_indices_)
        assert torch.equal(
            found[core].unsqueeze(0) == found[core].unsqueeze(1),
            label[core].unsqueeze(0) == label[core].unsqueeze(1),
        )
        assert torch.equal(
            found == torch.arange(len(z)), (label < 0) | (found == torch.arange(len(z)))
        )
        border = torch.ones(len(z), dtype=torch.bool).index_fill(0, core, False) & (label >= 0)
        nearest = core[(z[border] @ z[core].T).argmax(1)]
        assert torch.equal(found[border], found[nearest])


def test_growing_radii_are_nested_by_construction() -> None:
    for seed in range(5):
        z = clumps(seed=seed)
        radii = [0.2, 0.3, 0.35, 0.4, 0.5]
        nested, free = dbscan(z, radii), dbscan(z, radii, nested=False)
        assert conforming(nested) == 1
        assert [len(level.unique()) for level in nested] == sorted(
            (len(level.unique()) for level in nested), reverse=True
        )
        assert (nested == free).double().mean() > 0.9


def test_levels_of_kmeans_and_dbscan_nest_and_conform() -> None:
    z = clumps()
    by_kmeans, by_dbscan = (
        kmeans_levels(z, (60, 25, 8), seed=0),
        dbscan_levels(z, (0.25, 0.35, 0.5)),
    )
    for levels in (by_kmeans, by_dbscan):
        assert levels.shape == (4, len(z))
        assert levels[0].tolist() == list(range(len(z)))
        assert 0 < conforming(levels) <= 1
    assert conforming(by_kmeans) < conforming(by_dbscan)


def test_the_conforming_share_equals_a_count_by_hand() -> None:
    labels = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 7, 7, 9, 9, 2], [1, 1, 0, 0, 1, 1]])
    # the third strays; of the tie 3–4 the smallest label wins
    assert conforming(labels) == pytest.approx(4 / 6)


def test_what_is_wrong_is_named() -> None:
    z = clumps(16)
    for radii in ([], [0.0], [0.3, 0.3], [0.4, 0.3]):
        with pytest.raises(ValueError, match="`radii`"):
            dbscan(z, radii)
    with pytest.raises(ValueError, match="`min_samples`"):
        dbscan(z, [0.3], min_samples=0)
    with pytest.raises(ValueError, match="`features`"):
        dbscan(z * torch.nan, [0.3])
    with pytest.raises(ValueError, match="`num_clusters`"):
        kmeans_levels(z, (3, 3), seed=0)
    with pytest.raises(ValueError, match="`labels`"):
        conforming(torch.zeros(3))
