"""The colour matrix against torchvision's adjustments one after the other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from kinfolk.data.transforms import jitter, to_grey
from tests.reference import augmentation as reference

NEVER, ALWAYS = torch.tensor([False]), torch.tensor([True])


def mapped(image: Tensor, factors: list[float], order: list[int], grey: Tensor = NEVER) -> Tensor:
    maps = jitter(torch.tensor([factors], dtype=image.dtype), torch.tensor([order]))
    matrix, pull = (to_grey(one, grey) for one in maps)
    offset = pull @ image.mean(dim=(1, 2))
    return torch.baddbmm(offset[:, :, None], matrix, image.reshape(1, 3, -1)).view_as(image)


def photograph(seed: int, size: int = 12, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Smooth patches with correlated channels, as photographs have."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 4, 4, generator=generator, dtype=torch.float64)
    shared = torch.rand(1, 1, 4, 4, generator=generator, dtype=torch.float64)
    mixed = torch.nn.functional.interpolate(
        0.4 * coarse + 0.6 * shared, size=(size, size), mode="bilinear"
    )
    return low + (high - low) * mixed[0]


@pytest.mark.parametrize("turns", [0.0, 1 / 3])
def test_equals_the_sequence_where_nothing_is_cut_and_hue_is_exact(turns: float) -> None:
    for order in list(itertools.permutations(range(4))):
        image = photograph(0, low=0.3, high=0.7)
        factors = [1.3, 0.6, 1.5, turns]
        expected = reference.adjust(image, factors, list(order), cut=False)
        torch.testing.assert_close(mapped(image, factors, list(order)), expected, atol=1e-6, rtol=0)


def test_equals_the_sequence_with_cuts_where_nothing_needs_them() -> None:
    image = photograph(1, low=0.3, high=0.6)
    factors = [1.1, 0.9, 1.1, 0.0]
    torch.testing.assert_close(
        mapped(image, factors, [2, 0, 1, 3]),
        reference.adjust(image, factors, [2, 0, 1, 3]),
        atol=1e-9,
        rtol=0,
    )


@pytest.mark.parametrize("turns", [0.0, 1 / 3, -1 / 3])
def test_hue_is_exact_at_thirds(turns: float) -> None:
    image = photograph(2)
    torch.testing.assert_close(
        mapped(image, [1, 1, 1, turns], [0, 1, 2, 3]),
        reference.shift_hue(image, turns),
        atol=1e-6,
        rtol=0,
    )


def test_hue_leaves_grey_alone_and_keeps_the_mean() -> None:
    factors = torch.ones(11, 4, dtype=torch.float64)
    factors[:, 3] = torch.linspace(-0.5, 0.5, 11, dtype=torch.float64)
    matrix, pull = jitter(factors, torch.arange(4).expand(11, 4))
    assert not pull.any()
    torch.testing.assert_close(matrix.sum(dim=2), torch.ones(11, 3, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(dim=1), torch.ones(11, 3, dtype=torch.float64))
    torch.testing.assert_close(matrix[0], matrix[-1])


@pytest.mark.parametrize("turns", [-0.2, -0.1, 0.1, 0.2])
def test_hue_is_near_the_shift_in_hsv(turns: float) -> None:
    image = photograph(3)
    shifted = reference.shift_hue(image, turns)
    turned = mapped(image, [1, 1, 1, turns], [0, 1, 2, 3]).clamp(0, 1)
    assert (turned - shifted).square().mean() < 0.5 * (image - shifted).square().mean()


@pytest.mark.parametrize(("strength", "difference", "bias"), [(0.5, 0.03, 0.01), (1.0, 0.05, 0.02)])
def test_jitter_has_the_moments_of_the_sequence(
    strength: float, difference: float, bias: float
) -> None:
    rng = random.Random(0)
    got, want = [], []
    for seed in range(60):
        image = photograph(seed, size=8)
        factors = [rng.uniform(1 - 0.8 * strength, 1 + 0.8 * strength) for _ in range(3)] + [
            rng.uniform(-0.2 * strength, 0.2 * strength)
        ]
        order = rng.sample(range(4), 4)
        got.append(mapped(image, factors, order).clamp(0, 1))
        want.append(reference.adjust(image, factors, order))
    ours, theirs = torch.stack(got), torch.stack(want)
    assert (ours - theirs).abs().mean() < difference
    assert abs(ours.mean() - theirs.mean()) < bias
    assert abs(ours.std() - theirs.std()) < bias
    torch.testing.assert_close(
        ours.mean(dim=(0, 2, 3)), theirs.mean(dim=(0, 2, 3)), atol=bias, rtol=0
    )


def test_grey_is_the_luma_in_every_channel() -> None:
    image = photograph(4)
    got = mapped(image, [1, 1, 1, 0], [3, 2, 1, 0], grey=ALWAYS)
    torch.testing.assert_close(got, reference.grey(image).expand(3, -1, -1), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        mapped(image, [0.8, 0.7, 1.2, 0.0], [1, 0, 2, 3], grey=ALWAYS),
        reference.grey(
            reference.adjust(image, [0.8, 0.7, 1.2, 0.0], [1, 0, 2, 3], cut=False)
        ).expand(3, -1, -1),
        atol=1e-6,
        rtol=0,
    )


def test_each_image_has_its_own_map() -> None:
    images = torch.stack([photograph(5), photograph(6)])
    factors = torch.tensor([[1.5, 1.0, 1.0, 0.0], [1.0, 0.2, 1.0, 0.1]], dtype=torch.float64)
    order = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    matrix, pull = jitter(factors, order)
    offset = torch.einsum("bij,bj->bi", pull, images.mean(dim=(2, 3)))
    both = torch.baddbmm(offset[:, :, None], matrix, images.flatten(2)).view_as(images)
    for one in range(2):
        torch.testing.assert_close(
            both[one], mapped(images[one], factors[one].tolist(), order[one].tolist())
        )
