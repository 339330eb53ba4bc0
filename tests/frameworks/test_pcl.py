"""PCL equals the loops over its equation on a queue and on the batch; warm-up, acceptance, state,
ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk.detectors import IFND, Oracle
from kinfolk.errors import KinfolkWarning
from kinfolk.frameworks.pcl import PCL, Prototypes
from tests.ranks import end_rank, spawn
from tests.reference import losses, queues
from tests.reference import prototypes as slow

N, T, LEVELS = 40, 0.3, (3, 6)
LABELS = torch.arange(N) % 4
SIZES = (3, 5)


def made(queue_size: int = 16, warmup_epochs: int = 1, seed: int = 0, **more: Any) -> PCL:
    torch.manual_seed(seed)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    framework = PCL(
        encoder,
        head,
        N,
        LEVELS,
        warmup_epochs,
        queue_size=queue_size,
        momentum=0.9,
        temperature=T,
        clip=0.0,
        **more,
    ).double()
    framework.set_progress(1, 4)
    return framework


def embeddings(seed: int = 0) -> Tensor:
    return nn.functional.normalize(
        torch.randn(N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def batch(step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(2, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randperm(
        N, generator=g
    )[:size]


def term(framework: PCL, anchors: Tensor, ids: list[int]) -> Tensor:
    """The prototype term from the framework's own clusters."""
    total = torch.zeros((), dtype=torch.float64)
    labels = framework.prototypes.clusters.labels
    for level in range(len(LEVELS)):
        centroids = framework.prototypes.clusters.level(level)
        phi = slow.concentration(embeddings(), labels[level].tolist(), centroids, T, 10.0)
        total = total + slow.prototype_term(
            anchors, centroids, phi, labels[level][ids].tolist()
        ) / len(LEVELS)
    return total


def test_on_a_queue_it_is_infonce_and_the_prototypes() -> None:
    framework = made()
    framework.queue.push(F.normalize(torch.randn(9, 5), dim=1), torch.arange(9))
    views, ids = batch(0)
    queries, keys = framework.head(framework.encoder(views[0])), framework.slow(views[1])
    held = [
        (v.double() / v.norm(), int(i)) for v, i in zip(*framework.queue.entries(), strict=True)
    ]
    info = queues.moco(queries, keys, ids.tolist(), held, T)
    torch.testing.assert_close(copy.deepcopy(framework)(views, ids), info)
    framework.refresh(embeddings(), 0.25)
    expected = info + term(framework, queries, ids.tolist())
    loss = framework(views, ids)
    torch.testing.assert_close(loss, expected)
    wanted = list(framework.encoder.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)
    )
    assert len(framework.queue) == 15


def test_on_the_batch_both_views_are_anchors() -> None:
    framework = made(queue_size=0)
    assert not any("slow" in name or "queue" in name for name in framework.state_dict())
    views, ids = batch(0)
    framework.refresh(embeddings(), 0.25)
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    expected = losses.ntxent(z1, z2, T) + term(
        framework, torch.cat((z1, z2)), [*ids.tolist(), *ids.tolist()]
    )
    torch.testing.assert_close(framework(views, ids), expected)


def test_the_gradient_is_right() -> None:
    framework = made(detector=Oracle(LABELS), action="attract").eval()
    framework.queue.push(F.normalize(torch.randn(9, 5), dim=1), torch.arange(9) * 3)
    framework.refresh(embeddings(), 0.5)
    views, ids = batch(1, size=3)
    assert torch.autograd.gradcheck(
        lambda x: framework(torch.stack((x, views[1])), ids), (views[0].requires_grad_(),)
    )


def test_in_the_warm_up_it_is_infonce_alone() -> None:
    framework = made(warmup_epochs=3, queue_size=0)
    assert [framework.due(epoch) for epoch in range(6)] == [False, False, False, True, True, True]
    assert [made(every=2).due(epoch) for epoch in range(6)] == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    views, ids = batch(0)
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    torch.testing.assert_close(framework(views, ids), losses.ntxent(z1, z2, T))


def test_what_is_clustered_is_the_momentum_encoders() -> None:
    for queue_size, same in ((16, False), (0, True)):
        framework = made(queue_size).eval()
        with torch.no_grad():
            framework.encoder[1].weight.mul_(-1)  # type: ignore[index]
        images = batch(0)[0][0]
        online = nn.functional.normalize(framework.head(framework.encoder(images)), dim=1)
        assert torch.equal(framework.embed(images), online) is same
        assert torch.equal(framework.features(images), framework.encoder(images))


@pytest.mark.parametrize("confidence", ["cluster", "sample"])
def test_only_accepted_samples_have_a_prototype(confidence: Any) -> None:
    framework = made(queue_size=0, schedule="linear", final_rate=0.8, confidence=confidence)
    framework.refresh(embeddings(), 0.5)
    accepted, labels = framework.prototypes.accepted, framework.prototypes.clusters.distinct
    # 0.8 · 2/3 of 40: half of four epochs are two of the three that it grows in
    assert accepted.sum(1).tolist() == [21, 21]
    for level in range(2):
        rest = labels[level][~accepted[level]]
        assert len(set(rest.tolist())) == len(rest), "each alone"
        assert not set(rest.tolist()) & set(labels[level][accepted[level]].tolist())
    outside = (~accepted.any(0)).nonzero()[:4, 0]
    views, _ = batch(0, size=4)
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    torch.testing.assert_close(framework(views, outside), losses.ntxent(z1, z2, T))
    if confidence == "cluster":
        phi = framework.prototypes.concentration[:3][framework.prototypes.clusters.labels[0]]
        assert phi[accepted[0]].max() <= phi[~accepted[0]].min()
    else:
        unit = nn.functional.normalize(framework.prototypes.clusters.level(0), dim=1)
        share = (embeddings() @ unit.T / T).softmax(1).max(1).values
        assert share[accepted[0]].min() >= share[~accepted[0]].max() - 1e-6


