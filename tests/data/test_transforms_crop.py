"""Crop and resize: weights against explicit sampling, boxes against torchvision's way of drawing
them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kinfolk.data.transforms import (
    NUM_TRIES,
    centred_boxes,
    crop_boxes,
    resample,
    resample_each,
    resize_weights,
)
from tests.reference import augmentation as reference

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def uniform(num: int, seed: int = 0) -> Tensor:
    return torch.rand(num, 2 * NUM_TRIES + 2, generator=torch.Generator().manual_seed(seed))


def boxes(
    uniforms: Tensor,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    aspect: Tensor | None = None,
) -> Tensor:
    area, tries, place = (
        uniforms[:, :NUM_TRIES],
        uniforms[:, NUM_TRIES : 2 * NUM_TRIES],
        uniforms[:, 2 * NUM_TRIES :],
    )
    low, high = map(math.log, ratio)
    return crop_boxes(
        scale[0] + (scale[1] - scale[0]) * area,
        torch.exp(low + (high - low) * tries),
        place,
        height,
        width,
        ratio,
        aspect,
    )


def resized(pixels: Tensor, box: Tensor, size: int, flip: Tensor) -> Tensor:
    top, left, tall, wide = box.unbind(-1)
    rows = resize_weights(top, tall, pixels.shape[1], size)
    return resample(pixels, rows, resize_weights(left, wide, pixels.shape[2], size, flip))


@pytest.mark.parametrize(
    ("height", "width", "size"), [(12, 12, 12), (9, 14, 5), (6, 5, 11), (1, 1, 3), (8, 8, 1)]
)
def test_resampling_equals_explicit_sampling(height: int, width: int, size: int) -> None:
    pixels = torch.randint(
        0, 256, (6, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    box = boxes(uniform(6), height, width, SCALE, RATIO)
    flip = torch.tensor([True, False] * 3)
    got, each = resized(pixels, box, size, flip), resample_each(pixels, box, size, flip)
    assert torch.equal(each, each.round())
    for one in range(6):
        top, left, tall, wide = (int(value) for value in box[one])
        expected = reference.crop_resize(
            pixels[one].permute(2, 0, 1).double(), (top, left, tall, wide), size, bool(flip[one])
        )
        torch.testing.assert_close(got[one].double(), expected, atol=1e-3, rtol=0)
        # rounded to a byte along either axis
        torch.testing.assert_close(each[one].double(), expected, atol=1.01, rtol=0)


def test_resampling_equals_torch_antialiased_bilinear() -> None:
    pixels = torch.randint(
        0, 256, (8, 96, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    box = boxes(uniform(8), 96, 128, SCALE, RATIO)
    got = resized(pixels, box, 32, torch.zeros(8, dtype=torch.bool))
    for one in range(8):
        top, left, tall, wide = (int(value) for value in box[one])
        part = pixels[one, top : top + tall, left : left + wide].permute(2, 0, 1)[None].float()
        expected = interpolate(part, size=(32, 32), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(got[one], expected, atol=2e-3, rtol=0)


def test_whole_image_of_the_same_size_is_left_as_it_is() -> None:
    pixels = torch.randint(
        0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    whole = torch.tensor([[0.0, 0.0, 16.0, 16.0]]).expand(2, 4)
    got = resized(pixels, whole, 16, torch.tensor([False, True]))
    assert torch.equal(got[0], pixels[0].permute(2, 0, 1).float())
    assert torch.equal(got[1], pixels[1].permute(2, 0, 1).float().flip(2))
    assert torch.equal(resample_each(pixels, whole, 16, torch.tensor([False, True])), got)


def test_weights_sum_to_one_and_stay_in_the_box() -> None:
    start, length = torch.tensor([0.0, 3.0, 9.0]), torch.tensor([10.0, 1.0, 1.0])
    weights = resize_weights(start, length, 10, 7)
    torch.testing.assert_close(weights.sum(dim=2), torch.ones(3, 7))
    assert (weights[1, :, 3] == 1).all()
    assert (weights[2, :, 9] == 1).all()


@pytest.mark.parametrize(
    ("height", "width", "ratio"),
    [(32, 32, RATIO), (40, 25, RATIO), (16, 64, RATIO), (64, 16, RATIO), (8, 8, (0.2, 5.0))],
)
def test_boxes_are_distributed_as_torchvision_draws_them(
    height: int, width: int, ratio: tuple[float, float]
) -> None:
    num = 6_000
    box = boxes(uniform(num), height, width, SCALE, ratio).double()
    rng = random.Random(0)
    expected = torch.tensor(
        [reference.crop_box(rng, height, width, SCALE, ratio) for _ in range(num)],
        dtype=torch.float64,
    )
    assert torch.equal(box, box.round())
    assert (box[:, :2] >= 0).all()
    assert (box[:, 2:] >= 1).all()
    assert (box[:, 0] + box[:, 2] <= height).all()
    assert (box[:, 1] + box[:, 3] <= width).all()
    for measure in (_area, _log_ratio, _top, _left):
        got, want = measure(box), measure(expected)
        assert abs(got.mean() - want.mean()) < 6 * want.std() * math.sqrt(2 / num) + 1e-9
        # Kolmogorov-Smirnov at one in a thousand
        assert _largest_gap(got, want) < 1.95 * math.sqrt(2 / num)


def test_squashed_image_is_cropped_as_its_original() -> None:
    num = 20_000
    uniforms = uniform(num)
    original = boxes(uniforms, 256, 512, SCALE, RATIO)
    squashed = boxes(uniforms, 256, 256, SCALE, RATIO, torch.full((num,), 2.0))
    stretched = squashed * torch.tensor([1.0, 2.0, 1.0, 2.0])
    # the same draws, up to rounding to whole pixels; a try at the very edge may fit in one and not
    # in the other
    close = ((stretched - original).abs() <= 4).all(dim=1)
    assert close.float().mean() > 0.98
    ratio = stretched[:, 3] / stretched[:, 2]
    assert ratio.min() > 0.7
    assert ratio.max() < 1.45


def test_nothing_fits_takes_the_centre() -> None:
    tall = boxes(uniform(5), 40, 10, (1.0, 1.0), (1.0, 1.0))
    assert torch.equal(tall, torch.tensor([[15.0, 0.0, 10.0, 10.0]]).expand(5, 4))
    wide = boxes(uniform(5), 10, 40, (1.0, 1.0), (0.5, 2.0))
    assert torch.equal(wide, torch.tensor([[0.0, 10.0, 10.0, 20.0]]).expand(5, 4))


def test_centred_box_is_the_square_of_the_original() -> None:
    box = centred_boxes(torch.tensor([1.0, 2.0, 0.5]), 64, 64, (1.0, 1.0), share=0.875)
    assert torch.equal(
        box,
        torch.tensor([[4.0, 4.0, 56.0, 56.0], [4.0, 18.0, 56.0, 28.0], [18.0, 4.0, 28.0, 56.0]]),
    )


def test_a_uniform_number_just_below_one_stays_inside() -> None:
    edge = torch.full((1, 2 * NUM_TRIES + 2), 1 - 2**-24)
    edge[:, :NUM_TRIES] = 0.0
    box = boxes(edge, 2**12, 2**12, SCALE, (1.0, 1.0))
    assert box[0, 0] + box[0, 2] <= 2**12
    assert box[0, 1] + box[0, 3] <= 2**12


def _area(box: Tensor) -> Tensor:
    return box[:, 2] * box[:, 3]


def _log_ratio(box: Tensor) -> Tensor:
    return torch.log(box[:, 3] / box[:, 2])


def _top(box: Tensor) -> Tensor:
    return box[:, 0]


def _left(box: Tensor) -> Tensor:
    return box[:, 1]


def _largest_gap(one: Tensor, other: Tensor) -> Tensor:
    """Largest distance between the two distribution functions."""
    at = torch.cat([one, other])
    shares = [
        torch.searchsorted(values.sort().values, at, right=True) / len(values)
        for values in (one, other)
    ]
    return (shares[0] - shares[1]).abs().max()
