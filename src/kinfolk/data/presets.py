"""Augmentation settings of the papers: one `Augmentation` per view. Up to `SMALL` pixels a side the
blur is off and `simclr` has half the colour strength, as SimCLR on CIFAR-10."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from kinfolk.errors import UsageError, did_you_mean, require, require_choice

SMALL = 64
Pair = tuple[float, float]
Value = float | tuple[float, ...] | list[float] | None


@dataclass(frozen=True)
class Augmentation:
    """How one view is made. The defaults are SimCLR's, and values have the same meaning as in
    torchvision.

    Args:
        scale, ratio: range of the crop's share of the area, and of its width / height.
        flip, jitter, grey, blur, solarise: probability of a horizontal flip, of any change of the
            colours, of greyscale, of a Gaussian blur, and that light values are inverted.
        brightness, contrast, saturation: factors are uniform in [max(0, 1 - value), 1 + value].
        hue: the shift is uniform in [-hue, hue] turns.
        strength: multiplies the four values above.
    """

    scale: Pair = (0.08, 1.0)
    ratio: Pair = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2
    strength: float = 1.0
    grey: float = 0.2
    blur: float = 0.5
    solarise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grey", "blur", "solarise"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        for name in ("brightness", "contrast", "saturation", "strength"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        rule = "in [0, 0.5] when multiplied by `strength`"
        require(0 <= self.hue * self.strength <= 0.5, "hue", self.hue, rule)
        for name, most in (("scale", 1), ("ratio", math.inf)):
            low, high = getattr(self, name)
            rule = f"two numbers above 0, the lower first, at most {most}"
            require(0 < low <= high <= most, name, (low, high), rule)


_BYOL = Augmentation(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
_CROP = Augmentation(flip=0.0, jitter=0.0, grey=0.0, blur=0.0)

# one entry per view; view v uses entry v modulo their number
PRESETS: dict[str, tuple[Augmentation, ...]] = {
    # Chen et al. 2020, A Simple Framework for Contrastive Learning of Visual Representations
    "simclr": (Augmentation(),),
    # Chen et al. 2020, Improved Baselines with Momentum Contrastive Learning (MoCo v2)
    "moco": (
        Augmentation(scale=(0.2, 1.0), brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    ),
    # Grill et al. 2020, Bootstrap Your Own Latent: the two views differ
    "byol": (replace(_BYOL, blur=1.0), replace(_BYOL, blur=0.1, solarise=0.2)),
    # Yuan et al. 2022, Provable Stochastic Optimization for Global Contrastive Learning: BYOL's
    # first view twice, as in the authors' code
    "sogclr": (replace(_BYOL, blur=1.0),),
    # for digits, documents, microscopy: where a mirrored or recoloured image means something else
    "mild": (
        replace(
            _CROP,
            scale=(0.5, 1.0),
            jitter=0.8,
            brightness=0.2,
            contrast=0.2,
            saturation=0.0,
            hue=0.0,
        ),
    ),
    # Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision:
    # only a crop, so that the caption stays true; scale as in open_clip
    "clip": (replace(_CROP, scale=(0.9, 1.0)),),
    # no randomness: the centre square, resized
    "plain": (replace(_CROP, scale=(1.0, 1.0), ratio=(1.0, 1.0)),),
}


def augmentations(preset: str, size: int, overrides: dict[str, Value]) -> tuple[Augmentation, ...]:
    """An override is one value for all views or, of a single number, a list with one per view."""
    require_choice("preset", preset, list(PRESETS))
    made = PRESETS[preset]
    if size <= SMALL:
        made = tuple(
            replace(one, blur=0.0, strength=0.5 if preset == "simclr" else one.strength)
            for one in made
        )

    known = {field.name: field.type for field in fields(Augmentation)}
    per_view: dict[str, list[Any]] = {}
    for name, value in overrides.items():
        if name not in known:
            raise UsageError(
                f"`{name}` is not a setting of the views{did_you_mean(name, known, limit=1)}; there"
                f" are {', '.join(known)}"
            )
        if value is None:
            continue
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        is_pair, are_numbers = (
            known[name] == "Pair",
            all(isinstance(x, int | float) for x in numbers),
        )
        rule = "two numbers, the lower first" if is_pair else "a number, or one number per view"
        is_good = len(numbers) == 2 if is_pair else len(numbers) > 0
        require(are_numbers and is_good, name, value, rule)
        per_view[name] = [tuple(map(float, numbers))] if is_pair else list(map(float, numbers))
    num = max(map(len, (made, *per_view.values())))
    return tuple(
        replace(
            made[view % len(made)],
            **{name: values[view % len(values)] for name, values in per_view.items()},
        )
        for view in range(num)
    )
