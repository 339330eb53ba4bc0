"""Views as a whole: against the reference chain, identities, determinism, shapes, refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.data import transforms
from kinfolk.data import views as views_module
from kinfolk.data.presets import PRESETS
from kinfolk.data.transforms import NUM_UNIFORM, draw
from kinfolk.data.views import IMAGENET_MEAN, IMAGENET_STD, Views
from kinfolk.errors import UsageError
from tests.reference import augmentation as reference


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_pixels(num: int, height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num, height, width, 3), dtype=torch.uint8, generator=seeded(seed))


def test_equals_the_reference_chain() -> None:
    """Everything on, with colours mild enough that nothing is cut: the chain of torchvision's
    transforms, image by image."""
    settings: dict[str, Any] = {
        "brightness": 0.1,
        "contrast": 0.2,
        "saturation": 0.2,
        "hue": 0.0,
        "blur": 0.5,
        "solarise": 0.5,
    }
    views = Views(
        "simclr", size=56, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25), strength=1.0, **settings
    )
    pixels = 80 + random_pixels(12, 20, 24) // 4
    got = views(pixels, seeded(7), num_views=1)[0]

    draws = draw(views.augmentations, torch.rand(1, 12, NUM_UNIFORM, generator=seeded(7)), 20, 24)[
        0
    ]
    assert 0 < draws.blur.sum() < 12
    assert 0 < draws.solarise.sum() < 12
    for one in range(12):
        top, left, tall, wide = (int(value) for value in draws.box[one])
        image = pixels[one].permute(2, 0, 1).double() / 255
        image = reference.crop_resize(image, (top, left, tall, wide), 56, bool(draws.flip[one]))
        image = reference.adjust(image, draws.factors[one].tolist(), draws.order[one].tolist())
        image = reference.grey(image).expand(3, -1, -1) if draws.grey[one] else image
        image = reference.blur(image, float(draws.sigma[one]), 5) if draws.blur[one] else image
        image = reference.solarise(image, 128 / 255) if draws.solarise[one] else image
        expected = (image - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / torch.tensor(
            [0.2, 0.3, 0.25]
        )[:, None, None]
        # contrast sees the mean after the blur: an edge effect; a value at the threshold may fall
        # on either side of it
        far = (got[one] - expected).abs() > 0.05
        assert far.float().mean() < (0.02 if draws.solarise[one] else 1e-9)


@pytest.mark.parametrize("size", [16, 11, 40])
def test_without_randomness_it_is_a_plain_resize(size: int) -> None:
    pixels = random_pixels(3, 16, 16)
    still: dict[str, Any] = {
        "scale": (1, 1),
        "ratio": (1, 1),
        "flip": 0,
        "strength": 0,
        "grey": 0,
        "blur": 0,
    }
    expected = torch.stack(
        [
            reference.crop_resize(one.permute(2, 0, 1).double() / 255, (0, 0, 16, 16), size, False)
            for one in pixels
        ]
    )
    for views in (
        Views("simclr", size, (0, 0, 0), (1, 1, 1), **still),
        Views("plain", size, (0, 0, 0), (1, 1, 1)),
    ):
        for view in views(pixels, seeded()):
            torch.testing.assert_close(view.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(views.evaluate(pixels).double(), expected, atol=1e-5, rtol=0)


def test_normalisation_is_imagenets_by_default() -> None:
    pixels = random_pixels(2, 8, 8)
    bare = Views("plain", 8, (0, 0, 0), (1, 1, 1)).evaluate(pixels)
    mean, std = (
        torch.tensor(IMAGENET_MEAN)[:, None, None],
        torch.tensor(IMAGENET_STD)[:, None, None],
    )
    torch.testing.assert_close(Views("plain", 8).evaluate(pixels), (bare - mean) / std)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_is_between_black_and_white_and_contiguous(preset: str) -> None:
    for height, width, size in [(8, 8, 8), (32, 32, 32), (40, 24, 32), (128, 128, 96)]:
        pixels = random_pixels(4, height, width)
        pixels[0], pixels[1] = 0, 255
        out = Views(preset, size, (0, 0, 0), (1, 1, 1))(
            pixels, seeded(), aspect=torch.tensor([1.0, 0.05, 20.0, 1.3])
        )
        assert out.shape == (2, 4, 3, size, size)
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        assert out.min() >= -1e-5
        assert out.max() <= 1 + 1e-5


def test_same_generator_same_views_another_seed_others() -> None:
    views, pixels = Views("byol", 32, blur=0.5), random_pixels(6, 32, 32)
    first = views(pixels, seeded(1))
    assert torch.equal(first, views(pixels, seeded(1)))
    assert not torch.equal(first, views(pixels, seeded(2)))
    assert not torch.equal(first[0], first[1])


def test_no_other_source_of_randomness() -> None:
    views, pixels = Views("simclr", 32, blur=0.5), random_pixels(4, 32, 32)
    torch.manual_seed(0)
    first, state = views(pixels, seeded()), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, views(pixels, seeded()))
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_first_views_do_not_depend_on_how_many_follow() -> None:
    views, pixels = Views("byol", 32), random_pixels(5, 32, 32)
    assert torch.equal(
        views(pixels, seeded(), num_views=4)[:2], views(pixels, seeded(), num_views=2)
    )


def test_a_setting_changes_only_what_it_names() -> None:
    pixels = random_pixels(16, 32, 32)
    uniform = torch.rand(1, 16, NUM_UNIFORM, generator=seeded())
    one, other = (
        draw(Views("simclr", 32, blur=blur).augmentations, uniform, 32, 32) for blur in (0.0, 1.0)
    )
    assert torch.equal(one.box, other.box)
    assert torch.equal(one.factors, other.factors)
    assert not one.blur.any()
    assert other.blur.all()
    assert not torch.equal(
        Views("simclr", 32)(pixels, seeded()), Views("simclr", 32, blur=1.0)(pixels, seeded())
    )


@pytest.mark.parametrize(("height", "large"), [(32, 10**9), (32, 0)])
def test_parts_of_the_batch_do_not_show(
    height: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforms, "LARGE", large)
    views, pixels = Views("simclr", 32, blur=0.5, solarise=0.5), random_pixels(7, height, 32)
    whole = views(pixels, seeded())
    monkeypatch.setattr(views_module, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(views(pixels, seeded()), whole, atol=1e-5, rtol=0)


def test_large_images_are_treated_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = random_pixels(12, 48, 48)
    views = Views("simclr", 40, (0, 0, 0), (1, 1, 1), blur=0.5)
    batched, evaluated = views(pixels, seeded()), views.evaluate(pixels)
    monkeypatch.setattr(transforms, "LARGE", 0)
    # one resizes to whole bytes, the other does not; the colours may stretch the difference
    torch.testing.assert_close(views(pixels, seeded()), batched, atol=4 / 255, rtol=0)
    torch.testing.assert_close(views.evaluate(pixels), evaluated, atol=1.01 / 255, rtol=0)


def test_views_alternate_between_the_augmentations() -> None:
    pixels = torch.full((8, 32, 32, 3), 255, dtype=torch.uint8)
    still: dict[str, Any] = {"jitter": 0.0, "grey": 0.0, "solarise": (0.0, 1.0)}
    out = Views("simclr", 32, (0, 0, 0), (1, 1, 1), **still)(pixels, seeded(), num_views=4)
    torch.testing.assert_close(
        out.amax(dim=(1, 2, 3, 4)), torch.tensor([1.0, 0.0, 1.0, 0.0]), atol=1e-5, rtol=0
    )


def test_strided_pixels_and_empty_batch() -> None:
    pixels, views = random_pixels(8, 32, 64), Views("simclr", 32)
    strided = pixels[::2, :, ::2]
    assert torch.equal(views(strided, seeded()), views(strided.contiguous(), seeded()))
    assert views(pixels[:0], seeded()).shape == (2, 0, 3, 32, 32)
    assert views.evaluate(pixels[:0]).shape == (0, 3, 32, 32)


def test_input_is_left_as_it_was() -> None:
    pixels, aspect = random_pixels(4, 32, 32), torch.ones(4)
    kept = pixels.clone()
    Views("byol", 32)(pixels, seeded(), aspect=aspect)
    assert torch.equal(pixels, kept)
    assert torch.equal(aspect, torch.ones(4))


def test_evaluate_takes_the_centre_square_of_the_original() -> None:
    for size, first, last in ((48, 24, 71), (96, 27, 68)):
        column = torch.arange(96, dtype=torch.uint8)
        squashed = column[None, None, :, None].expand(1, 96, 96, 3)
        views = Views("plain", size, (0, 0, 0), (1, 1, 1))
        out = views.evaluate(squashed, aspect=torch.tensor([2.0]))
        assert out.min() * 255 == pytest.approx(first, abs=0.6)
        assert out.max() * 255 == pytest.approx(last, abs=0.6), "above 64 pixels 7/8 of it"


@pytest.mark.parametrize(
    "views",
    [
        Views("simclr", size=32),
        Views("byol", size=224, mean=(0.5, 0.5, 0.5), solarise=(0.0, 0.3)),
        Views("mild", size=8, scale=[0.4, 1]),
    ],
)
def test_repr_and_config_make_the_same_views(views: Views) -> None:
    pixels = random_pixels(3, 24, 24)
    expected = views(pixels, seeded())
    assert torch.equal(eval(repr(views))(pixels, seeded()), expected)
    again = Views(**views.config())
    assert torch.equal(again(pixels, seeded()), expected)
    assert again.config() == views.config()


def test_repr_shows_what_was_given() -> None:
    assert repr(Views("simclr", size=32, blur=0.5)) == "Views('simclr', size=32, blur=0.5)"


@pytest.mark.parametrize(
    ("shape", "dtype", "aspect", "message"),
    [
        (
            (2, 8, 8, 3),
            torch.float32,
            None,
            "`pixels` (=torch.float32, shape (2, 8, 8, 3)) must be uint8",
        ),
        (
            (2, 3, 8, 8),
            torch.uint8,
            None,
            (
                "`pixels` (=torch.uint8, shape (2, 3, 8, 8)) must be uint8 of shape (batch, height,"
                " width, 3)"
            ),
        ),
        ((8, 8, 3), torch.uint8, None, "`pixels` (=torch.uint8, shape (8, 8, 3))"),
        ((2, 0, 8, 3), torch.uint8, None, "`pixels` (=torch.uint8, shape (2, 0, 8, 3))"),
        (
            (2, 8, 8, 3),
            torch.uint8,
            3,
            "`aspect` (=shape (3,)) must have 2 numbers",
        ),
    ],
)
def test_refuses_wrong_pixels(
    shape: Sequence[int], dtype: torch.dtype, aspect: int | None, message: str
) -> None:
    given = None if aspect is None else torch.ones(aspect)
    with pytest.raises(UsageError, match=re.escape(message)):
        Views("simclr", 8)(torch.zeros(*shape, dtype=dtype), seeded(), aspect=given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "`size` (=0) must be at least 1"),
        ({"size": 8, "std": (1.0, 0.0, 1.0)}, "`std`"),
        ({"size": 8, "mean": (0.5,)}, "`mean` (=(0.5,))"),
    ],
)
def test_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Views("simclr", **arguments)
