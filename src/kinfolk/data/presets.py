"""Augmentation settings of the papers: one `Augmentation` per view, by preset name and image size.
Up to `SMALL` pixels a side the blur is off and `simclr` has half the colour strength, as SimCLR on
CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kinfolk.errors import UsageError, did_you_mean

SMALL = 64
Pair = tuple[float, float]
Value = float | tuple[float, ...] | list[float] | None


def _check(name: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise UsageError(f"`{name}` (={value}) must be {rule}")


@dataclass(frozen=True)
class Augmentation:
    """How one view is made. The defaults are SimCLR's, and values have the same meaning as in
    torchvision.

    Args:
        scale, ratio: lowest and highest share of the area, and lowest and highest width / height,
            of the crop.
        flip: probability of a horizontal flip.
        jitter: probability that the colours are changed at all.
        brightness, contrast, saturation: factors are uniform in [max(0, 1 - value), 1 + value].
        hue: the shift is uniform in [-hue, hue] turns.
        strength: multiplies the four values above.
        grey: probability of greyscale.
        blur: probability of a Gaussian blur, with standard deviation uniform in `sigma` pixels, cut
            to `kernel` × size.
        solarise: probability that values from `threshold` (in [0, 1]) on are inverted.
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
        for name in ("flip", "jitter", "grey", "blur", "solarise", "threshold"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in ("brightness", "contrast", "saturation", "strength"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        rule = "in [0, 0.5] when multiplied by `strength`"
        _check("hue", self.hue, 0 <= self.hue * self.strength <= 0.5, rule)
        _check("kernel", self.kernel, 0 < self.kernel <= 1, "in (0, 1]")
        rule = "two numbers in (0, 1], the lower first"
        _check("scale", self.scale, 0 < self.scale[0] <= self.scale[1] <= 1, rule)
        for name in ("ratio", "sigma"):
            low, high = getattr(self, name)
            is_good = 0 < low <= high < float("inf")
            _check(name, (low, high), is_good, "two numbers above 0, the lower first")


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
        raise UsageError(
            f"`preset` (={preset!r}) must be one of"
            f" {', '.join(PRESETS)}{did_you_mean(preset, PRESETS, limit=1)}"
        )
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
    _check(
        name,
        value,
        all(isinstance(number, int | float) for number in numbers),
        "a number or a list of numbers",
    )
    if pair:
        _check(name, value, len(numbers) == 2, "two numbers, the lower first")
        return [(float(numbers[0]), float(numbers[1]))]
    _check(name, value, len(numbers) > 0, "a number, or one number per view")
    return [float(number) for number in numbers]
