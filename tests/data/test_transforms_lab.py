"""CIE Lab: the conversion, and views in that space."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.data.transforms import LAB_MEAN, LAB_STD, to_lab
from kinfolk.data.views import Views
from kinfolk.errors import UsageError


def lab_of(red: float, green: float, blue: float) -> tuple[float, float, float]:
    """One pixel by the CIE's formulae, with 903.3 and 0.008856 written as the fractions they stand
    for."""
    linear = [
        v / 12.92 if v <= 0.04045 else math.pow((v + 0.055) / 1.055, 2.4)
        for v in (red, green, blue)
    ]
    r, g, b = linear
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883

    def f(t: float) -> float:
        return math.pow(t, 1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def pixel(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("rgb", "lab"),
    [
        ((1, 1, 1), (100, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((1, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 1, 0), (87.73, -86.18, 83.18)),
        ((0, 0, 1), (32.30, 79.19, -107.86)),
        ((1, 1, 0), (97.14, -21.55, 94.48)),
        ((0.5, 0.5, 0.5), (53.39, 0, 0)),
    ],
)
def test_lab_has_published_values(
    rgb: tuple[float, float, float], lab: tuple[float, float, float]
) -> None:
    assert to_lab(pixel(*rgb)).flatten().tolist() == pytest.approx(lab, abs=0.01)


def test_equals_the_formulae_pixel_by_pixel() -> None:
    rgb = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # the straight part of both curves
    rgb[0, :, 0, :3] = torch.tensor([0.0, 0.02, 0.04045], dtype=torch.float64)
    made = to_lab(rgb)
    for b in range(2):
        for i in range(4):
            for j in range(5):
                assert made[b, :, i, j].tolist() == pytest.approx(
                    lab_of(*rgb[b, :, i, j].tolist()), abs=2e-3
                )


def noise(number: int = 4, size: int = 16) -> Tensor:
    return torch.randint(
        0,
        256,
        (number, size, size, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(2),
    )


def test_views_are_augmented_first_and_converted_then() -> None:
    options: dict[str, Any] = {"solarise": 0.5, "jitter": 1.0, "grey": 0.3}
    unit = Views("simclr", 16, mean=(0, 0, 0), std=(1, 1, 1), **options)
    lab = Views("simclr", 16, space="lab", **options)
    rgb = unit(noise(), torch.Generator().manual_seed(3))
    made = lab(noise(), torch.Generator().manual_seed(3))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (LAB_MEAN, LAB_STD))
    for view in range(2):
        torch.testing.assert_close(
            made[view], (to_lab(rgb[view].clamp(0, 1)) - mean) / std, atol=1e-4, rtol=0
        )


def test_evaluation_is_converted_too() -> None:
    lab, unit = (
        Views("plain", 16, space="lab", mean=(0, 0, 0), std=(1, 1, 1)),
        Views("plain", 16, mean=(0, 0, 0), std=(1, 1, 1)),
    )
    torch.testing.assert_close(lab.evaluate(noise()), to_lab(unit.evaluate(noise())))
    torch.testing.assert_close(
        lab(noise(), torch.Generator(), num_views=1)[0], lab.evaluate(noise()), atol=1e-3, rtol=0
    )


def test_a_grey_view_has_no_colour() -> None:
    made = Views("simclr", 16, space="lab", grey=1.0, mean=(0, 0, 0), std=(1, 1, 1))(
        noise(), torch.Generator().manual_seed(0)
    )
    assert made[:, :, 1:].abs().max() < 0.05
    assert made[:, :, 0].std() > 1


def test_settings_make_the_same_views_again() -> None:
    lab = Views("moco", 16, space="lab", blur=0.3)
    again = Views(**lab.config())
    assert lab.config()["space"] == "lab"
    assert again.config() == lab.config()
    made = [v(noise(), torch.Generator().manual_seed(0)) for v in (lab, again, eval(repr(lab)))]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert Views("moco", 16).config()["space"] == "rgb"


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`space` \(='hsv'\) must be one of rgb, lab"):
        Views("simclr", 16, space="hsv")
