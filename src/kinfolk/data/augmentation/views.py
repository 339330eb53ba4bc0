"""From pixels and drawn parameters to one normalised view.

Dimension key: B images, C = 3 channels, H × W pixels of the input, S pixels of a side of the output, P = S·S, X blurred images.

Views: the augmented versions of a batch of images that contrastive learning compares, made as tensors on the training device.

The order is torchvision's: random resized crop, flip, colour jitter, greyscale, Gaussian blur, solarise, normalise. It takes two matrix
products for crop, flip and blur (`transforms.py`, `blur.py`), one for all colours and the normalisation (`colour.py`), and a cut to [0, 1].
In the space `lab` the result is converted to CIE Lab before it is normalised (`lab.py`).
Large images on a CPU are cropped and blurred one by one instead, with the same weights, which is faster there (`render.py`).

Parameters and probabilities are torchvision's. The result is an approximation of torchvision's in three places:

* values are cut to [0, 1] once, at the end, instead of after each adjustment of the colour, and not rounded to whole bytes in between;
* the hue is turned about the grey axis instead of shifted in HSV (`colour.py`);
* contrast takes the mean grey after the blur instead of before, which differs at the edges only.

On 200 photographs of 32 × 32 pixels (CIFAR-10) the colours differ from torchvision's, for the same draws, by 0.012 on average (of 1)
at strength 0.5 and 0.016 at strength 1, where the jitter itself changes them by 0.10 and 0.18; their mean by less than 0.003.

Dimension key: V views, B images of the batch, C = 3 channels, H × W pixels of the input, S pixels of a side of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kinfolk.data.augmentation import transforms
from kinfolk.data.augmentation.presets import SMALL, Augmentation, Value, augmentations
from kinfolk.data.augmentation.transforms import (
    CUT,
    LAB_MEAN,
    LAB_STD,
    LARGE,
    NUM_UNIFORM,
    Draws,
    blur_matrices,
    blurred,
    centred_boxes,
    draw,
    from_lab,
    recolour,
    taps_for,
    to_lab,
)
from kinfolk.errors import UsageError

Triple = tuple[float, ...]


def render(pixels_BHWC: Tensor, how: Augmentation, draws: Draws, mean: Triple, std: Triple, out_BCSS: Tensor) -> None:
    """Crop, flip, blur, colour, solarise and normalise uint8 pixels as drawn; the result is written to `out_BCSS`."""
    image_BCSS = resize(pixels_BHWC, draws.box, out_BCSS.shape[-1], draws.flip, draws, how.kernel)
    mean_BC1 = image_BCSS.mean(dim=(2, 3))[:, :, None] / 255
    normalise(image_BCSS, draws.matrix, torch.bmm(draws.pull, mean_BC1)[:, :, 0], mean, std, out_BCSS)
    if how.solarise > 0:
        chosen = draws.solarise.nonzero()[:, 0]
        out_BCSS[chosen] = solarised(out_BCSS[chosen], how.threshold, mean, std)


def resize(
    pixels_BHWC: Tensor, box_B4: Tensor, size: int, flip_B: Tensor | None = None, draws: Draws | None = None, kernel: float = 0.1
) -> Tensor:
    """The boxes resized to (B, C, S, S), float32 in [0, 255], and blurred where `draws` says so."""
    _, height, width, _ = pixels_BHWC.shape
    chosen_X = box_B4.new_zeros(0, dtype=torch.long) if draws is None else draws.blur.nonzero()[:, 0]
    sigma_X = box_B4.new_ones(0) if draws is None else draws.sigma[chosen_X]
    num_taps = taps_for(kernel, size)

    if pixels_BHWC.device.type == "cpu" and height * width >= transforms.LARGE:
        image_BCSS = transforms.resample_each(pixels_BHWC, box_B4, size, flip_B)
        for one, sigma, blur_SS in zip(chosen_X.tolist(), sigma_X.tolist(), blur_matrices(sigma_X, size, num_taps), strict=True):
            image_BCSS[one] = blurred(image_BCSS[one], blur_SS, radius=min(num_taps // 2, int(CUT * sigma)))
        return image_BCSS

    rows_BSH = transforms.resize_weights(box_B4[:, 0], box_B4[:, 2], height, size)
    columns_BSW = transforms.resize_weights(box_B4[:, 1], box_B4[:, 3], width, size, flip_B)
    if len(chosen_X):
        blur_XSS = blur_matrices(sigma_X, size, num_taps)
        rows_BSH[chosen_X] = blur_XSS @ rows_BSH[chosen_X]
        columns_BSW[chosen_X] = blur_XSS @ columns_BSW[chosen_X]
    return transforms.resample(pixels_BHWC, rows_BSH, columns_BSW)


def normalise(image_BCSS: Tensor, matrix_BCC: Tensor, offset_BC: Tensor, mean: Triple, std: Triple, out_BCSS: Tensor) -> None:
    """Colour map of values in [0, 255], cut to black and white, `(value - mean) / std`; written to `out_BCSS`."""
    mean_C, std_C = torch.tensor([mean, std], device=image_BCSS.device)
    matrix_BCC = matrix_BCC / (255 * std_C[:, None])
    offset_BC = (offset_BC - mean_C) / std_C
    recolour(image_BCSS.flatten(2), matrix_BCC, offset_BC, out=out_BCSS.view(len(out_BCSS), 3, -1))
    for channel, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        out_BCSS[:, channel].clamp_(-middle / spread, (1 - middle) / spread)


def solarised(image_BCSS: Tensor, threshold: float, mean: Triple, std: Triple) -> Tensor:
    """Values from the threshold on inverted, of normalised images."""
    mean_C11, std_C11 = torch.tensor([mean, std], device=image_BCSS.device)[:, :, None, None]
    inverted = (1 - 2 * mean_C11) / std_C11 - image_BCSS
    return torch.where(image_BCSS >= (threshold - mean_C11) / std_C11, inverted, image_BCSS)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SPACES = {"rgb": (IMAGENET_MEAN, IMAGENET_STD), "lab": (LAB_MEAN, LAB_STD)}
"""Colour spaces of the views, with the usual mean and standard deviation of their channels."""
_CHUNK_BYTES = 2**24  # working memory at a time on the CPU: what stays in its cache


class Views:
    """Makes `num_views` augmented views of a batch of images.

    All randomness comes from the generator handed over: one block of numbers per view, whatever the settings. So the same state of the
    generator gives the same crops with and without blur, and the first view is the same whether two or eight are made.

    Args:
        preset: `simclr`, `moco`, `byol`, `sogclr`, `mild` or `plain`; see `presets.py`.
        size: pixels of a side of the views.
        mean, std: per channel, of values in [0, 1], or of L, a and b; those of `SPACES` if not given.
        evaluate_share: side of the centre crop of `evaluate`, as a share of the shorter side; 7/8 above 64 pixels, else all.
        space: "rgb", or "lab" for CIE Lab (`lab.py`): the picture is augmented as ever and then converted.
        overrides: any setting of `Augmentation`, e.g. `blur=0.5`, `scale=(0.2, 1)`; a list of numbers where the setting is one number
            means one per view, e.g. `solarise=(0, 0.2)`.

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
        evaluate_share: float | None = None,
        space: str = "rgb",
        **overrides: Value,
    ) -> None:
        if size < 1:
            raise UsageError(f"`size` (={size}) must be at least 1")
        if space not in SPACES:
            raise UsageError(f"`space` (={space!r}) must be one of {', '.join(SPACES)}")
        self.preset, self.size, self.space = preset, size, space
        usual_mean, usual_std = SPACES[space]
        self.mean = tuple(map(float, usual_mean if mean is None else mean))
        self.std = tuple(map(float, usual_std if std is None else std))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UsageError(f"`mean` (={mean}) and `std` (={std}) must be three numbers each, those of `std` above 0")
        self.evaluate_share = (1.0 if size <= SMALL else 7 / 8) if evaluate_share is None else float(evaluate_share)
        if not 0 < self.evaluate_share <= 1:
            raise UsageError(f"`evaluate_share` (={evaluate_share}) must be in (0, 1]")
        self.augmentations = augmentations(preset, size, overrides)
        given: dict[str, Any] = {"mean": mean, "std": std, "evaluate_share": evaluate_share}
        given |= {"space": None if space == "rgb" else space, **overrides}
        self._given = {name: value for name, value in given.items() if value is not None}

    def __call__(self, pixels: Tensor, generator: torch.Generator, aspect: Tensor | None = None, num_views: int = 2) -> Tensor:
        """Augmented, normalised views (V, B, 3, size, size).

        Args:
            pixels: (B, H, W, 3), uint8.
            generator: on the pixels' device.
            aspect: (B,) width / height of the original images, where `pixels` holds them squashed to one shape.
            num_views: V; view v is made by augmentation v, counted round if there are fewer.
        """
        _check(pixels, aspect)
        batch, height, width, _ = pixels.shape
        views = torch.empty(num_views, batch, 3, self.size, self.size, device=pixels.device)
        for view in range(num_views):
            how = self.augmentations[view % len(self.augmentations)]
            uniform_BU = torch.rand(batch, NUM_UNIFORM, generator=generator, device=pixels.device)
            draws = draw(how, uniform_BU, height, width, aspect)
            for part in self._parts(pixels):
                render(pixels[part], how, draws[part], *self._while_rgb, out_BCSS=views[view, part])
                self._convert(views[view, part])
        return views

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor:
        """The centre square of the original, resized and normalised: (B, 3, size, size). No randomness."""
        _check(pixels, aspect)
        batch, height, width, _ = pixels.shape
        aspect_B = torch.full((batch,), width / height, device=pixels.device) if aspect is None else aspect.float()
        box_B4 = centred_boxes(aspect_B, height, width, ratio=(1.0, 1.0), share=self.evaluate_share)
        images = torch.empty(batch, 3, self.size, self.size, device=pixels.device)
        identity, nothing = torch.eye(3, device=pixels.device), torch.zeros(3, device=pixels.device)
        for part in self._parts(pixels):
            image = resize(pixels[part], box_B4[part], self.size)
            maps = identity.expand(len(image), 3, 3), nothing.expand(len(image), 3)
            normalise(image, *maps, *self._while_rgb, out_BCSS=images[part])
            self._convert(images[part])
        return images

    def pictures(self, views: Tensor) -> Tensor:
        """Views (…, 3, H, W) as a person sees them: red, green and blue in [0, 1]."""
        mean_C11, std_C11 = torch.tensor([self.mean, self.std], device=views.device)[:, :, None, None]
        values = views * std_C11 + mean_C11
        return values.clamp(0, 1) if self.space == "rgb" else from_lab(values.flatten(0, -4)).view_as(values)

    def config(self) -> dict[str, Any]:
        """Every setting, resolved: `Views(**views.config())` makes the same views."""
        settings: dict[str, Any] = {}
        for field in fields(Augmentation):
            values = [getattr(how, field.name) for how in self.augmentations]
            same = all(value == values[0] for value in values)
            settings[field.name] = (list(values[0]) if isinstance(values[0], tuple) else values[0]) if same else values
        named = {"preset": self.preset, "size": self.size, "mean": list(self.mean), "std": list(self.std), "space": self.space}
        return {**named, "evaluate_share": self.evaluate_share, **settings}

    def __repr__(self) -> str:
        return (
            f"Views({', '.join([repr(self.preset), f'size={self.size}', *(f'{name}={value!r}' for name, value in self._given.items())])})"
        )

    @property
    def _while_rgb(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation to normalise red, green and blue by: none where another space follows."""
        return (self.mean, self.std) if self.space == "rgb" else ((0.0,) * 3, (1.0,) * 3)

    def _convert(self, image_BCSS: Tensor) -> None:
        """From red, green and blue in [0, 1] to the normalised space, in place; nothing to do where they are the space."""
        if self.space == "lab":
            mean_C11, std_C11 = torch.tensor([self.mean, self.std], device=image_BCSS.device)[:, :, None, None]
            image_BCSS.copy_((to_lab(image_BCSS) - mean_C11) / std_C11)

    def _parts(self, pixels: Tensor) -> Iterator[slice]:
        """Parts of the batch that are worked on at a time; on another device than the CPU all of it."""
        batch, height, width, _ = pixels.shape
        step = max(batch, 1)
        if pixels.device.type == "cpu":
            floats = 6 * self.size**2 + (0 if height * width >= LARGE else (3 * width + 4 * self.size) * height)
            step = max(1, _CHUNK_BYTES // (4 * floats))
        for start in range(0, batch, step):
            yield slice(start, start + step)


def _check(pixels: Tensor, aspect: Tensor | None) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3 or 0 in pixels.shape[1:]:
        raise UsageError(f"`pixels` (={pixels.dtype}, shape {tuple(pixels.shape)}) must be uint8 of shape (batch, height, width, 3)")
    if aspect is not None and aspect.shape != pixels.shape[:1]:
        raise UsageError(f"`aspect` (=shape {tuple(aspect.shape)}) must hold one number per image of `pixels` (={len(pixels)})")
