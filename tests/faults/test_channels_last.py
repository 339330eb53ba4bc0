"""The gradient of a strided 1×1 convolution of few channels in channels-last layout: oneDNN writes beyond its memory (its issue 6035)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kinfolk.training.module import _crashes_channels_last
from kinfolk.training.train import train
from tests.faults.inject import in_children

CHANNELS = (2, 8, 12, 16, 24)


def convolve(channels: int) -> None:
    """The minimal reproduction: ends by SIGSEGV or SIGABRT with 2 to 8 channels, on a CPU with AVX-512 and without bfloat16."""
    x = torch.rand(64, channels, 64, 64).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(2 * channels, channels, 1, 1).contiguous(memory_format=torch.channels_last).requires_grad_()
    for _ in range(3):
        F.conv2d(x, weight, stride=2).square().mean().backward()  # type: ignore[no-untyped-call]


def learn(data: str, out: str) -> None:
    settings = {"model.name": "resnet10", "model.width": 8, "views.size": 64, "trainer.precision": "32", "trainer.loggers": []}
    train(data, out, epochs=1, batch_size=8, settings=settings, progress=False)


def test_what_crashes_is_guarded_and_trains(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), dtype=np.uint8))
    calls: list[Any] = [(convolve, (channels,), {}) for channels in CHANNELS]
    *codes, trained = in_children([*calls, (learn, (str(tmp_path / "images.npy"), str(tmp_path / "run")), {})])
    crashed = [channels for channels, code in zip(CHANNELS, codes, strict=True) if code != 0]
    guarded = [channels for channels in CHANNELS if _crashes_channels_last(torch.nn.Conv2d(channels, 2 * channels, 1, stride=2))]
    assert set(crashed) <= set(guarded), "a convolution crashes that the guard lets through"
    assert guarded == [2, 8, 12]
    assert trained == 0
