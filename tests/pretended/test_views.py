"""Views on an accelerator: the values of a CPU, as many launches for any batch, and the host never
waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.data.views import Views
from tests.pretended.device import AVAILABLE, LOG, on_device, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def pixels_of(num: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (num, height, width, 3), dtype=torch.uint8, generator=seeded())


@pytest.mark.parametrize(
    ("preset", "settings", "height", "width", "size"),
    [
        ("simclr", {}, 32, 32, 32),
        ("sogclr", {}, 32, 24, 96),  # two axes of different lengths, and blur
        ("simclr", {}, 80, 80, 96),  # from this size on a CPU works image by image
        ("byol", {}, 32, 32, 96),
        ("byol", {"space": "lab"}, 32, 32, 32),
    ],
)
def test_two_views_never_wait(
    preset: str, settings: dict[str, Any], height: int, width: int, size: int
) -> None:
    views, pixels, aspect = (
        Views(preset, size, **settings),
        pixels_of(12, height, width),
        torch.linspace(0.5, 2, 12),
    )
    expected = views(pixels, seeded(), aspect=aspect)
    with pretended():
        moved, moved_aspect = on_device(pixels), on_device(aspect)
        views(moved, seeded(), aspect=moved_aspect)  # constants are copied to the device once
        LOG.reset()
        found: Any = views(moved, seeded(), aspect=moved_aspect)
        assert not LOG.waits, LOG.waits
        launches = LOG.launches
        half, half_aspect = on_device(pixels[:6]), on_device(aspect[:6])
        LOG.reset()
        views(half, seeded(), aspect=half_aspect)
        assert LOG.launches == launches, "as many for half of the batch"
    assert found.held.is_contiguous()
    # a CPU resizes large images to whole bytes, which colours can stretch
    far = (found.held - expected).abs() > (0.1 if height >= 64 else 1e-3)
    assert far.float().mean() < 1e-3  # solarising inverts a value at the threshold or not


def test_evaluation_never_waits() -> None:
    views, pixels = Views("simclr", 48, space="lab"), pixels_of(5, 40, 40)
    with pretended():
        moved = on_device(pixels)
        views.evaluate(moved)
        LOG.reset()
        found: Any = views.evaluate(moved)
        assert not LOG.waits, LOG.waits
    torch.testing.assert_close(found.held, views.evaluate(pixels), atol=1e-4, rtol=1e-4)
