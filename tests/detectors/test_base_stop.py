"""A detector that ends."""

from __future__ import annotations

import pytest
import torch

import kinfolk as kf
from tests.detectors.blocks import random_block, step

N = 8
BLOCK = random_block(0, [0, 1, 2, 3])


def test_a_stopped_detector_flags_nothing_and_learns_nothing() -> None:
    detector = kf.StopAt(kf.GloFND(num_samples=N, alpha=0.3, init="quantile"), epoch=2)
    flagged = list[bool]()
    for epoch in range(4):
        detector.set_progress(epoch, 4)
        before = {name: value.clone() for name, value in detector.state_dict().items()}
        flagged.append(bool(step(detector, BLOCK).any()))
        same = all(
            torch.equal(value, before[name]) for name, value in detector.state_dict().items()
        )
        assert same == (epoch >= 2)
    assert flagged == [True, True, False, False]


def test_a_stopped_detector_is_not_refreshed() -> None:
    detector = kf.StopAt(kf.IFND(num_samples=N, schedule="constant"), epoch=2)
    assert [detector.due(epoch) for epoch in range(4)] == [True, True, False, False]
    assert detector.refreshed_at_end
    detector.set_progress(3, 4)
    assert not detector.refreshed_at_end
    with pytest.raises(
        ValueError, match=r"`epoch` \(=3\) must be above 3, the first epoch that flags"
    ):
        kf.StopAt(kf.StartAt(kf.FNC(top_k=1), epoch=3), epoch=3)
