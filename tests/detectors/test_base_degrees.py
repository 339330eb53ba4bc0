"""Degrees of kin, in the losses that attracted kin leave, and in those in which they stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, Detector, Oracle
from kinfolk.objectives import NTXentLoss, SogCLRLoss
from kinfolk.objectives.base import Objective
from kinfolk.pairs import Action, Block, Kin
from tests.detectors.test_guide import require_equal
from tests.reference.guide import weighted_attraction

N, B = 12, 7


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (
        torch.randn(B, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return z1, z2, torch.randperm(N, generator=g)[:B]


class Near(Detector):
    """Kin above a similarity of 0.3, by how far they are above it."""

    def find(self, block: Block) -> Kin:
        return Kin(((block.sim_RC - 0.3) / 0.7).clamp(0, 1))


@pytest.mark.parametrize("own_weight", [None, 0.0, 0.4, 1.0])
def test_kin_above_a_threshold_are_attracted_by_their_margin(own_weight: float | None) -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    degree = ((z @ z.T - 0.3) / 0.7).clamp(0, 1)
    assert 0 < (degree > 0).float().mean() < 1
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=Near(),
        action="attract",
        own_weight=own_weight,
        block_rows=4,
    )
    require_equal(
        loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, own_weight), z1, z2
    )


def test_half_a_degree_leaves_half_of_a_negative_where_attracted_kin_leave() -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    loss_fn = SogCLRLoss(
        num_samples=N,
        temperature=0.3,
        gamma=1.0,
        detector=Near(),
        action="attract",
    )
    other = torch.eye(B).repeat(2, 2) == 0
    sim, degree = (
        F.normalize(torch.cat((z1, z2)), dim=1),
        ((z @ z.T - 0.3) / 0.7).clamp(0, 1) * other,
    )
    sim = sim @ sim.T
    weight = (1 - degree) * other
    own = torch.eye(B, dtype=torch.float64).repeat(2, 2).fill_diagonal_(0)
    target = (own + degree) / (own + degree).sum(1, keepdim=True)
    slow = (
        -(target * sim).sum(1)
        + 0.3 * torch.log((weight * torch.exp(sim / 0.3)).sum(1) / weight.sum(1))
    ).mean()
    require_equal(loss_fn(z1, z2, ids), slow, z1, z2)


def test_the_share_of_the_own_positive_is_refused_where_there_is_nothing_to_share() -> None:
    with pytest.raises(
        ValueError, match=r"`own_weight` \(=0.5\) must be None with `action` \(='eliminate'\)"
    ):
        NTXentLoss(temperature=0.3, detector=FNC(top_k=2), own_weight=0.5)
    with pytest.raises(ValueError, match=r"`own_weight` \(=1.5\) must be in \[0, 1\]"):
        NTXentLoss(temperature=0.3, detector=FNC(top_k=2), action="attract", own_weight=1.5)


class FullDegrees(Oracle):
    """The oracle's kin with the degree 1."""

    def find(self, block: Block) -> Kin:
        degree = super().find(block).degree
        assert degree is not None
        return Kin(degree.to(block.sim_RC.dtype))


@pytest.mark.parametrize("min_negatives", [1, 3])
@pytest.mark.parametrize("num_classes", [1, 2])
@pytest.mark.parametrize(("action", "kin_weight"), [("attract", 0.5), ("reweight", 0.0)])
def test_kin_with_the_degree_one_leave_min_negatives(
    action: Action, kin_weight: float, num_classes: int, min_negatives: int
) -> None:
    z1, z2, ids = views()
    labels = torch.arange(N) % num_classes
    for make in (sogclr, ntxent):
        hard, full = (
            make(
                detector=kind(labels),
                action=action,
                kin_weight=kin_weight,
                min_negatives=min_negatives,
            )
            for kind in (Oracle, FullDegrees)
        )
        require_equal(full(z1, z2, ids), hard(z1, z2, ids), z1, z2)
        assert torch.equal(full.stats.counts, hard.stats.counts)


def sogclr(**given: Any) -> Objective:
    return SogCLRLoss(num_samples=N, temperature=0.3, **given)


def ntxent(**given: Any) -> Objective:
    return NTXentLoss(temperature=0.3, **given)
