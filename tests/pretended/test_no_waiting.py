"""On an accelerator no step of any loss, detector and action waits for the device or mixes devices;
the values are those of a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import Ring
from kinfolk.objectives import FastCLIPLoss, NTXentLoss
from kinfolk.objectives.base import READ_EVERY
from kinfolk.pairs import ACTIONS, Action, two_views
from tests.cover import cover
from tests.methods import DETECTORS, LABELS, LOSSES, N
from tests.pretended.device import AVAILABLE, LOG, OnDevice, on_device, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
B, D = 12, 6


def made(loss: str, detector: str, action: Action) -> Any:
    torch.manual_seed(0)
    found = DETECTORS[detector]()
    if found is not None and found.due(0) and not found.collects:
        found.refresh(
            torch.nn.functional.normalize(
                torch.randn(N, D, generator=torch.Generator().manual_seed(3)), dim=1
            ),
            0.5,
        )
    loss_fn: Any = LOSSES[loss](temperature=0.3, detector=found, action=action)
    loss_fn.set_eval_labels(LABELS)
    return loss_fn


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    one, other = torch.randn(2, B, D, generator=g)
    return one, other, torch.randperm(N, generator=g)[:B]


def answer(detector: str) -> str:
    """The kind of answer that a detector gives."""
    if detector == "none" or "soft" in detector or "degrees" in detector:
        return "none" if detector == "none" else "degrees"
    leveled = ("ifnd", "neighbours", "hierarchy", "union")
    return "levels" if detector.partition(",")[0] in leveled else "flags"


def cases() -> list[tuple[str, str, Action]]:
    """Every loss with every action and every kind of answer (none, flags, degrees, several levels),
    every detector with every action that it can have."""
    found = [
        (loss, detector, action)
        for loss in LOSSES
        for detector in DETECTORS
        for action in ACTIONS
        if (detector != "none" or action == ACTIONS[0])
        and ("soft" not in detector or action != ACTIONS[0])
    ]

    def parts(case: tuple[str, str, Action]) -> set[tuple[str, str]]:
        loss, detector, action = case
        return {(loss, answer(detector)), (detector, action), (loss, action)}

    return cover(found, parts)


@pytest.mark.parametrize(("loss", "detector", "action"), cases())
def test_a_step_waits_for_nothing(loss: str, detector: str, action: Action) -> None:
    here = made(loss, detector, action)
    with pretended():
        there = copy.deepcopy(here).to("cuda")
    for step in range(2):
        *views, ids = batch(step)
        views = [view.requires_grad_() for view in views]
        torch.manual_seed(step)
        expected = here(*views, ids)
        expected.backward()
        with pretended():
            moved = [on_device(view, requires_grad=True) for view in views]
            moved_ids = on_device(ids)
            LOG.reset()
            torch.manual_seed(step)
            found = there(*moved, moved_ids)
            found.backward()
            assert not LOG.waits
        if detector == "ring, drawn":
            continue  # another device draws others
        torch.testing.assert_close(found.held, expected, rtol=1e-5, atol=1e-6)
        for view, other in zip(views, moved, strict=True):
            assert isinstance(other.grad, OnDevice)
            torch.testing.assert_close(other.grad.held, view.grad, rtol=1e-4, atol=1e-6)
    counts = [one.stats.counts for one in (here, there)]
    if detector != "ring, drawn":
        assert isinstance(counts[1], OnDevice)
        torch.testing.assert_close(counts[1].held[:5], counts[0][:5])


@pytest.mark.parametrize("action", ["attract", "reweight"])
@pytest.mark.parametrize("loss", ["ntxent", "prior", "sogclr"])
def test_a_teacher_that_sees_other_embeddings_waits_for_nothing(loss: str, action: Action) -> None:
    """The degrees come from the teacher's embeddings of the samples, as `simclr+teacher` has
    them."""
    here = made(loss, "teacher, soft", action)
    one, other, ids = batch(0)
    taught = torch.nn.functional.normalize(batch(7)[0], dim=1)
    losses = []
    for guide in (None, taught):
        pairs = two_views(one, other, ids)
        pairs = (
            pairs
            if guide is None
            else replace(pairs, guide=guide, candidate_guide=guide.repeat_interleave(2, 0))
        )
        losses.append(copy.deepcopy(here).on(pairs))
    assert abs(losses[1] - losses[0]) > 1e-3
    with pretended():
        there = copy.deepcopy(here).to("cuda")
        moved = [on_device(view, requires_grad=True) for view in (one, other)]
        guide, moved_ids = on_device(taught), on_device(ids)
        LOG.reset()
        pairs = replace(
            two_views(moved[0], moved[1], moved_ids),
            guide=guide,
            candidate_guide=guide.repeat_interleave(2, 0),
        )
        found = there.on(pairs)
        found.backward()
        assert not LOG.waits
    torch.testing.assert_close(found.held, losses[1], rtol=1e-5, atol=1e-6)


def test_a_broken_step_leaves_no_trace() -> None:
    """The device keeps what was there, without being asked whether the loss is finite."""
    loss_fn = made("sogclr", "glofnd", "eliminate")
    with pretended():
        loss_fn.to("cuda")
        one, other, ids = (on_device(x) for x in batch(0))
        loss_fn(one, other, ids)
        before = {
            name: value.held.clone()
            for name, value in loss_fn.state_dict().items()
            if isinstance(value, OnDevice)
        }
        LOG.reset()
        loss_fn(one * torch.nan, other, ids)
        assert not LOG.waits
        after = loss_fn.state_dict()
    assert before
    assert all(torch.equal(value, after[name].held) for name, value in before.items())


def test_a_broken_step_does_not_reach_a_hierarchy() -> None:
    """Its embeddings are finite, its loss is not: the host learns that with the copy of the
    embeddings, when the next step begins."""
    loss_fn = made("ntxent", "hierarchy", "eliminate")
    with pretended():
        loss_fn.to("cuda")
        one, _, ids = (on_device(x) for x in batch(0))
        before = copy.deepcopy(loss_fn.state_dict())
        detector = loss_fn.detector
        detector.collect(ids, one, is_finite=on_device(torch.tensor(False)))
        assert all(
            torch.equal(getattr(value, "held", value), before[name])
            for name, value in loss_fn.state_dict().items()
        )
        detector.collect(ids, one, is_finite=on_device(torch.tensor(True)))
        assert not torch.equal(
            loss_fn.state_dict()["detector.clusters.tree.features"],
            before["detector.clusters.tree.features"],
        )
        tree = detector.clusters.tree
        assert torch.equal(detector.clusters.labels.held, tree.labels_of(torch.arange(N))), (
            "looked up on the device and on the host"
        )


def test_the_loss_of_an_annealed_ring_is_read_once_in_a_while() -> None:
    detector = Ring(lower=0.3, upper=0.8, anneal="loss", anneal_epochs=1)
    loss_fn = NTXentLoss(temperature=0.3, detector=detector)
    with pretended():
        loss_fn.to("cuda")
        for step in range(2 * READ_EVERY):
            loss_fn.set_progress(step // READ_EVERY, 2)
            one, other, ids = (on_device(x) for x in batch(step))
            LOG.reset()
            loss_fn(one, other, ids)
            assert bool(LOG.waits) == (step % READ_EVERY == READ_EVERY - 1)
    assert int(detector.anneal.counted[1]) == READ_EVERY
    assert detector.lower > 0


def test_the_temperature_is_read_once_in_a_while() -> None:
    loss_fn = FastCLIPLoss(num_samples=N, temperature=0.02)
    with pretended():
        loss_fn.to("cuda")
        LOG.reset()
        assert [round(loss_fn.temperature_lr_factor, 2) for _ in range(READ_EVERY)] == [
            0.33
        ] * READ_EVERY
        assert sum(LOG.waits.values()) == 1
