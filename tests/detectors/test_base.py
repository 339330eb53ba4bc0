"""What a detector needs at least; the warm-up: silent, then learning, then flagging."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kinfolk.cli.lists import methods
from kinfolk.detectors import DETECTORS, FNC, IFND, Detector, Found, GloFND, Graded, Guide, Hierarchy, Refreshed, StartAt, Teacher
from kinfolk.detectors.base import Guidance, Guided, Wrapped, guidance_of, set_loss_temperature
from kinfolk.frameworks import SimCLR
from kinfolk.kinship import Interval, Roles
from kinfolk.objectives import NTXent
from kinfolk.pairs import Block
from kinfolk.plugins import register_detector
from tests.detectors.blocks import random_block, step

BLOCK = random_block(0, [0, 1, 2, 3])


class Nearest(Detector):
    """The candidate most similar to each anchor, with `find` alone."""

    def find(self, block: Block) -> Found:
        return Found((Roles(kin=Interval(block.sim_RC.topk(2, 1).values[:, 1])),))


def test_find_is_all_that_a_detector_needs() -> None:
    z, ids = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    framework = SimCLR(torch.nn.Flatten(), torch.nn.Linear(4, 3), detector=StartAt(Nearest(), epoch=1))
    flagged = []
    for epoch in range(2):
        framework.set_progress(epoch, 2)
        assert not framework.due(epoch)
        framework.on_metric("epoch", epoch)
        framework(z.view(2, 6, 4, 1, 1), ids).backward()
        flagged.append(int(framework.stats.counts()[1]))
    assert flagged == [0, 12]
    assert framework.silent_reason() is None
    assert framework.metrics == {}
    expected, loss_fn = NTXent(0.1, detector=FNC(top_k=1)), NTXent(0.1, detector=Nearest())
    torch.testing.assert_close(loss_fn(z[0], z[1]), expected(z[0], z[1]))  # without ids


@pytest.mark.parametrize("wrap", [Graded, lambda detector: StartAt(detector, epoch=1), lambda detector: Graded(StartAt(detector, epoch=0))])
def test_a_wrapper_adds_no_ability(wrap: Callable[[Detector], Wrapped]) -> None:
    wrapped = wrap(Nearest())
    set_loss_temperature(wrapped, 0.1)
    for epoch in range(3):
        wrapped.set_progress(epoch, 3)
        assert not wrapped.due(epoch)
        assert not wrapped.refreshed_at_end
        assert not wrapped.collects
        wrapped.refresh(None, 0.5)  # does nothing
    assert wrapped.space == "projected"
    assert wrapped.wanted_metrics == frozenset()
    assert guidance_of(wrapped) == Guidance()
    assert not {"first_epoch", "loss_temperature"} & set(vars(wrapped) | vars(wrapped.detector))


def test_a_wrapper_has_the_abilities_of_its_detector() -> None:
    inner = IFND(8, space="features", schedule="constant")
    wrapped = Graded(StartAt(inner, epoch=0))
    set_loss_temperature(wrapped, 0.03)
    assert inner.loss_temperature == 0.03
    assert (wrapped.due(0), wrapped.refreshed_at_end, wrapped.space) == (True, True, "features")
    bank = Graded(IFND(8, source="bank"))
    bank.collect(torch.arange(8), torch.eye(8))
    assert bank.collects
    assert guidance_of(Graded(Teacher(own_weight=0.25))) == Guidance(reads="teacher", soft=True, own_weight=0.25)
    assert guidance_of(StartAt(Guide(alpha=0.1), epoch=1)).reads == "modality"
    assert guidance_of(None) == Guidance()


def test_an_ability_without_its_class_is_refused() -> None:
    """Otherwise `refresh` would never be called."""
    with pytest.raises(TypeError, match=r"`Clusters` has `refresh` but does not inherit `Refreshed`: write `class Clusters\(Det"):

        class Clusters(Nearest):
            def refresh(self, features: torch.Tensor | None, progress: float) -> None: ...

    with pytest.raises(TypeError, match="`Listens` has `guidance` but does not inherit `Guided`"):

        class Listens(Nearest):
            guidance = Guidance(soft=True)

    with pytest.raises(TypeError, match="`Gathers` has `collect` but does not inherit `Refreshed`"):

        class Gathers(Nearest):
            def collect(self, ids: torch.Tensor, anchors: torch.Tensor, sound: torch.Tensor | None = None) -> None: ...

    told = Nearest()
    told.__dict__["guidance"] = Guidance(soft=True)
    with pytest.raises(TypeError, match="`Nearest` has `guidance` but does not inherit `Guided`"):
        NTXent(0.1, detector=told)

    class Both(Nearest, Refreshed, Guided):
        guidance = Guidance(soft=True)

        def due(self, epoch: int) -> bool:
            return epoch == 1

        def refresh(self, features: torch.Tensor | None, progress: float) -> None: ...

    framework = SimCLR(torch.nn.Flatten(), torch.nn.Linear(4, 3), detector=Both(), action="attract")
    assert [framework.due(epoch) for epoch in range(3)] == [False, True, False]
    assert guidance_of(framework.objective.detector).soft


def test_a_registered_detector_without_a_paper_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    register_detector("nearest", Nearest)
    try:
        methods()
    finally:
        DETECTORS.pop("nearest")
    assert "nearest" in capsys.readouterr().out


def test_ids_are_needed_where_there_is_a_number_of_samples() -> None:
    class Half(Nearest):
        num_samples = 6

    z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    for detector in (Half(), StartAt(Half(), epoch=3)):
        with pytest.raises(ValueError, match="`ids` must be given"):
            NTXent(0.1, detector=detector)(z[0], z[1])


def at(detector: StartAt, epoch: int) -> torch.Tensor:
    detector.set_progress(epoch, 10)
    return step(detector, BLOCK)


def test_nothing_is_flagged_before_the_epoch() -> None:
    detector = StartAt(FNC(top_k=1), epoch=2)
    assert [bool(at(detector, epoch).any()) for epoch in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("shared", [False, True])
def test_state_moves_from_update_from_and_masks_apply_from_epoch(shared: bool) -> None:
    inner = GloFND(4, alpha=0.3, init="quantile", shared=shared)
    detector = StartAt(inner, epoch=2, update_from=1)
    assert not at(detector, 0).any()
    assert inner.thresholds.tolist() == [1.0] * 4
    assert not at(detector, 1).any()
    assert (inner.thresholds < 1).all()
    assert at(detector, 2).any()


def test_without_update_from_the_state_waits_too() -> None:
    inner = GloFND(4, alpha=0.3, init="quantile")
    detector = StartAt(inner, epoch=2)
    at(detector, 1)
    assert inner.thresholds.tolist() == [1.0] * 4


def test_from_the_start_it_equals_the_wrapped_detector() -> None:
    wrapped, bare = StartAt(GloFND(4, alpha=0.3, init="quantile"), epoch=0), GloFND(4, alpha=0.3, init="quantile")
    for _ in range(3):
        assert torch.equal(step(wrapped, BLOCK), step(bare, BLOCK))
    assert {f"detector.{name}" for name in bare.state_dict()} == set(wrapped.state_dict())


@pytest.mark.parametrize(
    ("detector", "start", "update_from", "due"),
    [
        (Hierarchy(8, warmup_epochs=10), 20, None, [20]),
        (Hierarchy(8, warmup_epochs=10), 20, 15, [15]),
        (Hierarchy(8, warmup_epochs=10), 20, 5, [10]),
        (Hierarchy(8, warmup_epochs=0), 3, None, [3]),
        (IFND(8, every=8), 20, None, [20, 24]),
        (IFND(8, every=50), 20, None, []),  # linear: nothing is accepted in epoch 0
        (FNC(top_k=1), 20, None, []),
    ],
)
def test_a_refresh_missed_in_the_warm_up_is_made_up_for(detector: Detector, start: int, update_from: int | None, due: list[int]) -> None:
    wrapped = StartAt(detector, start, update_from)
    wrapped.set_progress(0, 30)
    assert [epoch for epoch in range(30) if wrapped.due(epoch)] == due


@pytest.mark.parametrize(("epoch", "update_from"), [(-1, None), (2, 3), (2, -1)])
def test_wrong_epochs(epoch: int, update_from: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        StartAt(FNC(top_k=1), epoch, update_from)


def test_repr() -> None:
    assert repr(StartAt(FNC(top_k=1), 3)) == "StartAt(FNC(top_k=1), epoch=3, update_from=3)"
