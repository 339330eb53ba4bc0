"""MoCo equals the loops over its equation, step after step; its queue, its copy, and what it warns
of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors import FNC, IFND, Detector, GloFND, Oracle
from kinfolk.errors import KinfolkWarning
from kinfolk.frameworks import MoCo
from kinfolk.pairs import ACTIONS
from tests.reference import detection, queues

NUM_SAMPLES, BATCH, T = 40, 6, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 4


def made(queue_size: int = 16, momentum: float = 0.9, **more: Any) -> MoCo:
    torch.manual_seed(0)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    return MoCo(encoder, head, NUM_SAMPLES, queue_size, momentum, T, **more).double()


@pytest.mark.parametrize("which", ["query", "momentum"])
def test_who_embeds_the_samples_for_a_clustering_is_a_choice(which: Any) -> None:
    framework, (views, _) = (
        made(cluster_encoder=which, detector=IFND(num_samples=NUM_SAMPLES, num_clusters=4)),
        batch(0),
    )
    with torch.no_grad():
        for parameter in framework.encoder.parameters():
            parameter.add_(0.5)
    model: Any = framework.refresh_model
    encoder = framework.encoder if which == "query" else framework.slow.encoder
    head = framework.head if which == "query" else framework.slow.head
    assert torch.equal(model.features(views[0]), encoder(views[0]))
    assert torch.equal(model.embed(views[0]), F.normalize(head(encoder(views[0])), dim=1))
    assert not torch.equal(
        encoder(views[0]),
        (framework.slow.encoder if which == "query" else framework.encoder)(views[0]),
    )
    with pytest.raises(
        ValueError, match=r"`cluster_encoder` \(='key'\) must be one of query, momentum"
    ):
        made(cluster_encoder="key")


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Views and ids; samples come again after few steps, so that their old keys are in the
    queue."""
    g = torch.Generator().manual_seed(step)
    return torch.randn(2, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randperm(
        12, generator=g
    )[:size]


def rows(features: Tensor, ids: Tensor) -> queues.Entries:
    return [(v.detach() / v.detach().norm(), int(i)) for v, i in zip(features, ids, strict=True)]


@pytest.mark.parametrize("queue_size", [4, 16, 30])
@pytest.mark.parametrize("symmetric", [False, True])
def test_it_is_equation_4_with_the_keys_of_earlier_batches(
    queue_size: int, symmetric: bool
) -> None:
    """Loss and gradient, over steps in which the queue fills, wraps and is smaller than a batch."""
    framework, queue = made(queue_size, symmetric=symmetric), list[tuple[Tensor, int]]()
    optimizer = torch.optim.SGD([p for p in framework.parameters() if p.requires_grad], lr=0.1)
    for step in range(8):
        views, ids = batch(step)
        queries = [framework.head(framework.encoder(view)) for view in views]
        keys = [framework.slow(view) for view in views]
        entering = rows(keys[1], ids)
        if symmetric:
            entering = [
                row
                for pair in zip(rows(keys[1], ids), rows(keys[0], ids), strict=True)
                for row in pair
            ]
        candidates = queue or entering
        slow = queues.moco(queries[0], keys[1], ids.tolist(), candidates, T)
        if symmetric:
            slow = (slow + queues.moco(queries[1], keys[0], ids.tolist(), candidates, T)) / 2
        expected = torch.autograd.grad(slow, list(framework.encoder.parameters()))
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, slow)
        torch.testing.assert_close([p.grad for p in framework.encoder.parameters()], list(expected))
        queue = queues.pushed(queue, queue_size, entering)
        held, held_ids = framework.queue.entries()
        assert sorted(held_ids.tolist()) == sorted(i for _, i in queue)
        torch.testing.assert_close(held.sum(0), torch.stack([v for v, _ in queue]).sum(0))
        optimizer.step()
        framework.after_step()


def test_an_own_old_key_is_never_a_negative() -> None:
    framework = made()
    views, ids = batch(0)
    framework.queue.push(F.normalize(torch.randn(3, 5), dim=1), torch.tensor([20, 21, 22]))
    before = framework.eval()(views, ids)
    framework.queue.push(F.normalize(framework.slow(views[1]), dim=1), ids)
    assert framework(views, ids) > before, "the others' keys are negatives"
    single = framework(views[:, :1], ids[:1])
    framework.queue.ids[3] = 23  # as if it were another's
    assert framework(views[:, :1], ids[:1]) > single


