"""Torchvision's transforms written out for one image at a time, as slowly and plainly as they read;
the views are tested against these.

An image is a float64 tensor (3, height, width) with values in [0, 1].
"""

from __future__ import annotations

import colorsys
import math
import random

import torch
from torch import Tensor

Box = tuple[int, int, int, int]


def crop_box(
    rng: random.Random,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """`RandomResizedCrop.get_params`: top, left, height, width."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, tall = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < tall <= height:
            return rng.randint(0, height - tall), rng.randint(0, width - wide), tall, wide
    if width / height < ratio[0]:
        wide, tall = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        wide, tall = round(height * ratio[1]), height
    else:
        wide, tall = width, height
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def crop_resize(image: Tensor, box: Box, size: int, flip: bool) -> Tensor:
    """Crop, resize with an antialiased triangle filter along one axis and then the other, flip."""
    top, left, tall, wide = box
    cropped = image[:, top : top + tall, left : left + wide]
    across = torch.stack([_filtered(cropped, 2, place, size) for place in range(size)], dim=2)
    both = torch.stack([_filtered(across, 1, place, size) for place in range(size)], dim=1)
    return both.flip(2) if flip else both


def _filtered(image: Tensor, axis: int, place: int, size: int) -> Tensor:
    length = image.shape[axis]
    reach = max(length / size, 1.0)
    centre = (place + 0.5) * length / size
    total, weight_sum = torch.zeros_like(image.select(axis, 0)), 0.0
    for pixel in range(length):
        weight = max(0.0, 1 - abs(pixel + 0.5 - centre) / reach)
        total = total + weight * image.select(axis, pixel)
        weight_sum += weight
    return total / weight_sum


def grey(image: Tensor) -> Tensor:
    """Greyscale, (height, width)."""
    return 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]


def adjust(image: Tensor, factors: list[float], order: list[int], cut: bool = True) -> Tensor:
    """Brightness (0), contrast (1), saturation (2) and hue (3) one after the other, cut to [0, 1]
    after each."""
    for which in order:
        factor = factors[which]
        if which == 0:
            image = factor * image
        elif which == 1:
            image = factor * image + (1 - factor) * grey(image).mean()
        elif which == 2:
            image = factor * image + (1 - factor) * grey(image)
        elif factor != 0:
            image = shift_hue(image, factor)
        image = image.clamp(0, 1) if cut else image
    return image


def shift_hue(image: Tensor, turns: float) -> Tensor:
    """Shift of the hue in HSV, pixel by pixel."""
    shifted = image.clone()
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, row, column].tolist())
            shifted[:, row, column] = torch.tensor(
                colorsys.hsv_to_rgb((hue + turns) % 1.0, saturation, value), dtype=image.dtype
            )
    return shifted


def blur(image: Tensor, sigma: float, num_taps: int) -> Tensor:
    """Gaussian blur along one axis and then the other, reflected at the edges."""
    radius = num_taps // 2
    kernel = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-radius, radius + 1)]
    for axis in (1, 2):
        size = image.shape[axis]
        lines = []
        for place in range(size):
            line = torch.zeros_like(image.select(axis, 0))
            for tap, weight in zip(range(-radius, radius + 1), kernel, strict=True):
                read = abs(place + tap)
                read = 2 * (size - 1) - read if read > size - 1 else read
                line = line + weight / sum(kernel) * image.select(axis, read)
            lines.append(line)
        image = torch.stack(lines, dim=axis)
    return image


def solarise(image: Tensor, threshold: float) -> Tensor:
    """Values from the threshold on inverted."""
    return torch.where(image >= threshold, 1 - image, image)
