"""Views: the augmented versions of a batch of images, made as tensors on the training device.

The order, parameters and probabilities are torchvision's: random resized crop, flip, colour jitter,
greyscale, Gaussian blur, solarise, normalise. An accelerator makes all views at once, in three
matrix products; a CPU makes them in parts that fit its cache, and large images one by one.

Three approximations: values are cut to [0, 1] once, at the end; the hue is rotated about the grey
axis; contrast uses the mean grey after the blur.

Dimension key: V views, B images of the batch, R = V·B images of all views, C = 3 channels, H × W
pixels of the input, S pixels of a side of the output, X blurred images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kinfolk.data import transforms
from kinfolk.data.presets import SMALL, Augmentation, Value, augmentations
from kinfolk.data.transforms import (
    CUT,
    LAB_MEAN,
    LAB_STD,
    NO_BLUR,
    NUM_UNIFORM,
    Draws,
    apply_blur,
    blur_matrices,
    centred_boxes,
    constant,
    draw,
    resample,
    resample_each,
    resize_weights,
    taps_for,
    to_lab,
)
from kinfolk.errors import UsageError, require, require_at_least, require_choice

Triple = tuple[float, ...]
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SPACES = {"rgb": (IMAGENET_MEAN, IMAGENET_STD), "lab": (LAB_MEAN, LAB_STD)}
"""Colour spaces, with the default mean and standard deviation of their channels."""
_CHUNK_BYTES = 2**24  # working memory at a time on the CPU: what fits its cache


class Views:
    """Makes augmented views of a batch of images.

    The same state of the generator gives the same crops with and without blur, and the same first
    view of two or eight.

    Args:
        preset: `simclr`, `moco`, `byol`, `sogclr`, `mild`, `clip` or `plain`; see `presets.py`.
        size: pixels of a side of the views.
        mean, std: per channel, of values in [0, 1], or of L, a and b.
        space: "rgb", or "lab" for CIE Lab.
        overrides: any setting of `Augmentation`; a list of single numbers gives one value per view.

    Example:
        >>> views = Views("simclr", size=32)
        >>> pixels = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
        >>> views(pixels, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 4, 3, 32, 32])
    """

    def __init__(
        self,
        preset: str,
        size: int,
        mean: tuple[float, ...] | list[float] | None = None,
        std: tuple[float, ...] | list[float] | None = None,
        space: str = "rgb",
        **overrides: Value,
    ) -> None:
        require_at_least(1, size=size)
        require_choice("space", space, list(SPACES))
        self.preset, self.size, self.space = preset, size, space
        self.mean, self.std = (
            tuple(map(float, default if given is None else given))
            for given, default in zip((mean, std), SPACES[space], strict=True)
        )
        require(len(self.mean) == 3, "mean", mean, "three numbers")
        require(len(self.std) == 3 and min(self.std) > 0, "std", std, "three numbers above 0")
        self.augmentations = augmentations(preset, size, overrides)
        given: dict[str, Any] = {"mean": mean, "std": std}
        given |= {"space": None if space == "rgb" else space, **overrides}
        self._given = {name: value for name, value in given.items() if value is not None}

    def __call__(
        self,
        pixels: Tensor,
        generator: torch.Generator,
        aspect: Tensor | None = None,
        num_views: int = 2,
        weak: tuple[int, ...] = (),
    ) -> Tensor:
        """Augmented, normalised views (V, B, 3, size, size).

        Args:
            pixels: (B, H, W, 3), uint8.
            generator: on the pixels' device.
            aspect: (B,) width / height of the originals, where `pixels` holds them squashed.
            weak: the views that are only cropped and flipped.
        """
        _check(pixels, aspect)
        batch, height, width, _ = pixels.shape
        hows = [self.augmentations[view % len(self.augmentations)] for view in range(num_views)]
        for view in weak:
            hows[view] = replace(hows[view], jitter=0.0, grey=0.0, blur=0.0, solarise=0.0)

        views = torch.empty(num_views, batch, 3, self.size, self.size, device=pixels.device)
        uniform_VBU = torch.empty(num_views, batch, NUM_UNIFORM, device=pixels.device)
        for uniform_BU in uniform_VBU:
            uniform_BU.uniform_(generator=generator)
        draws = draw(hows, uniform_VBU, height, width, aspect)
        if pixels.device.type != "cpu":
            self._render(pixels, hows, draws.flatten(), views.flatten(0, 1))
            return views
        for view, how in enumerate(hows):
            for part in self._parts(pixels):
                self._render(pixels[part], [how], draws[view, part], views[view, part])
        return views

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor:
        """The centre square of the original, above 64 pixels 7/8 of it, resized and normalised:
        (B, 3, size, size)."""
        _check(pixels, aspect)
        batch, height, width, _ = pixels.shape
        device = pixels.device
        aspect_B = constant((width / height,), device).expand(batch)
        if aspect is not None:
            aspect_B = aspect.float()
        box_B4 = centred_boxes(
            aspect_B, height, width, (1.0, 1.0), share=1.0 if self.size <= SMALL else 7 / 8
        )
        images = torch.empty(batch, 3, self.size, self.size, device=device)
        mean_C11, std_C11 = constant((self.mean, self.std), device)[:, :, None, None]
        for part in self._parts(pixels):
            image = resize(pixels[part], box_B4[part], self.size).div_(255).clamp_(0, 1)
            image = image if self.space == "rgb" else to_lab(image)
            torch.div(image.sub_(mean_C11), std_C11, out=images[part])
        return images

    def config(self) -> dict[str, Any]:
        """`Views(**views.config())` makes the same views."""
        settings: dict[str, Any] = {"preset": self.preset, "size": self.size, "space": self.space}
        settings |= {"mean": list(self.mean), "std": list(self.std)}
        for field in fields(Augmentation):
            first, *others = values = [getattr(how, field.name) for how in self.augmentations]
            one = list(first) if isinstance(first, tuple) else first
            settings[field.name] = one if all(value == first for value in others) else values
        return settings

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._given.items())
        return f"Views({self.preset!r}, size={self.size}{given})"

    def _render(
        self, pixels: Tensor, hows: Sequence[Augmentation], draws: Draws, out_RCSS: Tensor
    ) -> None:
        if self.space == "rgb":
            return render(pixels, hows, draws, self.mean, self.std, out_RCSS)
        render(pixels, hows, draws, (0.0,) * 3, (1.0,) * 3, out_RCSS)
        mean_C11, std_C11 = constant((self.mean, self.std), out_RCSS.device)[:, :, None, None]
        out_RCSS.copy_((to_lab(out_RCSS) - mean_C11) / std_C11)

    def _parts(self, pixels: Tensor) -> Iterator[slice]:
        """What to process at a time; on an accelerator the whole batch."""
        batch, height, width, _ = pixels.shape
        step = max(batch, 1)
        if pixels.device.type == "cpu":
            floats = 6 * self.size**2
            if height * width < transforms.LARGE:
                floats += (3 * width + 4 * self.size) * height
            step = max(1, _CHUNK_BYTES // (4 * floats))
        for start in range(0, batch, step):
            yield slice(start, start + step)


def render(
    pixels_BHWC: Tensor,
    hows: Sequence[Augmentation],
    draws: Draws,
    mean: Triple,
    std: Triple,
    out_RCSS: Tensor,
) -> None:
    """Writes views of uint8 pixels to `out_RCSS`. `draws` are of all views, view after view."""
    size = out_RCSS.shape[-1]
    num_taps = taps_for(size) if any(how.blur > 0 for how in hows) else 0
    image_RCSS = resize(pixels_BHWC, draws.box, size, draws.flip, draws, num_taps)
    mean_RC1 = image_RCSS.mean(dim=(2, 3))[:, :, None] / 255
    offset_RC = torch.bmm(draws.pull, mean_RC1)[:, :, 0]
    normalise(image_RCSS, draws.matrix, offset_RC, mean, std, out_RCSS)
    parts = (x.chunk(len(hows)) for x in (out_RCSS, draws.solarise))
    for how, image_BCSS, chosen_B in zip(hows, *parts, strict=True):
        if how.solarise > 0:
            solarise(image_BCSS, chosen_B, mean, std)


def resize(
    pixels_BHWC: Tensor,
    box_R4: Tensor,
    size: int,
    flip_R: Tensor | None = None,
    draws: Draws | None = None,
    num_taps: int = 0,
) -> Tensor:
    """Float32 in [0, 255]; with `num_taps`, also blurred as drawn."""
    _, height, width, _ = pixels_BHWC.shape
    if pixels_BHWC.device.type == "cpu" and height * width >= transforms.LARGE:
        image_RCSS = resample_each(pixels_BHWC, box_R4, size, flip_R)
        if draws is not None and num_taps > 0:
            chosen_X = draws.blur.nonzero()[:, 0]
            sigma_X = draws.sigma[chosen_X]
            blur_XSS = blur_matrices(sigma_X, size, num_taps)
            for at, sigma, blur_SS in zip(chosen_X, sigma_X.tolist(), blur_XSS, strict=True):
                radius = min(num_taps // 2, int(CUT * sigma))
                image_RCSS[at] = apply_blur(image_RCSS[at], blur_SS, radius)
        return image_RCSS

    top_R, left_R, tall_R, wide_R = box_R4.unbind(-1)
    rows_RSH = resize_weights(top_R, tall_R, height, size)
    columns_RSW = resize_weights(left_R, wide_R, width, size, flip_R)
    if draws is not None and num_taps > 0:
        no_blur = constant(NO_BLUR, draws.sigma.device)
        sigma_R = torch.where(draws.blur, draws.sigma, no_blur)
        blur_RSS = blur_matrices(sigma_R, size, num_taps)
        rows_RSH, columns_RSW = blur_RSS @ rows_RSH, blur_RSS @ columns_RSW
    return resample(pixels_BHWC, rows_RSH, columns_RSW)


def normalise(
    image_RCSS: Tensor,
    matrix_RCC: Tensor,
    offset_RC: Tensor,
    mean: Triple,
    std: Triple,
    out_RCSS: Tensor,
) -> None:
    """Applies a colour map to values in [0, 255], clamps and normalises them."""
    mean_C, std_C = constant((mean, std), image_RCSS.device)
    scale_C1, low_C11, high_C11 = _scale_and_limits(mean, std, image_RCSS.device)
    torch.baddbmm(
        ((offset_RC - mean_C) / std_C)[:, :, None],
        matrix_RCC / scale_C1,
        image_RCSS.flatten(2),
        out=out_RCSS.view(len(out_RCSS), 3, -1),
    )
    if out_RCSS.device.type != "cpu":
        out_RCSS.clamp_(low_C11, high_C11)
        return
    limits = zip(low_C11.flatten().tolist(), high_C11.flatten().tolist(), strict=True)
    for channel, (low, high) in enumerate(limits):
        # three times as fast on a CPU as with tensors for limits
        out_RCSS[:, channel].clamp_(low, high)


@lru_cache(maxsize=16)
def _scale_and_limits(
    mean: Triple, std: Triple, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """255 times the deviation (C, 1), and black and white, normalised (C, 1, 1)."""
    mean_C, std_C = torch.tensor((mean, std), dtype=torch.float64)
    limits = [((value - mean_C) / std_C).float()[:, None, None].to(device) for value in (0, 1)]
    return (255 * std_C).float()[:, None].to(device), *limits


def solarise(image_BCSS: Tensor, chosen_B: Tensor, mean: Triple, std: Triple) -> None:
    """Inverts values from 128 / 255 on, of normalised images, in place."""
    mean_C11, std_C11 = constant((mean, std), image_BCSS.device)[:, :, None, None]
    limit_C11, twice_C11 = (128 / 255 - mean_C11) / std_C11, (1 - 2 * mean_C11) / std_C11
    if image_BCSS.device.type == "cpu":  # only a CPU gains by leaving images out
        chosen_X = chosen_B.nonzero()[:, 0]
        x_XCSS = image_BCSS[chosen_X]
        image_BCSS[chosen_X] = torch.where(x_XCSS >= limit_C11, twice_C11 - x_XCSS, x_XCSS)
        return
    inverted_BCSS = (image_BCSS >= limit_C11) & chosen_B[:, None, None, None]
    image_BCSS.copy_(torch.where(inverted_BCSS, twice_C11 - image_BCSS, image_BCSS))


def _check(pixels: Tensor, aspect: Tensor | None) -> None:
    is_good = pixels.dtype == torch.uint8 and pixels.ndim == 4 and pixels.shape[-1] == 3
    if not is_good or 0 in pixels.shape[1:]:
        raise UsageError(
            f"`pixels` (={pixels.dtype}, shape {tuple(pixels.shape)}) must be uint8 of shape"
            " (batch, height, width, 3)"
        )
    if aspect is not None and aspect.shape != pixels.shape[:1]:
        raise UsageError(f"`aspect` (=shape {tuple(aspect.shape)}) must have {len(pixels)} numbers")
