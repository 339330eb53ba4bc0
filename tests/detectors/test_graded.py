from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, IFND, Components, GloFND, Graded, Known, Neighbours, Oracle
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.objectives import FastCLIPLoss, NTXentLoss, SogCLRLoss
from kinfolk.objectives.base import Objective
from kinfolk.pairs import Action, Block, Kin
from tests.cover import pairwise
from tests.detectors.test_guide import require_equal

N, B = 12, 7


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (
        torch.randn(B, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return z1, z2, torch.randperm(N, generator=g)[:B]


def weighted_attraction(
    z1: Tensor, z2: Tensor, t: float, degree: Tensor, own_weight: float | None
) -> Tensor:
    """Mean over 2B anchors of −Σ y log p in loops; `degree` (2B, 2B), views of z1 first."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n, losses = len(z1), []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, own)]
        mass = sum(float(degree[i, j]) for j in others)
        log_all = torch.log(
            sum((torch.exp(z[i] @ z[j] / t) for j in [own, *others]), torch.zeros(()))
        )
        loss = torch.zeros((), dtype=torch.float64)
        for j in [own, *others]:
            share = 1.0 if j == own else float(degree[i, j])
            y = share / (1 + mass)
            if own_weight is not None:
                y = (
                    (own_weight if mass else 1.0)
                    if j == own
                    else (1 - own_weight) * share / mass
                    if mass
                    else 0.0
                )
            loss = loss - y * (z[i] @ z[j] / t - log_all)
        losses.append(loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("own_weight", [None, 0.0, 0.4, 1.0])
def test_kin_above_a_threshold_are_attracted_by_their_margin(own_weight: float | None) -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    degree = ((z @ z.T - 0.3) / 0.7).clamp(0, 1)
    assert 0 < (degree > 0).float().mean() < 1
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=Graded(FNC(min_similarity=0.3)),
        action="attract",
        own_weight=own_weight,
        block_rows=4,
    )
    require_equal(
        loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, own_weight), z1, z2
    )


def test_clusterings_agree_to_a_degree() -> None:
    z1, z2, ids = views()
    detector = Neighbours(num_samples=N, num_clusters=3, num_clusterings=2, num_background=None)
    detector.refresh(
        F.normalize(torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), dim=1), 0.5
    )
    labels = detector.clusters.labels[:, ids.repeat(2)]
    degree = torch.stack([level.unsqueeze(1) == level for level in labels]).double().mean(0)
    assert {0.0, 0.5, 1.0} == set(degree.flatten().tolist())
    loss_fn = NTXentLoss(temperature=0.3, detector=Graded(detector), action="attract")
    require_equal(loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, None), z1, z2)


def refreshed_ifnd(**given: Any) -> IFND:
    detector = IFND(num_samples=N, schedule="constant", **given)
    detector.refresh(
        F.normalize(torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), dim=1), 0.5
    )
    return detector


@pytest.mark.parametrize(
    ("num_clusters", "confidence", "final_rate"),
    pairwise([(2,), (2, 3)], ["sample", "cluster"], [1.0, 0.75]),
)
def test_pseudo_labels_count_by_the_lower_confidence(
    num_clusters: tuple[int, ...], confidence: str, final_rate: float
) -> None:
    z1, z2, ids = views()
    detector = refreshed_ifnd(
        num_clusters=num_clusters, confidence=confidence, final_rate=final_rate
    )
    degree, rows = torch.zeros(2 * B, 2 * B, dtype=torch.float64), ids.repeat(2).tolist()
    for labels, sure in zip(detector.labels.tolist(), detector.confidence.tolist(), strict=True):
        for a, i in enumerate(rows):
            for c, j in enumerate(rows):
                if labels[i] == labels[j]:
                    degree[a, c] += min(sure[i], sure[j]) / max(sure) / len(num_clusters)
    assert ((degree > 0) & (degree < 0.99)).any()
    loss_fn = NTXentLoss(temperature=0.3, detector=Graded(detector), action="attract", block_rows=4)
    require_equal(loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, None), z1, z2)


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_equally_sure_pseudo_labels_have_the_degree_one(action: Action) -> None:
    z1, z2, ids = views()
    plain = refreshed_ifnd(num_clusters=(3,))
    plain.load_state_dict(
        {**plain.state_dict(), "confidence": torch.full_like(plain.confidence, 0.3)}
    )
    one, other = (
        NTXentLoss(temperature=0.3, detector=each, action=action, kin_weight=0.0)
        for each in (plain, Graded(copy.deepcopy(plain)))
    )
    require_equal(one(z1, z2, ids), other(z1, z2, ids), z1, z2)


LISTED = [
    (0, 2, 0.9),
    (2, 5, 0.4),
    (5, 2, 0.6),
    (4, 4, 1.0),
    (1, 3, -0.2),
    (7, 8, 1.3),
    (0, 11, 0.5),
    (6, 9, 0.7),
    (10, 0, 0.3),
]
LISTED += [(2, 7, 0.3), (8, 5, 0.2), (2, 8, 0.55)]


@pytest.mark.parametrize("own_weight", [None, 0.4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_listed_pairs_are_attracted_by_their_similarity(
    symmetric: bool, own_weight: float | None
) -> None:
    z1, z2, ids = views()
    of = {(i, j): s for i, j, s in LISTED}
    degree = torch.zeros(2 * B, 2 * B, dtype=torch.float64)
    for a, i in enumerate(ids.repeat(2).tolist()):
        for c, j in enumerate(ids.repeat(2).tolist()):
            there = [of[pair] for pair in [(i, j), (j, i)][: 1 + symmetric] if pair in of]
            degree[a, c] = min(max([0.0, *there]), 1.0) if i != j else 0.0
    assert len(set(degree.flatten().tolist())) > 3
    pairs, similar = (
        torch.tensor([each[:2] for each in LISTED]),
        torch.tensor([each[2] for each in LISTED]),
    )
    detector = Graded(Known(num_samples=N, pairs=pairs, symmetric=symmetric, similarities=similar))
    loss_fn = NTXentLoss(
        temperature=0.3, detector=detector, action="attract", own_weight=own_weight, block_rows=4
    )
    require_equal(
        loss_fn(z1, z2, ids),
        weighted_attraction(z1, z2, 0.3, degree.float().double(), own_weight),
        z1,
        z2,
    )


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_listed_pairs_of_similarity_one_are_plain_kin(action: Any) -> None:
    z1, z2, ids = views()
    pairs = torch.tensor([each[:2] for each in LISTED])
    ones = Known(num_samples=N, pairs=pairs, similarities=torch.ones(len(pairs)))
    for plain in (
        Known(num_samples=N, pairs=pairs),
        Graded(Known(num_samples=N, pairs=pairs)),
        ones,
    ):  # without similarities or degrees nothing changes
        one, other = (
            NTXentLoss(temperature=0.3, detector=each, action=action, kin_weight=0.0)
            for each in (plain, Graded(ones))
        )
        require_equal(one(z1, z2, ids), other(z1, z2, ids), z1, z2)


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_a_degree_of_one_is_what_it_was(action: str) -> None:
    """Labels agree or do not; in the losses that attracted kin leave, and in those in which they
    stay."""
    z1, z2, ids = views()
    losses: list[Any] = [NTXentLoss, SogCLRLoss, FastCLIPLoss]
    for kind in losses:
        first = {} if kind is NTXentLoss else {"num_samples": N}
        plain, degrees = (
            kind(**first, temperature=0.3, detector=detector, action=action, kin_weight=0.0)
            for detector in (Oracle(torch.arange(N) % 3), Graded(Oracle(torch.arange(N) % 3)))
        )
        require_equal(plain(z1, z2, ids), degrees(z1, z2, ids), z1, z2)


def test_half_a_degree_leaves_half_of_a_negative_where_attracted_kin_leave() -> None:
    z1, z2, ids = views()
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    loss_fn = SogCLRLoss(
        num_samples=N,
        temperature=0.3,
        gamma=1.0,
        detector=Graded(FNC(min_similarity=0.3)),
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


def test_it_is_a_setting_of_every_detector() -> None:
    built = build_detector(
        parse("simclr+glofnd:attract"),
        Context(N),
        {"alpha": 0.1, "degrees": True, "start_epoch": 1},
    )
    assert repr(built).startswith("StartAt(Graded(GloFND(")
    assert isinstance(
        build_detector(parse("simclr+glofnd"), Context(N), {"alpha": 0.1, "degrees": False}), GloFND
    )
    assert isinstance(build_detector(parse("simclr+glofnd"), Context(N), {"alpha": 0.1}), GloFND)


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


@pytest.mark.parametrize(
    "given", [{"top_k": 1}, {"top_k": 2}, {"alpha": 0.2}, {"top_k": 2, "min_similarity": 0.6}]
)
def test_degrees_of_the_most_similar_begin_at_the_next_similarity(given: dict[str, Any]) -> None:
    z1, z2, ids = views()
    k = given.get("top_k", round(0.2 * (2 * B - 2)))
    z = F.normalize(torch.cat((z1, z2)).detach(), dim=1)
    degree = torch.zeros(2 * B, 2 * B, dtype=torch.float64)
    for i in range(2 * B):
        others = sorted(
            ((float(z[i] @ z[j]), j) for j in range(2 * B) if j % B != i % B), reverse=True
        )
        lower = max(others[k][0], given.get("min_similarity", -1.0))
        for sim, j in others[:k]:
            degree[i, j] = max(0.0, (sim - lower) / (1 - lower))
    assert ((degree > 0).sum(1) == k).all() or "min_similarity" in given
    loss_fn = NTXentLoss(
        temperature=0.3, detector=Graded(FNC(**given)), action="attract", block_rows=4
    )
    require_equal(loss_fn(z1, z2, ids), weighted_attraction(z1, z2, 0.3, degree, None), z1, z2)


@pytest.mark.parametrize("kin_weight", [0.0, 0.3])
def test_kin_without_degrees_have_the_kin_weight(kin_weight: float) -> None:
    z1, z2, ids = views()
    for detector in (Oracle(torch.arange(N) % 3), Components()):
        plain, graded = (
            NTXentLoss(temperature=0.3, detector=each, action="reweight", kin_weight=kin_weight)
            for each in (detector, Graded(detector))
        )
        require_equal(graded(z1, z2, ids), plain(z1, z2, ids), z1, z2)


@pytest.mark.parametrize("action", ["attract", "reweight"])
def test_a_sample_without_negatives_has_no_degrees(action: Action) -> None:
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=Graded(GloFND(num_samples=4, alpha=0.3, init="quantile")),
        action=action,
    )
    loss = loss_fn(torch.ones(1, 4, requires_grad=True), torch.eye(4)[:1], torch.tensor([0]))
    assert loss.item() == 0.0, "only the positive is left"
