"""The presets: the papers' values, the rule for small images, overrides and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kinfolk.data.presets import PRESETS, Augmentation, augmentations
from kinfolk.errors import UsageError


def test_simclr_has_the_papers_values_at_224() -> None:
    (how,) = augmentations("simclr", 224, {})
    assert (how.scale, how.ratio, how.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (how.brightness, how.contrast, how.saturation, how.hue, how.strength) == (
        0.8,
        0.8,
        0.8,
        0.2,
        1.0,
    )
    assert (how.jitter, how.grey, how.blur, how.solarise) == (0.8, 0.2, 0.5, 0.0)


def test_small_images_have_no_blur_and_simclr_half_the_strength() -> None:
    assert all(how.blur == 0 for name in PRESETS for how in augmentations(name, 32, {}))
    assert augmentations("simclr", 64, {})[0].strength == 0.5
    assert augmentations("moco", 32, {})[0].strength == 1.0
    assert augmentations("simclr", 96, {})[0].strength == 1.0


def test_byol_views_differ() -> None:
    first, second = augmentations("byol", 224, {})
    assert (first.blur, first.solarise, second.blur, second.solarise) == (1.0, 0.0, 0.1, 0.2)
    assert [how.solarise for how in augmentations("byol", 32, {})] == [0.0, 0.2]


def test_mild_keeps_direction_and_hue() -> None:
    (how,) = augmentations("mild", 8, {})
    assert (how.flip, how.hue, how.saturation, how.grey, how.blur, how.solarise) == (
        0,
        0,
        0,
        0,
        0,
        0,
    )


def test_override_for_all_views_or_for_each() -> None:
    assert [how.blur for how in augmentations("byol", 32, {"blur": 0.3})] == [0.3, 0.3]
    assert [how.blur for how in augmentations("simclr", 32, {"blur": [0.0, 1.0, 0.5]})] == [
        0.0,
        1.0,
        0.5,
    ]
    assert [how.scale for how in augmentations("byol", 32, {"scale": [0.5, 1]})] == [
        (0.5, 1.0),
        (0.5, 1.0),
    ]
    assert augmentations("simclr", 32, {"blur": None}) == augmentations("simclr", 32, {})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"flip": 1.3}, "`flip` (=1.3) must be in [0, 1]"),
    ({"grey": -0.1}, "`grey` (=-0.1) must be in [0, 1]"),
    ({"brightness": -1.0}, "`brightness` (=-1.0) must be at least 0"),
    ({"hue": 0.6, "strength": 1.0}, "`hue` (=0.6) must be in [0, 0.5]"),
    (
        {"scale": (0.5, 0.2)},
        "`scale` (=(0.5, 0.2)) must be two numbers above 0, the lower first, at most 1",
    ),
    ({"scale": (0.0, 1.0)}, "`scale` (=(0.0, 1.0)) must be two numbers above 0"),
    ({"scale": 0.5}, "`scale` (=0.5) must be two numbers"),
    ({"ratio": (-1.0, 1.0)}, "`ratio` (=(-1.0, 1.0)) must be two numbers above 0"),
    ({"blur": ()}, "`blur` (=()) must be a number, or one number per view"),
    ({"blur": "often"}, "`blur` (='often') must be a number, or one number per view"),
    ({"blurr": 0.5}, "`blurr` is not a setting of the views; did you mean blur?"),
]


def test_refuses_with_name_value_and_rule() -> None:
    for overrides, message in REFUSED:
        with pytest.raises(UsageError, match=re.escape(message)):
            augmentations("simclr", 32, overrides)


def test_refuses_an_unknown_preset() -> None:
    with pytest.raises(
        UsageError,
        match=r"`preset` \(='simclrr'\) must be one of simclr, ",
    ):
        augmentations("simclrr", 32, {})


def test_nan_is_refused() -> None:
    with pytest.raises(UsageError, match="`flip`"):
        Augmentation(flip=float("nan"))
