"""LA equals the loops over its equation, with clusters of the bank and the nearest of it as
background."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.detectors import FNC, Oracle, StartAt
from kinfolk.frameworks import IR, LA
from tests.frameworks.steps import assert_writes_nothing
from tests.reference import multiview, queues

NUM_SAMPLES, BATCH, T = 40, 6, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 4


def made(kind: Any = LA, **more: Any) -> Any:
    torch.manual_seed(0)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    usual = (
        {"num_clusters": 6, "num_clusterings": 2, "warmup_epochs": 0}
        if kind is LA and "detector" not in more
        else {}
    )
    return kind(encoder, head, NUM_SAMPLES, **{"temperature": T, **usual, **more}).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    # some twice
    return torch.randn(1, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randint(
        12, (size,), generator=g
    )


@pytest.mark.parametrize("num_background", [3, 12, 4096])
def test_it_is_equation_5_with_the_clusters_of_the_bank(num_background: int) -> None:
    framework = made(num_background=num_background)
    optimizer = torch.optim.SGD(framework.parameters(), lr=0.1)
    bank = framework.bank.features.clone()
    for step in range(4):
        assert framework.due(step)
        framework.refresh(framework.bank.features, step / 4)
        clusterings = framework.detectors[0].detector.clusters.labels.tolist()
        assert all(max(labels) < 6 for labels in clusterings)
        views, ids = batch(step)
        z = framework.head(framework.encoder(views[0]))
        slow = multiview.la(z, ids.tolist(), bank, clusterings, num_background, T)
        expected = torch.autograd.grad(
            slow, list(framework.encoder.parameters()), retain_graph=True
        )
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, slow)
        torch.testing.assert_close([p.grad for p in framework.encoder.parameters()], list(expected))
        bank = queues.written(bank, ids.tolist(), z.detach(), 0.5)
        torch.testing.assert_close(framework.bank.features, bank)
        optimizer.step()
    assert framework.stats.flagged > 0


def test_without_close_neighbours_it_is_instance_discrimination() -> None:
    base = made(IR, num_negatives=None)
    early, alone = made(num_background=3, warmup_epochs=2), made(num_background=None)
    early.refresh(early.bank.features, 0.0)
    early.set_progress(1, 4)
    for step in range(3):
        expected = base(*batch(step))
        torch.testing.assert_close(early(*batch(step)), expected, msg="the warm-up")
        torch.testing.assert_close(alone(*batch(step)), expected, msg="never clustered")
    assert [early.due(epoch) for epoch in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("action", ["eliminate", "reweight"])
@pytest.mark.parametrize("detector", [Oracle(LABELS), FNC(alpha=0.2)])
def test_another_detector_takes_the_place_of_the_neighbours(detector: Any, action: Any) -> None:
    la, ir = (
        made(kind, detector=detector, action=action, **more)
        for kind, more in ((LA, {}), (IR, {"num_negatives": None}))
    )
    torch.testing.assert_close(la(*batch(0)), ir(*batch(0)), msg="kin that are not attracted")
    assert la.stats.flagged > 0


def test_attracted_kin_of_another_detector_are_the_close_neighbours() -> None:
    framework = made(detector=Oracle(LABELS), action="attract")
    views, ids = batch(0)
    z, bank = framework.head(framework.encoder(views[0])), framework.bank.features.clone()
    slow = multiview.la(z, ids.tolist(), bank, [LABELS.tolist()], NUM_SAMPLES, T)
    torch.testing.assert_close(framework(views, ids), slow)


def test_the_default_attracts_whatever_the_grammar_says() -> None:
    framework = made(action="eliminate")
    assert framework.objective.action == "attract"
    assert isinstance(framework.detectors[0], StartAt)


def test_the_gradient_is_right() -> None:
    framework = made(num_background=12).eval()
    framework.refresh(framework.bank.features, 0.0)
    views, ids = batch(1, size=3)
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_evaluation_and_broken_steps_write_nothing() -> None:
    framework = made(num_background=12)
    framework.refresh(framework.bank.features, 0.0)
    framework(*batch(0))
    assert_writes_nothing(framework, *batch(1))


def test_saved_and_continued_is_the_same() -> None:
    def trained(framework: LA, steps: range) -> LA:
        optimizer = torch.optim.SGD(framework.parameters(), lr=0.1)
        for step in steps:
            framework.refresh(framework.bank.features, step / 4)
            optimizer.zero_grad()
            framework(*batch(step)).backward()
            optimizer.step()
        return framework

    whole, first, again = trained(made(), range(4)), trained(made(), range(2)), made()
    again.load_state_dict(first.state_dict())
    ours, theirs = trained(again, range(2, 4)).state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`warmup_epochs` \(=-1\) must be at least 0"):
        made(warmup_epochs=-1)
    with pytest.raises(ValueError, match=r"`num_clusters` \(=40\)"):
        made(num_clusters=40)


def test_a_warm_up_as_long_as_the_training_has_no_neighbours() -> None:
    framework = made(warmup_epochs=3)
    framework.set_progress(0, 4)
    assert framework.silent_reason() is None
    framework.set_progress(0, 3)
    assert (
        framework.silent_reason()
        == "the detector starts in epoch 3, counted from 0, of 3; start it earlier"
    )
