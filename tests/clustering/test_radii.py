"""Radii that fit the data: whatever the spread, there are clusters, and no giant one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering import dbscan
from kinfolk.clustering.dbscan import Radii, fitting_radii, kth_distance


def spread(width: float, number: int = 400, seed: int = 0) -> Tensor:
    """Unit vectors around one direction, in twenty clumps that touch each other: the wider, the
    farther apart."""
    g = torch.Generator().manual_seed(seed)
    centre, z = torch.randn(20, 16, generator=g), torch.randn(number, 16, generator=g)
    return F.normalize(
        5 * torch.eye(16)[0] + width * (centre[torch.arange(number) % 20] + 0.7 * z), dim=1
    )


def largest(labels: Tensor) -> float:
    return torch.bincount(labels).max().item() / len(labels)


@pytest.mark.parametrize("width", [0.1, 0.5, 2.0, 20.0])
def test_they_follow_the_spread_of_the_data(width: float) -> None:
    z = spread(width)
    radii = fitting_radii(z, 2)
    levels = dbscan(z, radii)
    assert 0 < radii[0] < radii[1]
    assert largest(levels[1]) <= 0.1, "no giant cluster"
    alone = torch.bincount(levels[1], minlength=len(z))[levels[1]] == 1
    assert alone.double().mean() < 0.95, "and some are not"
    assert largest(dbscan(z, [2 * radii[1]])[0]) > 0.1, "at twice the radius there is one"


def test_half_as_many_cores_at_each_level_below() -> None:
    z = spread(1.0)
    distance = kth_distance(z, 4, torch.arange(len(z)))
    shares = [(distance <= radius).double().mean().item() for radius in fitting_radii(z, 3)]
    assert shares[0] == pytest.approx(shares[1] / 2, abs=0.005)
    assert shares[1] == pytest.approx(shares[2] / 2, abs=0.005)


def test_the_kth_distance_by_hand() -> None:
    z = F.normalize(torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = torch.cdist(z, z).sort(1).values[:, 2]
    for places in (torch.arange(30), torch.tensor([7, 2])):
        torch.testing.assert_close(
            kth_distance(3 * z, 3, places), expected[places], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    "z",
    [
        torch.ones(50, 4),
        torch.eye(12),
        torch.eye(3)[torch.arange(60) % 3],
        torch.randn(1, 4),
        torch.zeros(8, 2),
    ],
    ids=["all equal", "all apart", "three pictures", "one", "zero"],
)
def test_degenerate_features_have_radii_too(z: Tensor) -> None:
    radii = fitting_radii(z, 3)
    assert len(radii) == 3
    assert dbscan(z, radii).shape == (3, len(z))
    assert fitting_radii(z, 0) == ()


def test_fitted_ones_are_state_and_given_ones_stay() -> None:
    z, radii, again, given = (
        spread(1.0),
        Radii(3, None, 4),
        Radii(3, None, 4),
        Radii(3, (0.2, 0.3), 4),
    )
    assert radii.values is None
    assert radii.fit(z) == radii.values == fitting_radii(z, 2)
    again.load_state_dict(radii.state_dict())
    assert again.bfloat16().values == radii.values, "not cast to 16 bits"
    assert given.fit(z) == given.values == (0.2, 0.3)
    with pytest.raises(
        ValueError, match=r"`radii` \(=\[0.5\]\) must be one for each of the levels 2 to 3"
    ):
        Radii(3, (0.5,), 4)


def test_fitted_radii_follow_the_features_and_given_ones_do_not() -> None:
    near, far = spread(0.5), spread(2.0, seed=1)
    fitted, given = Radii(3, None, 4), Radii(3, (0.2, 0.3), 4)
    fitted.follow(far)
    assert fitted.values is None, "nothing to follow before the first fit"
    start = fitted.fit(near)
    shares = fitted.shares.clone()
    for radii in (fitted, given):
        radii.follow(far)
    assert given.values == (0.2, 0.3)
    assert fitted.values is not None
    assert start[1] < fitted.values[0] < fitted.values[1], (
        "what lies farther apart is as near as what lay closer"
    )
    distance = kth_distance(far, 4, torch.arange(len(far)))
    found = [(distance <= radius).double().mean().item() for radius in fitted.values]
    assert found == pytest.approx(shares.tolist(), abs=0.01)
