"""The warm-up: silent, then learning, then flagging."""

from __future__ import annotations

import pytest
import torch

from kinfolk.detectors import FNC, IFND, Detector, GloFND, Hierarchy, StartAt
from tests.detectors.blocks import random_block, step

BLOCK = random_block(0, [0, 1, 2, 3])


def at(detector: StartAt, epoch: int) -> torch.Tensor:
    detector.set_progress(epoch, 10)
    return step(detector, BLOCK)


def test_nobody_is_flagged_before_the_epoch() -> None:
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