def kin_of(name: str, sims: list[list[float]], ids: Tensor, entries: list[int]) -> list[set[int]]:
    """Columns of the kin of each anchor, by loops; the anchor's own are −inf."""
    if name == "fnc":  # a quarter of the queue's negatives, not of the batch's
        return [detection.fnc(row, round(0.25 * sum(s > -2 for s in row))) for row in sims]
    if name == "glofnd":
        thresholds = [detection.Threshold(value=0.3) for _ in sims]
        return [
            x.visit(torch.tensor([row], dtype=torch.float64), 0.2, 0.5, None)[0]
            for x, row in zip(thresholds, sims, strict=True)
        ]
    return [{j for j, other in enumerate(entries) if LABELS[other] == LABELS[i]} for i in ids]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["fnc", "glofnd", "oracle"])
def test_detectors_look_at_the_queue(name: str, action: Any) -> None:
    glofnd = GloFND(num_samples=NUM_SAMPLES, alpha=0.2, rule="sgd", lr=0.5)
    glofnd.store.threshold.fill_(0.3)
    detectors: dict[str, Detector] = {
        "fnc": FNC(alpha=0.25),
        "glofnd": glofnd,
        "oracle": Oracle(LABELS),
    }
    framework = made(detector=detectors[name], action=action, kin_weight=0.25)
    framework.set_eval_labels(LABELS)
    for step in range(3):
        framework.queue.push(F.normalize(framework.slow(batch(step)[0][1]), dim=1), batch(step)[1])
    views, ids = batch(3)
    queries, keys = framework.head(framework.encoder(views[0])), framework.slow(views[1])
    held, held_ids = (x.clone() for x in framework.queue.entries())
    entries = rows(held, held_ids)
    sims = [
        [float("-inf") if i == j else (q @ v / q.norm()).item() for v, j in entries]
        for q, i in zip(queries, ids, strict=True)
    ]
    kin = kin_of(name, sims, ids, held_ids.tolist())
    kin = [
        {j for j in mine if int(held_ids[j]) != int(i)} for mine, i in zip(kin, ids, strict=True)
    ]
    degree = 0.75 if action == "reweight" else 1.0
    slow = queues.moco(
        queries, keys, ids.tolist(), entries, T, lambda i, j: degree * (j in kin[i]), action
    )
    torch.testing.assert_close(framework(views, ids), slow)
    assert framework.stats.counts[1] == sum(map(len, kin)) > 0


def test_the_gradient_is_right() -> None:
    framework = made(detector=Oracle(LABELS), action="attract").eval()
    framework.queue.push(F.normalize(torch.randn(9, 5), dim=1), torch.arange(9) * 3 % 12)
    views, ids = batch(1, size=3)
    assert torch.autograd.gradcheck(
        lambda x: framework(torch.stack((x, views[1])), ids), (views[0].requires_grad_(),)
    )


def test_evaluation_writes_nothing() -> None:
    framework = made(detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.2))
    framework(*batch(0))
    before = {name: value.clone() for name, value in framework.state_dict().items()}
    framework.eval()
    framework(*batch(1))
    assert all(torch.equal(value, before[name]) for name, value in framework.state_dict().items())


def test_a_broken_step_stays_out_of_the_queue() -> None:
    framework = made()
    framework(*batch(0))
    views, ids = batch(1)
    views[0, 2] = torch.nan
    assert framework(views, ids).isnan()
    assert framework.queue.entries()[0].isfinite().all()
    assert len(framework.queue) == BATCH


def test_the_state_loads_strictly_and_goes_on() -> None:
    one, other = made(), made()
    for step in range(3):
        one(*batch(step))
        one.after_step()
    assert {
        "queue.features",
        "queue.ids",
        "queue.pointer",
        "queue.filled",
        "slow.head.weight",
    } <= one.state_dict().keys()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(*batch(3)), other(*batch(3)))
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )
    with pytest.raises(RuntimeError, match="has the size 16 × 5, but `size` × `dim` is 17 × 5"):
        made(17).load_state_dict(one.state_dict())


@pytest.mark.parametrize("queue_size", [NUM_SAMPLES, 65536])
def test_a_queue_not_smaller_than_the_data_is_warned_of(queue_size: int) -> None:
    with pytest.warns(
        KinfolkWarning,
        match=r"not smaller than the data set \(=40 samples\).*several keys of one sample",
    ):
        made(queue_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(NUM_SAMPLES - 1)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"`queue_size` \(=0\) must be at least 1"):
        made(0)
    with pytest.raises(ValueError, match=r"`momentum` \(=1.0\) must be in \[0, 1\)"):
        made(momentum=1.0)
