"""The hierarchy as a detector: what is kin, how nearly, when it starts, and what crosses ranks and
restarts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import Hierarchy, StartAt
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import ACTIONS
from tests.detectors.blocks import kin, random_block
from tests.ranks import end_rank, spawn

FINE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
TOP = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])


def started(level: int | None = None, **more: Any) -> Hierarchy:
    detector = Hierarchy(num_samples=8, levels=3, level=level, **more)
    detector.clusters.start(
        torch.stack((torch.arange(8), FINE, TOP)),
        torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),
    )
    detector.started.fill_(True)
    return detector


def clumps(number: int = 48, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return F.normalize(
        torch.randn(4, 6, generator=g)[torch.arange(number) % 4]
        + 0.05 * torch.randn(number, 6, generator=g),
        dim=1,
    )


@pytest.mark.parametrize(("level", "labels"), [(2, FINE), (3, TOP), (None, TOP)])
def test_kin_share_the_cluster_and_the_degree_is_the_share_of_levels(
    level: int | None, labels: Tensor
) -> None:
    detector, block = started(level), random_block(0, [7, 1, 3, 0, 5, 4, 6])
    found, degree_RC = kin(detector, block), detector.find(block).degree
    assert degree_RC is not None
    for i, row in enumerate(block.row_ids.tolist()):
        for j, col in enumerate(block.candidate_ids.tolist()):
            assert found[i, j] == (row != col and labels[row] == labels[col])
            if found[i, j]:
                agree = int(FINE[row] == FINE[col]) + int(TOP[row] == TOP[col])
                assert degree_RC[i, j].item() == pytest.approx(agree / 3)


def test_before_it_starts_and_at_level_one_nothing_is_kin() -> None:
    z, ids = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    plain = NTXentLoss(temperature=0.1)(z[0], z[1], ids)
    assert torch.equal(
        NTXentLoss(temperature=0.1, detector=Hierarchy(num_samples=8))(z[0], z[1], ids), plain
    )
    assert torch.equal(
        NTXentLoss(temperature=0.1, detector=started(level=1))(z[0], z[1], ids), plain
    )
    assert not torch.equal(NTXentLoss(temperature=0.1, detector=started())(z[0], z[1], ids), plain)


def test_reweighting_multiplies_by_the_levels_that_differ() -> None:
    z, ids = (
        F.normalize(
            torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
            dim=2,
        ),
        torch.arange(8),
    )
    loss = NTXentLoss(temperature=0.5, detector=started(), action="reweight")(z[0], z[1], ids)
    rows = []
    for i in range(8):
        for v in range(2):
            positive = (z[v, i] @ z[1 - v, i] / 0.5).exp()
            negatives = torch.zeros((), dtype=torch.float64)
            for j in (j for j in range(8) if j != i):
                agree = int(FINE[i] == FINE[j]) + int(TOP[i] == TOP[j])
                negatives += sum(
                    (1 - agree / 3) * (z[v, i] @ z[w, j] / 0.5).exp() for w in range(2)
                )
            rows.append((positive + negatives).log() - positive.log())
    assert loss.item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-6)


def test_dbscan_starts_it_once_and_every_step_refines_it() -> None:
    detector, z = (
        Hierarchy(num_samples=48, radii=(0.3, 0.6), warmup_epochs=2, feature_momentum=0.0),
        clumps(),
    )
    assert [epoch for epoch in range(6) if detector.due(epoch)] == [2]
    assert not detector.collects, "who collects is not given the features of all samples"
    detector.refresh(z, 0.5)
    assert detector.collects
    assert len(detector.clusters.labels[1].unique()) == 4
    moved = z.roll(1, 0)  # every sample is now where another clump was
    loss_fn = NTXentLoss(temperature=0.1, detector=detector)
    for step in range(60):
        ids = torch.randperm(48, generator=torch.Generator().manual_seed(step))[:16]
        loss_fn(moved[ids], moved[ids], ids)
    label = detector.clusters.labels[1]
    assert torch.equal(
        label.unsqueeze(0) == label.unsqueeze(1),
        (torch.arange(48) % 4).unsqueeze(0) == (torch.arange(48) % 4).unsqueeze(1),
    )
    torch.testing.assert_close(detector.clusters.tree.features, moved)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"radii": (-0.5, 0.7)}, "must be above 0"),
        (
            {"radii": (0.5,), "levels": 3},
            "one for each of the levels 2 to 3",
        ),
        ({"min_samples": 0}, "must be at least 1"),
        ({"levels": 0}, r"`levels` \(=0\) must be at least 1"),
        ({"min_samples": 49}, "at most the number of samples"),
    ],
)
def test_a_start_that_cannot_work_is_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Hierarchy(num_samples=48, **wrong)


def test_merging_follows_the_features_once_an_epoch() -> None:
    detector, resumed = (
        Hierarchy(num_samples=48, warmup_epochs=0),
        Hierarchy(num_samples=48, warmup_epochs=0),
    )
    detector.set_progress(0, 9)
    detector.refresh(clumps(), 0.0)
    start = detector.radii.values
    detector.collect(
        torch.arange(48),
        clumps(seed=1) + 0.5 * torch.randn(48, 6, generator=torch.Generator().manual_seed(0)),
    )
    detector.set_progress(0, 9)
    assert detector.radii.values == start, (
        "an epoch that goes on after an interruption is the same epoch"
    )
    detector.set_progress(1, 9)
    assert start is not None
    assert detector.radii.values is not None
    assert detector.radii.values[1] > start[1]
    resumed.load_state_dict(detector.state_dict())
    detector.collect(torch.arange(48), clumps(seed=2))
    resumed.collect(torch.arange(48), clumps(seed=2))
    resumed.set_progress(1, 9)
    assert resumed.radii.values == detector.radii.values
    assert resumed.clusters.merge_similarity == detector.clusters.merge_similarity


def test_radii_and_merging_fit_the_embeddings_it_starts_from() -> None:
    detector, loaded = Hierarchy(num_samples=48), Hierarchy(num_samples=48)
    detector.refresh(clumps(), 0.0)
    radii = detector.radii.values
    assert radii is not None
    assert 0 < radii[0] < radii[1] < 1
    loaded.load_state_dict(detector.state_dict())
    for each in (detector, loaded):
        each.collect(torch.arange(48), clumps(seed=1))
        assert each.clusters.merge_similarity == pytest.approx(
            [max(1 - 0.75 * r * r, 0.95 * (1 - r * r / 2)) for r in radii]
        )
    assert torch.equal(detector.clusters.labels, loaded.clusters.labels)
    fixed = Hierarchy(num_samples=48, merge_similarity=(0.9, 0.7))
    fixed.refresh(clumps(), 0.0)
    fixed.collect(torch.arange(48), clumps(seed=1))
    assert fixed.clusters.merge_similarity == (0.9, 0.7)


def test_metrics_are_those_of_the_current_levels() -> None:
    assert Hierarchy(num_samples=8).metrics == {}
    assert started().metrics == {"conforming": 1.0, "clustered": 1.0, "largest_cluster": 5 / 8}
    assert StartAt(started(), epoch=0).metrics == started().metrics


def test_find_reads_and_the_queue_s_new_ids_are_seen() -> None:
    detector, block = started(), random_block(0, [0, 1, 5])
    state = copy.deepcopy(detector.state_dict())
    first = kin(detector, block).clone()
    assert all(torch.equal(value, state[name]) for name, value in detector.state_dict().items())
    block.candidate_ids.copy_(torch.tensor([5, 5, 5, 5, 0, 0]))
    assert not torch.equal(kin(detector, block), first)


def test_save_load_continue_equals_uninterrupted() -> None:
    z = clumps()
    whole, loaded = (
        Hierarchy(num_samples=48, radii=(0.3, 0.6)),
        Hierarchy(num_samples=48, radii=(0.3, 0.6)),
    )
    whole.refresh(z, 0.0)
    loaded.load_state_dict(whole.state_dict())
    for detector in (whole, loaded):
        for step in range(10):
            ids = torch.randperm(48, generator=torch.Generator().manual_seed(step))[:16]
            detector.collect(ids, clumps(seed=1)[ids])
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in whole.state_dict().items()
    )


def test_gradient_and_cold_coarse_input() -> None:
    z = torch.randn(
        2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    for action in ACTIONS:
        loss_fn = NTXentLoss(temperature=0.5, detector=started(level=2), action=action).eval()
        assert torch.autograd.gradcheck(lambda x, f=loss_fn: f(x[0], x[1], torch.arange(8)), (z,))
    coarse = z.detach().bfloat16().requires_grad_()
    loss = NTXentLoss(temperature=0.01, detector=started(), action="reweight").bfloat16()(
        coarse[0], coarse[1], torch.arange(8)
    )
    loss.backward()
    assert loss.isfinite()
    assert coarse.grad is not None
    assert coarse.grad.isfinite().all()


def _steps(folder: str, ranks: slice) -> dict[str, Tensor]:
    detector, z = Hierarchy(num_samples=48), clumps()
    detector.refresh(z, 0.0)
    loss_fn = NTXentLoss(temperature=0.1, detector=detector)
    for step in range(5):
        ids = torch.randperm(48, generator=torch.Generator().manual_seed(step))[:12]
        own = torch.cat([(ids[:8], ids[8:])[rank] for rank in range(2)[ranks]])
        loss_fn(clumps(seed=1)[own], clumps(seed=2)[own], own)
    return dict(detector.state_dict())


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(_steps(folder, slice(rank, rank + 1)), f"{folder}/{rank}.pt")
    end_rank()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    spawn(_child, (str(tmp_path),), nprocs=2)
    alone = _steps(str(tmp_path), slice(None))
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            assert torch.equal(value, alone[name]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 4}, r"`level` \(=4\) must be in \[1, 3\]"),
        ({"warmup_epochs": -1}, "`warmup_epochs`"),
        ({"radii": (0.5,), "levels": 3}, "`radii`"),
        ({"merge_similarity": (0.5,)}, "`merge_similarity`"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hierarchy(num_samples=8, **arguments)


def test_refresh_wants_all_samples_and_the_call_is_shown() -> None:
    for features in (None, torch.zeros(7, 2)):
        with pytest.raises(ValueError, match="all samples in data-set order"):
            Hierarchy(num_samples=8).refresh(features, 0.0)
    detector = Hierarchy(num_samples=8, levels=4, level=2)
    assert repr(eval(repr(detector))) == repr(detector)
