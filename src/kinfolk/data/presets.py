"""Augmentation settings of the papers: one `Augmentation` per view, by preset name and image size.
Up to `SMALL` pixels a side the blur is off and `simclr` has half the colour strength, as SimCLR on
CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from kinfolk.errors import UsageError, did_you_mean, require

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
            colours, of greyscale, of a Gaussian blur, and that values from `threshold` on are
            inverted.
        brightness, contrast, saturation: factors are uniform in [max(0, 1 - value), 1 + value].
        hue: the shift is uniform in [-hue, hue] turns.
        strength: multiplies the four values above.
        sigma: range of the blur's standard deviation in pixels; it is cut to `kernel` × size.
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
    sigma: Pair = (0.1, 2.0)
    kernel: float = 0.1
    solarise: float = 0.0
    threshold: float = 128 / 255

    def __post_init__(self) -> None:
        def check(names: str, rule: str, good: Callable[[Any], bool]) -> None:
            for name in names.split():
                require(good(getattr(self, name)), name, getattr(self, name), rule)

        shares = "flip jitter grey blur solarise threshold"
        check(shares, "in [0, 1]", lambda value: 0 <= value <= 1)
        check("brightness contrast saturation strength", "at least 0", lambda value: value >= 0)
        rule = "in [0, 0.5] when multiplied by `strength`"
        check("hue", rule, lambda value: 0 <= value * self.strength <= 0.5)
        check("kernel", "in (0, 1]", lambda value: 0 < value <= 1)
        rule = "two numbers in (0, 1], the lower first"
        check("scale", rule, lambda pair: 0 < pair[0] <= pair[1] <= 1)
        rule = "two numbers above 0, the lower first"
        check("ratio sigma", rule, lambda pair: 0 < pair[0] <= pair[1] < math.inf)


_BYOL = Augmentation(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
_STILL = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0, grey=0.0, blur=0.0)

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
            _STILL,
            scale=(0.5, 1.0),
            ratio=(3 / 4, 4 / 3),
            jitter=0.8,
            brightness=0.2,
            contrast=0.2,
            saturation=0.0,
            hue=0.0,
        ),
    ),
    # Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision:
    # only a random square, so that the caption stays true; scale as in open_clip
    "clip": (replace(_STILL, scale=(0.9, 1.0), ratio=(3 / 4, 4 / 3)),),
    # no randomness: the centre square, resized
    "plain": (_STILL,),
}


def augmentations(preset: str, size: int, overrides: dict[str, Value]) -> tuple[Augmentation, ...]:
    """The augmentations of a preset at an image size. An override is one value for all views or, of
    a single number, a list with one per view."""
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS, limit=1)
        raise UsageError(f"`preset` (={preset!r}) must be one of {', '.join(PRESETS)}{hint}")
    made = PRESETS[preset]
    if size <= SMALL:
        made = tuple(
            replace(one, blur=0.0, strength=0.5 if preset == "simclr" else one.strength)
            for one in made
        )

    known = {field.name: field.type for field in fields(Augmentation)}
    per_view: dict[str, list[float | Pair]] = {}
    for name, value in overrides.items():
        if name not in known:
            raise UsageError(
                f"`{name}` is not a setting of the views{did_you_mean(name, known, limit=1)}; there"
                f" are {', '.join(known)}"
            )
        if value is not None:
            per_view[name] = _values(name, value, pair=known[name] == "Pair")
    num = max([len(made)] + [len(values) for values in per_view.values()])
    return tuple(
        replace(
            made[view % len(made)],
            **{name: values[view % len(values)] for name, values in per_view.items()},  # type: ignore[arg-type]
        )
        for view in range(num)
    )


def _values(
    name: str, value: float | tuple[float, ...] | list[float], pair: bool
) -> list[float | Pair]:
    numbers = [value] if isinstance(value, int | float) else list(value)
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    if pair:
        rule = "two numbers, the lower first"
        require(are_numbers and len(numbers) == 2, name, value, rule)
        return [(float(numbers[0]), float(numbers[1]))]
    require(are_numbers and len(numbers) > 0, name, value, "a number, or one number per view")
    return [float(number) for number in numbers]