def test_the_last_clustering_of_a_linear_schedule_has_the_final_rate() -> None:
    framework = made(warmup_epochs=1, every=3, schedule="linear", final_rate=0.8)
    framework.set_progress(4, 6)
    assert [epoch for epoch in range(6) if framework.due(epoch)] == [1, 4]
    framework.refresh(embeddings(), 4 / 6)
    assert framework.prototypes.accepted.sum(1).tolist() == [32, 32]


def test_drawn_prototypes_are_new_at_every_step_and_the_same_on_resume() -> None:
    framework = made(queue_size=0, num_prototypes=2)
    framework.refresh(embeddings(), 0.5)
    views, ids = batch(0)
    again = made(queue_size=0, num_prototypes=2, seed=1)
    first = [framework(views, ids).item() for _ in range(3)]
    again.load_state_dict(framework.state_dict())
    later = [framework(views, ids).item() for _ in range(3)]
    assert len({*first, *later}) > 2
    assert [again(views, ids).item() for _ in range(3)] == later
    assert framework.eval()(views, ids).item() == framework(views, ids).item()


def train(framework: PCL, steps: range) -> list[float]:
    optimizer, found = (
        torch.optim.SGD([p for p in framework.parameters() if p.requires_grad], lr=0.1),
        [],
    )
    for step in steps:
        framework.set_progress(step // 2, 4)
        if step % 2 == 0 and framework.due(step // 2):
            framework.refresh(embeddings(step), step / 8)
        optimizer.zero_grad()
        loss = framework(*batch(step))
        loss.backward()
        optimizer.step()
        framework.after_step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("queue_size", [16, 0])
def test_save_load_continue_equals_uninterrupted(queue_size: int) -> None:
    whole, first, second = (made(queue_size, seed=seed) for seed in (0, 0, 1))
    expected = train(whole, range(8))
    train(first, range(5))
    second.load_state_dict(first.state_dict())
    assert train(second, range(5, 8)) == expected[5:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_degenerate_clusters_stay_finite() -> None:
    """Fewer distinct samples than clusters: some hold equal samples, some are empty."""
    for queue_size in (16, 0):
        framework = made(queue_size)
        framework.refresh(embeddings()[torch.arange(N) % 2], 0.5)
        loss = framework(*batch(0))
        loss.backward()
        assert loss.isfinite()
        assert all(
            p.grad is not None and p.grad.isfinite().all() for p in framework.encoder.parameters()
        )


def test_defaults_are_those_of_the_paper_and_wrong_arguments_are_named() -> None:
    wrong: dict[str, Any] = {
        "every": 0,
        "warmup_epochs": -1,
        "final_rate": 2.0,
        "schedule": "never",
        "num_prototypes": 0,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            made(**{name: value})
    with pytest.raises(ValueError, match="`confidence`"):
        made(confidence="none")
    with pytest.warns(KinfolkWarning, match="not smaller than the data set"):
        made(queue_size=N)
    with pytest.warns(KinfolkWarning, match="there will be no prototypes"):
        made(warmup_epochs=4)
    with pytest.raises(ValueError, match=r"`detector.space` \(='features'\) must be 'projected'"):
        made(detector=IFND(num_samples=N, space="features"))
    defaults = PCL(nn.Flatten(), nn.Linear(12, 5), 1000, queue_size=10).prototypes
    assert isinstance(defaults, Prototypes)
    assert defaults.clusters.num_clusters == (20, 40, 80)


def two_steps(
    module: nn.Module, framework: PCL, parts: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    out: dict[str, Any] = {"loss": [], "gradient": []}
    for step, (views, ids) in enumerate(parts):
        framework.refresh(embeddings(step), 0.5)
        framework.zero_grad()
        loss = module(views, ids)
        loss.backward()
        out["loss"].append(loss.item())
        out["gradient"].append(
            [p.grad.clone() for p in framework.encoder.parameters() if p.grad is not None]
        )
    return {**out, "state": {name: value.clone() for name, value in framework.state_dict().items()}}


def arguments(queue_size: int) -> dict[str, Any]:
    return {
        "queue_size": queue_size,
        "num_prototypes": 4,
        "schedule": "linear",
        "detector": Oracle(LABELS),
    }


def on_rank(rank: int, folder: str, queue_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SIZES)
    )
    framework = made(**arguments(queue_size))
    buffers = [name for name, _ in framework.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(framework, buffers)  # type: ignore[no-untyped-call]
    parts = []
    for step in range(3):
        views, ids = batch(step, sum(SIZES))
        parts.append(
            (torch.split(views, list(SIZES), 1)[rank], torch.split(ids, list(SIZES))[rank])
        )
    torch.save(
        two_steps(DistributedDataParallel(framework), framework, parts), f"{folder}/{rank}.pt"
    )
    end_rank()


@pytest.mark.parametrize("queue_size", [16, 0])
def test_two_ranks_equal_one(queue_size: int, tmp_path: Path) -> None:
    spawn(on_rank, (str(tmp_path), queue_size), nprocs=len(SIZES))
    framework = made(**arguments(queue_size))
    expected = two_steps(framework, framework, [batch(step, sum(SIZES)) for step in range(3)])
    for rank in range(len(SIZES)):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name in ("loss", "gradient", "state"):
            torch.testing.assert_close(found[name], expected[name])
