"""IFND: acceptance, the losses of the paper, its identities, its state, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk.detectors import IFND, StartAt
from kinfolk.detectors.ifnd import default_clusters
from kinfolk.objectives import CLIPLoss, NTXentLoss, SogCLRLoss
from kinfolk.pairs import OUT, Action, Block, Pairs
from tests.detectors.blocks import levels, mask, random_block
from tests.ranks import end_rank, spawn
from tests.reference import ifnd, losses

N = 30


def features(seed: int = 0, dim: int = 4, number: int = N) -> Tensor:
    return torch.randn(number, dim, generator=torch.Generator().manual_seed(seed))


def made(progress: float | None = 0.6, **changed: Any) -> IFND:
    detector = IFND(**{"num_samples": N, "num_clusters": (3, 7), **changed})
    if progress is not None:
        detector.refresh(features(), progress)
    return detector


def batch(seed: int = 1, size: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, size, 5, dtype=torch.float64, generator=g)
    return z1, z2, torch.randperm(N, generator=g)[:size]


def labels_of(detector: IFND) -> list[list[int | None]]:
    return [
        [label if label < number else None for label in level.tolist()]
        for level, number in zip(detector.labels, detector.num_clusters, strict=True)
    ]


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.35, 1.0])
def test_the_most_confident_are_accepted(progress: float) -> None:
    detector = made(progress)
    if progress == 0:
        assert labels_of(detector) == [[None] * N] * 2
        return
    z = torch.nn.functional.normalize(features(), dim=1)
    for level in range(2):
        clusters = detector.clusters.labels[level].tolist()
        want = ifnd.confidence(z, detector.clusters.level(level), clusters, 0.2)
        torch.testing.assert_close(
            detector.confidence[level], torch.tensor(want), rtol=1e-4, atol=1e-5
        )
        chosen = ifnd.acceptance(detector.confidence[level].tolist(), progress)
        assert len(chosen) == round(progress * N)
        assert labels_of(detector)[level] == [
            label if i in chosen else None for i, label in enumerate(clusters)
        ]


def test_a_sample_that_is_not_accepted_is_alone() -> None:
    for level, number in zip(made(0.4).labels, (3, 7), strict=True):
        alone = level[level >= number]
        assert len(alone) == N - 12
        assert len(set(alone.tolist())) == len(alone)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({}, [0.0, 0.05, 0.5, 1.0]),
        ({"final_rate": 0.5}, [0.0, 0.025, 0.25, 0.5]),
        ({"schedule": "step"}, [0.0, 0.0, 1.0, 1.0]),
        ({"schedule": "step", "step_at": 0.6}, [0.0, 0.0, 0.0, 1.0]),
        ({"schedule": "constant", "final_rate": 0.7}, [0.7] * 4),
    ],
)
def test_schedules_accept_the_share_of_their_progress(
    arguments: dict[str, Any], want: list[float]
) -> None:
    detector = made(None, **arguments)
    assert [detector.rate(progress) for progress in (0.0, 0.05, 0.5, 1.0)] == want


def test_refreshes_are_due_every_few_epochs_from_the_first() -> None:
    detector = made(None, every=3)
    detector.set_progress(0, 10)
    assert [epoch for epoch in range(10) if detector.due(epoch)] == [3, 6, 9]
    detector = made(None, schedule="constant")
    assert detector.due(0)


@pytest.mark.parametrize(
    ("every", "want"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (4, [4]), (7, [])]
)
def test_the_last_epoch_is_trained_with_the_final_rate(every: int, want: list[int]) -> None:
    detector = made(None, every=every, final_rate=0.9)
    detector.set_progress(0, 7)
    assert [epoch for epoch in range(7) if detector.due(epoch)] == want
    assert [detector.rate(epoch / 7) for epoch in want[-1:]] == [0.9] * bool(want)
    assert detector.rate(1.0) == 0.9
    assert detector.refreshed_at_end
    assert not made(None, final_rate=0.0).refreshed_at_end


def test_the_confidence_has_the_temperature_of_the_loss() -> None:
    """Equations 1 and 2 have one sim(·, ·)."""
    z = torch.nn.functional.normalize(features(), dim=1)

    def confidences(detector: IFND) -> Tensor:
        detector.refresh(features(), 0.6)
        return detector.confidence[1]

    def want(detector: IFND, t: float) -> Tensor:
        return torch.tensor(
            ifnd.confidence(z, detector.clusters.level(1), detector.clusters.labels[1].tolist(), t)
        )

    own, given, wrapped = made(None), made(None, temperature=0.7), made(None)
    NTXentLoss(temperature=0.05, detector=own)
    NTXentLoss(temperature=0.05, detector=given)
    NTXentLoss(temperature=0.05, detector=StartAt(wrapped, epoch=1))
    for detector, t in ((own, 0.05), (given, 0.7), (wrapped, 0.05)):
        torch.testing.assert_close(confidences(detector), want(detector, t), rtol=1e-4, atol=1e-5)
    both = CLIPLoss(temperature=0.03, detector=made(None))
    assert [objective.detector.loss_temperature for objective in both.objectives] == [0.03, 0.03]  # type: ignore[union-attr]


def test_equally_confident_labels_are_accepted_nearest_first() -> None:
    """Of four clusters of two radii, all confidences of PCL tie in pairs at its cut; the numbers of
    the samples must not decide."""
    g = torch.Generator().manual_seed(0)
    centres = torch.eye(4).repeat_interleave(10, 0)
    radius = torch.tensor([0.01, 0.3]).repeat_interleave(20)
    x = torch.nn.functional.normalize(
        centres + radius.unsqueeze(1) * torch.randn(40, 4, generator=g), dim=1
    )
    detector = IFND(
        num_samples=40, num_clusters=4, schedule="constant", final_rate=0.75, confidence="cluster"
    )
    detector.refresh(x, 0.0)
    confidence, accepted = detector.confidence[0], detector.labels[0] < 4
    tied = confidence == confidence[~accepted].max()
    distance = (x - detector.clusters.level(0)[detector.clusters.labels[0]]).norm(dim=1)
    assert (tied & accepted).any()
    assert distance[tied & accepted].max() < distance[tied & ~accepted].min()


def test_settings_of_kmeans_reach_it() -> None:
    detector = made(None, warm_start=False, points_per_cluster=7)
    clusters = detector.clusters
    assert (clusters.warm_start, clusters.points_per_cluster) == (False, 7)
    assert "warm_start=False, points_per_cluster=7)" in repr(detector)


def test_kin_are_those_of_the_same_accepted_label() -> None:
    detector, block = made(), random_block(3, [4, 8, 15, 16, 23, 29, 2, 7, 11, 1])
    found = levels(detector, block)
    assert len(found) == 2
    for level, label in zip(found, labels_of(detector), strict=True):
        row, col = block.row_ids.tolist(), block.candidate_ids.tolist()
        want = [
            [i != j and label[i] is not None and label[i] == label[j] for j in col] for i in row
        ]
        assert torch.equal(mask(level, block), torch.tensor(want))
        assert any(map(any, want))


def test_a_queue_is_relabelled_by_a_new_clustering_and_followed_when_it_moves() -> None:
    """Labels change with a clustering, ids of a queue in place."""
    detector, z = made(1.0), torch.nn.functional.normalize(features(9, number=12), dim=1)
    queue_ids = torch.arange(8)
    ids = torch.arange(20, 24)

    def check() -> None:
        sim = z[8:] @ z[:8].T
        own = ids.unsqueeze(1) == queue_ids
        block = Block(sim.masked_fill(own, OUT), ids, queue_ids, 1, (~own).sum(1))
        for level, label in zip(levels(detector, block), detector.labels, strict=True):
            assert torch.equal(
                mask(level, block), (label[ids].unsqueeze(1) == label[queue_ids]) & ~own
            )

    check()
    check()
    queue_ids[:4] = torch.tensor([20, 21, 3, 29])
    check()
    detector.refresh(features(5), 1.0)
    check()


@pytest.mark.parametrize("action", ["eliminate", "attract"])
@pytest.mark.parametrize("measure", ["sample", "cluster"])
def test_the_losses_of_the_paper(action: Action, measure: str) -> None:
    z1, z2, ids = batch()
    detector = made(confidence=measure)
    got = NTXentLoss(temperature=0.3, detector=detector, action=action, block_rows=5)(z1, z2, ids)
    want = ifnd.loss(z1, z2, ids.tolist(), labels_of(detector), 0.3, action)
    torch.testing.assert_close(got, want)
    assert (got - losses.ntxent(z1, z2, 0.3)).abs() > 1e-3


@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
def test_nothing_accepted_is_the_base_loss(action: Action) -> None:
    z1, z2, ids = batch()
    base = NTXentLoss(temperature=0.3)(z1, z2)
    for detector in (made(None), made(0.0), made(final_rate=0.0)):
        assert torch.equal(
            NTXentLoss(temperature=0.3, detector=detector, action=action)(z1, z2, ids), base
        )


def test_true_clusters_attracted_are_supcon() -> None:
    truth = torch.arange(N) % 3
    centres = torch.eye(4)[:3] * 2
    detector = IFND(num_samples=N, num_clusters=(3,), schedule="constant")
    detector.refresh(centres[truth] + 0.01 * features(), 0.0)
    z1, z2, ids = batch()
    torch.testing.assert_close(
        NTXentLoss(temperature=0.3, detector=detector, action="attract")(z1, z2, ids),
        losses.supcon(z1, z2, truth[ids], 0.3),
    )


@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
def test_gradient_equals_finite_differences(action: Action) -> None:
    z1, z2, ids = batch(size=6)
    objective = NTXentLoss(temperature=0.3, detector=made(1.0), action=action, block_rows=4)
    inputs = (z1.requires_grad_(), z2.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: objective(a, b, ids), inputs)


def test_the_order_of_candidates_does_not_matter() -> None:
    g, detector = torch.Generator().manual_seed(2), made(1.0)
    anchors, candidates, positives = (
        torch.randn(*shape, 5, dtype=torch.float64, generator=g) for shape in ((6,), (20,), (6, 1))
    )
    ids, candidate_ids, order = (
        torch.arange(6),
        torch.randperm(N, generator=g)[:20],
        torch.randperm(20, generator=g),
    )
    objective = NTXentLoss(temperature=0.2, detector=detector)
    one = objective.on(Pairs(anchors, candidates, positives, ids, candidate_ids))
    other = objective.on(Pairs(anchors, candidates[order], positives, ids, candidate_ids[order]))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_half_precision_and_cold_temperatures_stay_finite(temperature: float) -> None:
    z1, z2, ids = batch()
    detector = made(1.0, temperature=temperature)
    assert SogCLRLoss(num_samples=N, temperature=temperature, detector=detector)(
        z1.bfloat16(), z2.bfloat16(), ids
    ).isfinite()
    confidence = detector.confidence.clone()
    assert confidence.isfinite().all()
    assert torch.equal(detector.bfloat16().confidence, confidence)


@pytest.mark.parametrize("source", ["pass", "bank"])
def test_save_load_continue_equals_uninterrupted(source: str) -> None:
    def collect(detector: IFND, seed: int) -> None:
        if detector.collects:
            detector.collect(torch.arange(N - 3), features(seed, dim=5, number=2 * (N - 3)))

    whole, fresh = made(None, source=source), made(None, source=source)
    collect(whole, 1)
    whole.refresh(features(1), 0.5)
    collect(whole, 2)
    fresh.load_state_dict(whole.state_dict())
    z1, z2, ids = batch()
    assert torch.equal(
        NTXentLoss(temperature=0.3, detector=whole)(z1, z2, ids),
        NTXentLoss(temperature=0.3, detector=fresh)(z1, z2, ids),
    )
    for detector in (whole, fresh):
        detector.refresh(features(2), 0.8)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), fresh.state_dict().values(), strict=True)
    )
    with pytest.raises(RuntimeError, match="use the same data set and numbers of clusters"):
        IFND(num_samples=N + 1, num_clusters=(3, 7), source=source).load_state_dict(  # type: ignore[arg-type]
            whole.state_dict()
        )


def test_what_was_collected_is_clustered() -> None:
    z, unseen = features(4), torch.tensor([5, 17])
    seen = torch.tensor([i for i in range(N) if i not in unseen])
    detector = made(None, source="bank", schedule="constant")
    assert detector.collects
    views = torch.stack((z + 0.1, z - 0.1), 1)
    for ids in (seen[:10], seen[10:]):
        detector.collect(ids, views[ids].flatten(0, 1))
    detector.refresh(None, 0.5)
    alone = IFND(num_samples=len(seen), num_clusters=(3, 7), schedule="constant")
    alone.refresh(z[seen], 0.5)
    assert torch.equal(detector.labels[:, seen], alone.labels)
    assert (detector.labels[:, unseen] >= 7).all()
    assert not detector.confidence[:, unseen].any()


def test_too_few_collected_are_not_clustered() -> None:
    detector = made(None, source="bank", schedule="constant")
    detector.refresh(None, 0.5)
    detector.collect(torch.arange(7), features(0, number=7))
    detector.refresh(None, 0.5)
    assert labels_of(detector) == [[None] * N] * 2


def test_training_collects_by_itself() -> None:
    z1, z2, ids = batch()
    detector = made(None, source="bank")
    NTXentLoss(temperature=0.3, detector=detector)(z1, z2, ids)
    assert set(detector.get_buffer("collected.seen").nonzero().flatten().tolist()) == set(
        ids.tolist()
    )


@pytest.mark.parametrize(
    ("number", "want"),
    [(50_000, (100, 300, 1000)), (8_000, (40, 120, 400)), (24, (12,)), (5, (2,)), (2, (1,))],
)
def test_default_clusters_follow_the_number_of_samples(number: int, want: tuple[int, ...]) -> None:
    assert default_clusters(number) == want == IFND(num_samples=number).num_clusters


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": 1}, r"`num_samples` \(=1\) must be at least 2"),
    (
        {"num_clusters": (3, 30)},
        r"`num_clusters` \(=30\) must be at least 1 and below the number of samples \(30\)",
    ),
    ({"schedule": "cosine"}, r"`schedule` \(='cosine'\) must be one of linear, step, constant"),
    ({"confidence": "both"}, r"`confidence` \(='both'\) must be one of sample, cluster"),
    ({"space": "pixels"}, r"`space` \(='pixels'\) must be one of projected, features"),
    ({"source": "queue"}, r"`source` \(='queue'\) must be one of pass, bank"),
    (
        {"source": "bank", "space": "features"},
        r"`space` \(='features'\) must be 'projected' with `source` \(='bank'\)",
    ),
    ({"final_rate": 1.1}, r"`final_rate` \(=1.1\) must be in \[0, 1\]"),
    ({"every": 0}, r"`every` \(=0\) must be at least 1"),
    ({"temperature": 0.0}, r"`temperature` \(=0.0\) must be above 0"),
]


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    for changed, message in WRONG:
        with pytest.raises(ValueError, match=message):
            made(None, **changed)


def test_features_are_needed() -> None:
    with pytest.raises(ValueError, match="`features` must be given"):
        made(None).refresh(None, 0.5)


def test_repr_is_the_call() -> None:
    detector = IFND(num_samples=7, num_clusters=(2, 3), schedule="step", source="bank")
    assert repr(eval(repr(detector))) == repr(detector)
    assert "num_clusters=(2, 3), schedule='step'" in repr(detector)


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(_trained(rank, 2), f"{folder}/{rank}.pt")
    end_rank()


def _trained(rank: int, world: int) -> dict[str, Tensor]:
    """Two epochs of one step on unequal parts of the batch, and a refresh before each from what was
    collected."""
    detector = IFND(num_samples=N, num_clusters=(3, 7), schedule="constant", source="bank")
    objective, results = NTXentLoss(temperature=0.3, detector=detector, action="attract"), {}
    for epoch in (1, 2):
        detector.refresh(None, epoch / 2)
        z1, z2, ids = batch(epoch, size=20)
        part = slice(None) if world == 1 else slice(0, 13) if rank == 0 else slice(13, None)
        results[f"loss {epoch}"] = objective(z1[part], z2[part], ids[part])
    return {**results, **detector.state_dict()}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    spawn(_child, (str(tmp_path),), nprocs=2)
    alone = _trained(0, 1)
    assert (alone["labels"] < 7).any()
    for rank in (0, 1):
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(value, alone[name], msg=f"{name} on rank {rank}")


def test_one_number_of_clusters_is_one_level() -> None:
    assert IFND(num_samples=20, num_clusters=5).num_clusters == (5,)
    with pytest.raises(
        ValueError, match=r"`features` \(=\(19, 3\)\) must be of the shape \(20, features\)"
    ):
        IFND(num_samples=20, num_clusters=5, schedule="constant").refresh(torch.randn(19, 3), 0.5)
