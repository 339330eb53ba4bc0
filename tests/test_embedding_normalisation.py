"""Images normalised by their own mean: 0 and 1 over the samples asked for, in both colour
spaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfolk.data.views import Views
from kinfolk.embedding import normalise_by
from tests.data.images import PixelData


class Dark(PixelData):
    """Colours far from the usual ones; the last image, which is not for training, is white."""

    num_train = 20

    def __init__(self) -> None:
        noise = torch.randint(0, 60, (21, 8, 8, 3), generator=torch.Generator().manual_seed(0))
        noise[20] = 255
        super().__init__(noise.to(torch.uint8))


@pytest.mark.parametrize("space", ["rgb", "lab"])
def test_mean_and_deviation_of_the_samples(space: str) -> None:
    data: Any = Dark()
    ids = torch.arange(20)
    usual = Views("mild", 8, space=space)
    views = normalise_by(data, usual, batch_size=7)
    x = views.evaluate(data.pixels(ids), data.aspect(ids))
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert x.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    assert {**views.config(), "mean": None, "std": None} == {
        **usual.config(),
        "mean": None,
        "std": None,
    }


def test_one_colour_is_not_divided_by_nothing() -> None:
    data: Any = PixelData(torch.full((1, 8, 8, 3), 255, dtype=torch.uint8))
    data.num_train = 1
    views = normalise_by(data, Views("mild", 8))
    assert views.evaluate(data.pixels(torch.tensor([0])), torch.ones(1)).abs().max() < 1e-4
