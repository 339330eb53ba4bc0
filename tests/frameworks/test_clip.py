"""What frameworks of images and captions share."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kinfolk.detectors import IFND
from kinfolk.frameworks.clip import CLIP, SigLIP


def test_detectors_get_the_learned_temperature() -> None:
    framework = CLIP(
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Identity(),
        nn.Linear(5, 4),
        temperature=0.07,
        detector=IFND(num_samples=6, num_clusters=2, schedule="constant"),
    )

    def told() -> list[float]:
        return [each.loss_temperature for each in framework.detectors if isinstance(each, IFND)]

    assert told() == [0.07, 0.07]
    for t in (0.02, 0.05):
        with torch.no_grad():
            framework.get_parameter("objective.learned.logit_scale").fill_(-math.log(t))
        if t == 0.02:
            framework.refresh(torch.randn(6, 4), 0.0)
        else:
            framework.finish(torch.randn(6, 4))
        assert told() == pytest.approx([t, t])


def test_the_detector_of_siglip_is_given_the_learned_temperature() -> None:
    detector = IFND(num_samples=6, num_clusters=2, schedule="constant")
    framework = SigLIP(
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Identity(),
        nn.Linear(5, 4),
        temperature=0.07,
        detector=detector,
    )
    with torch.no_grad():
        framework.get_parameter("objective.learned.logit_scale").fill_(-math.log(0.02))
    framework.refresh(torch.randn(6, 4), 0.0)
    assert detector.loss_temperature == pytest.approx(0.02)
