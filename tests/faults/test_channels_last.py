"""Gradients of convolutions that oneDNN gets wrong on a CPU, and that a training must not take.

A strided 1×1 convolution of few channels in channels-last layout: it writes beyond its memory (its
issue 6035). A kernel wider than its input, which is one pixel, in bfloat16: parts of the weight's
gradient are left unwritten.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kinfolk.training.module import _crashes_channels_last, one_pixel_in_float32
from kinfolk.training.train import train
from tests.faults.inject import in_children

CHANNELS = (2, 8, 12, 16, 24)


def convolve(channels: int) -> None:
    """The minimal reproduction: ends by SIGSEGV or SIGABRT with 2 to 8 channels, on a CPU with
    AVX-512 and without bfloat16."""
    x = torch.rand(64, channels, 64, 64).contiguous(memory_format=torch.channels_last)
    weight = (
        torch.rand(2 * channels, channels, 1, 1)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    for _ in range(3):
        F.conv2d(x, weight, stride=2).square().mean().backward()  # type: ignore[no-untyped-call]


def learn(data: str, out: str) -> None:
    settings = {
        "model.name": "resnet10",
        "model.width": 8,
        "views.size": 64,
        "trainer.precision": "32",
        "trainer.loggers": [],
    }
    train(data, out, epochs=1, batch_size=8, settings=settings, progress=False)


def test_what_crashes_is_guarded_and_trains(tmp_path: Path) -> None:
    np.save(
        tmp_path / "images.npy",
        np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), dtype=np.uint8),
    )
    calls: list[Any] = [(convolve, (channels,), {}) for channels in CHANNELS]
    *codes, trained = in_children(
        [*calls, (learn, (str(tmp_path / "images.npy"), str(tmp_path / "run")), {})]
    )
    crashed = [channels for channels, code in zip(CHANNELS, codes, strict=True) if code != 0]
    guarded = [
        channels
        for channels in CHANNELS
        if _crashes_channels_last(torch.nn.Conv2d(channels, 2 * channels, 1, stride=2))
    ]
    assert set(crashed) <= set(guarded), "a convolution crashes that the guard lets through"
    assert guarded == [2, 8, 12]
    assert trained == 0


class OwnConv2d(torch.nn.Conv2d):
    """A layer of a user, which does not override `forward`."""


@pytest.mark.parametrize("layer", [torch.nn.Conv2d, OwnConv2d])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (5, 1), (5, 2), (3, 1)])
def test_one_pixel_in_bfloat16_has_a_gradient(
    kernel: int, stride: int, layer: type[torch.nn.Conv2d]
) -> None:
    """Memory full of NaN before: what is left unwritten shows."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 1, 1)
    plain = layer(64, 128, kernel, stride, kernel // 2, bias=False)
    guarded = copy.deepcopy(plain)
    junk = [torch.full((128 * 64 * kernel**2,), torch.nan) for _ in range(8)]
    del junk
    with one_pixel_in_float32(guarded):
        with torch.autocast("cpu", torch.bfloat16):
            out = guarded(x)
        out.float().square().sum().backward()
    plain(x).square().sum().backward()
    assert guarded.weight.grad is not None
    assert plain.weight.grad is not None
    torch.testing.assert_close(guarded.weight.grad, plain.weight.grad)


def test_the_network_is_as_it_was_afterwards() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1))
    before = [(type(part), set(vars(part))) for part in network.modules()]
    image = torch.ones(1, 3, 5, 5)

    def fail() -> None:
        with one_pixel_in_float32(network), torch.no_grad():
            assert "forward" in vars(network[0])
            duplicate = copy.deepcopy(network)
            for parameter in duplicate.parameters():
                parameter.zero_()
            assert not torch.equal(duplicate(image), network(image)), "a copy has its own weights"
            raise RuntimeError("an error")

    with pytest.raises(RuntimeError, match="an error"):
        fail()
    assert [(type(part), set(vars(part))) for part in network.modules()] == before


def test_a_users_encoder_keeps_its_classes(tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        output_size = 8

        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.seen: list[type] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(type(self.conv))
            return self.conv(x).mean((2, 3))  # type: ignore[no-any-return]

    np.save(
        tmp_path / "images.npy",
        np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8),
    )
    encoder = Own()
    settings = {
        "views.size": 8,
        "trainer.loggers": [],
        "trainer.precision": "bf16-mixed",
    }
    train(
        str(tmp_path / "images.npy"),
        tmp_path / "run",
        model=encoder,
        epochs=1,
        batch_size=8,
        settings=settings,
        progress=False,
    )
    assert set(encoder.seen) == {torch.nn.Conv2d}
    assert type(encoder.conv) is torch.nn.Conv2d
    assert "forward" not in vars(encoder.conv)


def test_a_training_takes_the_guarded_convolution(tmp_path: Path) -> None:
    np.save(
        tmp_path / "images.npy",
        np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8),
    )
    settings = {
        "model.name": "resnet10",
        "model.width": 16,
        "model.stem": "imagenet",
        "views.size": 16,
        "trainer.loggers": [],
    }
    settings |= {"trainer.precision": "bf16-mixed", "checkpoint.every_minutes": 1e-9}
    run = train(
        str(tmp_path / "images.npy"),
        tmp_path / "run",
        epochs=2,
        batch_size=8,
        settings=settings,
        progress=False,
    )
    weights = load_file(run.model)
    assert all(value.isfinite().all() for value in weights.values())
    assert max(value.abs().max() for name, value in weights.items() if "conv" in name) < 10
