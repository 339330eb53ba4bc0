"""A whole training step on an accelerator, views included: the host never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kinfolk.data.views import Views
from kinfolk.detectors import GloFND
from kinfolk.frameworks.simclr import SogCLRFramework
from kinfolk.training.config import TrainConfig
from kinfolk.training.module import TrainingModule
from tests.pretended.device import AVAILABLE, CUDA, LOG, on_device, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
N, B = 64, 16


class Data:
    num_train = N

    def pixels(self, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("batches are given")

    aspect = pixels


def batch(step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(step)
    pixels = torch.randint(0, 256, (B, 32, 32, 3), dtype=torch.uint8, generator=g)
    return {
        "pixels": pixels,
        "aspect": torch.ones(B),
        "ids": torch.randperm(N, generator=g)[:B],
        "epoch": 0,
        "step": step,
    }


def test_a_step_of_sogclr_with_glofnd_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": plain())
    framework = SogCLRFramework(
        nn.Flatten(), nn.Linear(3072, 8), N, detector=GloFND(num_samples=N, alpha=0.1)
    )
    framework.objective.set_eval_labels(torch.arange(N) % 4)
    made = TrainingModule(
        framework,
        Data(),
        Views("sogclr", 32),
        TrainConfig(method="sogclr+glofnd", batch_size=B, epochs=2),
        lambda *_: None,
    )
    with pretended():
        made.to(CUDA)
        for step in range(3):
            given = {
                name: on_device(value) if isinstance(value, torch.Tensor) else value
                for name, value in batch(step).items()
            }
            LOG.reset()
            loss: Any = made.training_step(given, step)
            loss.backward()
            assert step == 0 or not LOG.waits, LOG.waits  # constants are copied once
