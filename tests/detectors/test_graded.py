from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, IFND, GloFND, Graded, Neighbours, Oracle
from kinfolk.detectors.base import Detector
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.objectives import FastCLIP, NTXent, SogCLR
from tests.detectors.test_guide import require_equal

N, B = 12, 7


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (torch.randn(B, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    return z1, z2, torch.randperm(N, generator=g)[:B]


def weighted_attraction(z1: Tensor, z2: Tensor, t: float, degree: Tensor, own_weight: float | None) -> Tensor:
    """Mean over 2B anchors of −Σ y log p in loops; `degree` (2B, 2B), views of z1 first."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n, losses = len(z1), []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, own)]
        mass = sum(float(degree[i, j]) for j in others)
        log_all = torch.log(sum((torch.exp(z[i] @ z[j] / t) for j in [own, *others]), torch.zeros(())))
        loss = torch.zeros((), dtype=torch.float64)
        for j in [own, *others]:
            share = 1.0 if j == own else float(degree[i, j])
            y = share / (1 + mass)
            if own_weight is not None:
                y = (own_weight if mass else 1.0) if j == own else (1 - own_weight) * share / mass if mass else 0.0
            loss = loss - y * (z[i] @ z[j] / t - log_all)
        losses.append(loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("own_weight", [None, 0.0, 0.4, 1.0])
def test_kin_above_a_threshold_are_attracted_by_their_margin(own_weight: float | None) -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    degree = ((z @ z.T - 0.3) / 0.7).clamp(0, 1)
    assert 0 < (degree > 0).float().mean() < 1
    loss_fn = NTXent(0.3, detector=Graded(FNC(min_similarity=0.3)), action="attract", own_weight=own_weight, block_rows=4)
    require_equal(loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, own_weight), z1, z2)


@pytest.mark.parametrize("make", [IFND, Neighbours])
def test_clusters_agree_to_a_degree(make: type[IFND] | type[Neighbours]) -> None:
    z1, z2, ids = views()
    detector: Detector
    if make is IFND:
        detector = inner = IFND(N, num_clusters=(2, 3), schedule="constant")
    else:
        detector = inner = Neighbours(N, num_clusters=3, num_clusterings=2, num_background=None)  # type: ignore[assignment]
    detector.refresh(F.normalize(torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), dim=1), 0.5)
    labels = inner.clusters.labels[:, ids.repeat(2)]
    degree = torch.stack([(level.unsqueeze(1) == level) & (level >= 0).unsqueeze(1) for level in labels]).double().mean(0)
    assert {0.0, 0.5, 1.0} == set(degree.flatten().tolist())
    loss_fn = NTXent(0.3, detector=Graded(detector), action="attract")
    require_equal(loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, None), z1, z2)


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_a_degree_of_one_is_what_it_was(action: str) -> None:
    """Labels agree or do not; in the losses that attracted kin leave, and in those in which they stay."""
    z1, z2, ids = views()
    losses: list[Any] = [NTXent, SogCLR, FastCLIP]
    for kind in losses:
        first = [] if kind is NTXent else [N]
        plain, degrees = (
            kind(*first, temperature=0.3, detector=detector, action=action, kin_weight=0.0)
            for detector in (Oracle(torch.arange(N) % 3), Graded(Oracle(torch.arange(N) % 3)))
        )
        require_equal(plain(z1, z2, ids), degrees(z1, z2, ids), z1, z2)


def test_half_a_degree_leaves_half_of_a_negative_where_attracted_kin_leave() -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    loss_fn = SogCLR(N, 0.3, gamma=1.0, detector=Graded(FNC(min_similarity=0.3)), action="attract")
    other = torch.eye(B).repeat(2, 2) == 0
    sim, degree = F.normalize(torch.cat((z1, z2)), dim=1), ((z @ z.T - 0.3) / 0.7).clamp(0, 1) * other
    sim = sim @ sim.T
    weight = (1 - degree) * other
    own = torch.eye(B, dtype=torch.float64).repeat(2, 2).fill_diagonal_(0)
    target = (own + degree) / (own + degree).sum(1, keepdim=True)
    slow = (-(target * sim).sum(1) + 0.3 * torch.log((weight * torch.exp(sim / 0.3)).sum(1) / weight.sum(1))).mean()
    require_equal(loss_fn(z1, z2, ids), slow, z1, z2)


def test_it_is_a_setting_of_every_detector() -> None:
    built = build_detector(parse("simclr+glofnd:attract"), Context(N), {"alpha": 0.1, "degrees": True, "start_epoch": 1})
    assert repr(built).startswith("StartAt(Graded(GloFND(")
    assert isinstance(build_detector(parse("simclr+glofnd"), Context(N), {"alpha": 0.1, "degrees": False}), GloFND)
    assert isinstance(build_detector(parse("simclr+glofnd"), Context(N), {"alpha": 0.1}), GloFND)


def test_the_share_of_the_own_positive_is_refused_where_there_is_nothing_to_share() -> None:
    with pytest.raises(ValueError, match=r"`own_weight` \(=0.5\) must be None with `action` \(='eliminate'\)"):
        NTXent(0.3, detector=FNC(top_k=2), own_weight=0.5)
    with pytest.raises(ValueError, match=r"`own_weight` \(=1.5\) must be in \[0, 1\]"):
        NTXent(0.3, detector=FNC(top_k=2), action="attract", own_weight=1.5)
