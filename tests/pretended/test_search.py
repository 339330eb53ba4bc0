"""Nearest neighbours, DBSCAN and the exact audit on the pretended device: what they find there is
what they find on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfolk.auditing import search
from kinfolk.clustering import dbscan
from kinfolk.clustering.dbscan import fitting_radii
from kinfolk.evaluation import knn_predict
from kinfolk.features import Features
from tests.pretended.device import AVAILABLE, CUDA, LOG, OnDevice, on_device, pretended

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
    test = groups(30, seed=1)[0] if apart else None
    expected = knn_predict(x, y, test, k=7)
    with pretended():
        found = knn_predict(x, y, test, k=7, device="cuda")
        assert LOG.operations["topk"] == 1, "computed on the device"
    assert not isinstance(found, OnDevice)
    assert torch.equal(found, expected)


def test_dbscan_and_its_radii_on_the_device_equal_the_cpu() -> None:
    x, _ = groups(90)
    radii = fitting_radii(x, 2)
    with pretended():
        moved = on_device(x)
        assert fitting_radii(moved, 2) == pytest.approx(radii)
        found = dbscan(moved, radii)
    assert isinstance(found, OnDevice)
    assert torch.equal(found.held, dbscan(x, radii))


@pytest.mark.parametrize("alpha", [0.005, 0.05, 0.4])
@pytest.mark.parametrize("sampled", [64, 2048])
def test_the_exact_audit_on_the_device_equals_the_cpu(
    alpha: float, sampled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ROWS", 50)
    monkeypatch.setattr(search, "SAMPLED", sampled)
    x, labels = groups(333)
    features, given = Features(x.numpy()), (alpha, 10, labels.numpy())
    expected = search.exact_kin(features, *given, device=torch.device("cpu"))
    with pretended():
        found = search.exact_kin(features, *given, device=CUDA)
    np.testing.assert_allclose(found.threshold_N, expected.threshold_N, atol=2e-6)
    np.testing.assert_allclose(found.near_sim_NK, expected.near_sim_NK, atol=2e-6)
    for name in ("near_NK", "flagged_N", "occurrence_N", "num_known", "hits"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
