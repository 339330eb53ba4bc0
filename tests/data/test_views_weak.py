"""Weak views: cropped and flipped like the others, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from kinfolk.data.views import Views


def made(weak: tuple[int, ...], **settings: Any) -> torch.Tensor:
    pixels = torch.randint(
        0, 256, (6, 24, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return Views("simclr", 24, **settings)(
        pixels, torch.Generator().manual_seed(0), num_views=3, weak=weak
    )


def test_a_weak_view_has_the_crop_and_flip_of_the_preset_alone() -> None:
    weak = made((2,), jitter=1.0, grey=0.5)
    torch.testing.assert_close(weak[2], made((), jitter=0.0, grey=0.0, blur=0.0, solarise=0.0)[2])
    assert not torch.equal(weak[2], made((), jitter=1.0, grey=0.5)[2])


def test_the_other_views_stay_as_they_are() -> None:
    torch.testing.assert_close(made((2,))[:2], made(())[:2], rtol=0, atol=0)
