"""Rates and moments of the views over many draws, against the reference chain and against the
settings."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kinfolk.data.presets import Augmentation, augmentations
from kinfolk.data.transforms import NUM_UNIFORM, Draws, draw
from kinfolk.data.views import Views
from tests.reference import augmentation as reference

NUM = 20_000


def uniforms(num: int = NUM) -> Tensor:
    return torch.rand(num, NUM_UNIFORM, generator=torch.Generator().manual_seed(0))


def drawn(how: Augmentation) -> Draws:
    return draw([how], uniforms()[None], 32, 32)[0]


def test_rates_are_the_probabilities() -> None:
    how = Augmentation(flip=0.5, grey=0.2, blur=0.3, solarise=0.1, jitter=0.8)
    draws = drawn(how)
    changed = (draws.factors != torch.tensor([1.0, 1.0, 1.0, 0.0])).any(dim=1)
    for got, rate in (
        (draws.flip, 0.5),
        (draws.grey, 0.2),
        (draws.blur, 0.3),
        (draws.solarise, 0.1),
        (changed, 0.8),
    ):
        assert got.float().mean().item() == pytest.approx(
            rate, abs=5 * math.sqrt(rate * (1 - rate) / NUM)
        )


def test_draws_are_independent() -> None:
    draws = drawn(Augmentation(blur=0.5, solarise=0.5))
    columns = [
        draws.box[:, 2] * draws.box[:, 3],
        draws.flip,
        draws.factors[:, 0],
        draws.factors[:, 3],
        draws.grey,
        draws.blur,
        draws.sigma,
    ]
    correlation = torch.corrcoef(
        torch.stack([column.double() for column in [*columns, draws.solarise, draws.order[:, 0]]])
    )
    assert (correlation - torch.eye(len(correlation))).abs().max() < 5 / math.sqrt(NUM)


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_factors_are_uniform_in_torchvisions_ranges(strength: float) -> None:
    draws = drawn(Augmentation(jitter=1.0, strength=strength))
    low, high = max(0.0, 1 - 0.8 * strength), 1 + 0.8 * strength
    for which, (least, most) in enumerate([(low, high)] * 3 + [(-0.2 * strength, 0.2 * strength)]):
        values = draws.factors[:, which]
        assert least <= values.min() <= least + 0.01
        assert most - 0.01 <= values.max() <= most
        assert values.mean().item() == pytest.approx(
            (least + most) / 2, abs=5 * (most - least) / math.sqrt(12 * NUM)
        )
        assert values.std().item() == pytest.approx((most - least) / math.sqrt(12), rel=0.03)


def test_every_order_is_as_likely() -> None:
    order = drawn(Augmentation()).order
    codes = (order * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    counts = codes.bincount()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert (counts - NUM / 24).abs().max() < 5 * math.sqrt(NUM / 24)


def test_sigma_is_uniform() -> None:
    sigma = drawn(Augmentation()).sigma
    assert 0.1 <= sigma.min() < 0.11
    assert 1.99 < sigma.max() <= 2.0
    assert sigma.mean().item() == pytest.approx(1.05, abs=0.02)


@pytest.mark.parametrize("preset", ["simclr", "moco", "byol"])
def test_moments_are_those_of_the_transforms_one_by_one(preset: str) -> None:
    """Mean and spread per channel of finished views, over images, crops and colours drawn
    independently on either side."""
    num, size = 120, 8
    how = augmentations(preset, size, {})[-1]
    pixels = _photographs(num)
    repeated = pixels.repeat(16, 1, 1, 1)
    views = Views(preset, size, (0, 0, 0), (1, 1, 1))
    ours = views(repeated, torch.Generator().manual_seed(0), num_views=len(views.augmentations))[
        -1
    ].double()

    rng = random.Random(0)
    theirs = torch.stack(
        [_transformed(one.permute(2, 0, 1).double() / 255, how, rng, size) for one in pixels]
    )
    noise = 5 * theirs.mean(dim=(2, 3)).std(dim=0) / math.sqrt(num)
    assert ((ours.mean(dim=(0, 2, 3)) - theirs.mean(dim=(0, 2, 3))).abs() < noise + 0.01).all()
    torch.testing.assert_close(
        ours.std(dim=(0, 2, 3)), theirs.std(dim=(0, 2, 3)), atol=0.03, rtol=0
    )
    within, their_within = ours.std(dim=(2, 3)).mean(), theirs.std(dim=(2, 3)).mean()
    assert within.item() == pytest.approx(their_within.item(), abs=0.02)


def _transformed(image: Tensor, how: Augmentation, rng: random.Random, size: int) -> Tensor:
    box = reference.crop_box(rng, image.shape[1], image.shape[2], how.scale, how.ratio)
    image = reference.crop_resize(image, box, size, rng.random() < how.flip)
    if rng.random() < how.jitter:
        spans = [how.strength * value for value in (how.brightness, how.contrast, how.saturation)]
        factors = [rng.uniform(max(0.0, 1 - span), 1 + span) for span in spans]
        turns = rng.uniform(-how.strength * how.hue, how.strength * how.hue)
        image = reference.adjust(image, [*factors, turns], rng.sample(range(4), 4))
    if rng.random() < how.grey:
        image = reference.grey(image).expand(3, -1, -1)
    if rng.random() < how.solarise:
        image = reference.solarise(image, 128 / 255)
    return image


def _photographs(num: int) -> Tensor:
    """Smooth patches with correlated channels and reddish light."""
    generator = torch.Generator().manual_seed(3)
    mixed = 0.5 * torch.rand(num, 3, 4, 4, generator=generator) + 0.5 * torch.rand(
        num, 1, 4, 4, generator=generator
    )
    lit = mixed * torch.tensor([1.0, 0.85, 0.7])[:, None, None]
    fine = torch.nn.functional.interpolate(lit, size=(12, 12), mode="bilinear")
    return (fine * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
