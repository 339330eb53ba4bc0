"""MTPR, MTNR and NMI against slow loops, and what they are in the limits."""

from __future__ import annotations

import math

import pytest
import torch

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.detection import (
    NORMALISERS,
    Normaliser,
    label_nmi,
    mtpr_mtnr,
    nmi,
)
from tests.reference import clusters as slow


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_the_slow_loops(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(-2, 5, (40,), generator=g)
    truth = torch.randint(-1, 4, (40,), generator=g)
    assert mtpr_mtnr(labels, truth) == pytest.approx(slow.rates(labels.tolist(), truth.tolist()))
    known = torch.randint(0, 5, (40,), generator=g), truth.clamp(min=0)
    assert label_nmi(*known) == pytest.approx(
        slow.mutual_information(known[0].tolist(), known[1].tolist())
    )


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_mutual_information_by_every_normaliser(normaliser: Normaliser) -> None:
    g = torch.Generator().manual_seed(0)
    labels, truth = torch.randint(0, 9, (60,), generator=g), torch.randint(0, 4, (60,), generator=g)
    expected = slow.mutual_information(labels.tolist(), truth.tolist(), normaliser)
    assert label_nmi(labels, truth, normaliser) == pytest.approx(expected)
    features = torch.randn(60, 6, generator=g)
    assert (
        nmi(features, truth, seeds=(0,), normaliser="min").mean
        >= nmi(features, truth, seeds=(0,)).mean
    )
    with pytest.raises(ValueError, match=r"`normaliser` \(='mean'\) must be one of arithmetic"):
        label_nmi(labels, truth, "mean")  # type: ignore[arg-type]


def test_rates_of_instances_the_oracle_and_one_cluster() -> None:
    truth = torch.arange(12) % 3
    assert mtpr_mtnr(torch.arange(12), truth) == (0.0, 1.0), "instance-level learning"
    assert mtpr_mtnr(torch.full((12,), -1), truth) == (0.0, 1.0)
    assert mtpr_mtnr(truth, truth) == (1.0, 1.0), "the oracle"
    assert mtpr_mtnr(torch.zeros(12), truth) == (1.0, 0.0), "everybody is kin"
    assert label_nmi(truth.flip(0), truth) == pytest.approx(1.0), "names do not matter"
    one_class = mtpr_mtnr(torch.arange(3), torch.zeros(3))
    assert one_class.mtpr == 0
    assert math.isnan(one_class.mtnr)
    assert math.isnan(mtpr_mtnr(torch.zeros(3), torch.arange(3)).mtpr), "no sample has a positive"
    with pytest.raises(ValueError, match=r"`labels` \(=\(3,\)\) and `truth`"):
        mtpr_mtnr(torch.zeros(3), torch.zeros(4))


def test_many_samples_need_no_square() -> None:
    """200,000 samples: an N × N comparison would be 40 GB."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 1000, (200_000,), generator=g)
    accepted = torch.rand(200_000, generator=g) < 0.5
    rates = mtpr_mtnr(truth.where(accepted, 1000 + torch.arange(200_000)), truth)
    assert rates.mtpr == pytest.approx(0.25, abs=0.005)
    assert rates.mtnr == 1.0


def test_nmi_is_the_mean_of_kmeans_over_seeds() -> None:
    g = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(5, 16, generator=g), dim=1)
    truth = torch.arange(300) % 5
    features = 7 * (centres[truth] + 0.02 * torch.randn(300, 16, generator=g))
    apart = nmi(features, truth)
    assert apart.mean > 0.85
    assert nmi(features, truth, seeds=(0,)).mean == nmi(features, truth, seeds=(0,)).mean
    assert math.isnan(nmi(features, truth, seeds=(0,)).deviation)
    assert nmi(torch.randn(300, 16, generator=g), truth).mean < 0.2
    unknown = truth.clone()
    unknown[:100] = -1
    assert nmi(features, unknown, num_clusters=5).mean > 0.85
    with pytest.raises(KinfolkError, match="no labelled samples"):
        nmi(features, torch.full((300,), -1))
    with pytest.raises(ValueError, match="at least one seed"):
        nmi(features, truth, seeds=())
