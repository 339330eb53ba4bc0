"""Nearest neighbours and DBSCAN on the pretended device find what they find on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.clustering import dbscan
from kinfolk.clustering.dbscan import fitting_radii
from kinfolk.evaluation import knn_accuracy
from tests.pretended.device import AVAILABLE, LOG, OnDevice, on_device, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")


def groups(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=g)
    return torch.randn(4, 6, generator=g)[labels] + 0.7 * torch.randn(
        number, 6, generator=g
    ), labels


@pytest.mark.parametrize("apart", [True, False])
def test_knn_on_the_device_equals_the_cpu(apart: bool) -> None:
    x, y = groups(120)
    test_x, test_y = groups(30, seed=1) if apart else (None, None)
    expected = knn_accuracy(x, y, test_x, test_y, k=7)
    assert 0 < expected < 1
    with pretended():
        assert knn_accuracy(x, y, test_x, test_y, k=7, device="cuda") == expected
        assert LOG.operations["topk"] == 1, "computed on the device"


def test_dbscan_and_its_radii_on_the_device_equal_the_cpu() -> None:
    x, _ = groups(90)
    radii = fitting_radii(x, 2)
    with pretended():
        moved = on_device(x)
        assert fitting_radii(moved, 2) == pytest.approx(radii)
        found = dbscan(moved, radii)
    assert isinstance(found, OnDevice)
    assert torch.equal(found.held, dbscan(x, radii))
