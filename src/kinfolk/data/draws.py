"""The random parameters of one view of a batch, drawn at once.

Dimension key: B images, U numbers per image, F = 4 adjustments of the colour (brightness, contrast, saturation, hue).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kinfolk.data.colour import jitter, to_grey
from kinfolk.data.crop import NUM_TRIES, crop_boxes
from kinfolk.data.presets import Augmentation

_CROP = 2 * NUM_TRIES + 2
NUM_UNIFORM = _CROP + 14


@dataclass(frozen=True)
class Draws:
    """What happens to each image: `box` (B, 4) as top, left, height, width; `factors` and `order` (B, 4) of the adjustments of the
    colour, and with greyscale as `matrix` and `pull` (B, 3, 3), see `colour.py`; the rest (B,)."""

    box: Tensor
    flip: Tensor
    factors: Tensor
    order: Tensor
    grey: Tensor
    matrix: Tensor
    pull: Tensor
    blur: Tensor
    sigma: Tensor
    solarise: Tensor

    def __getitem__(self, part: slice) -> Draws:
        return Draws(*(getattr(self, field.name)[part] for field in fields(self)))


def draw(how: Augmentation, uniform_BU: Tensor, height: int, width: int, aspect_B: Tensor | None = None) -> Draws:
    """Turns `NUM_UNIFORM` numbers in [0, 1) per image into its parameters.

    Each number has one use, whatever the settings: changing one setting leaves the other draws as they were.
    """
    flip_B, jitter_B, *_ = uniform_BU[:, _CROP:].unbind(dim=1)
    factors_BF, order_BF = uniform_BU[:, _CROP + 2 : _CROP + 6], uniform_BU[:, _CROP + 6 : _CROP + 10]
    grey_B, blur_B, sigma_B, solarise_B = uniform_BU[:, _CROP + 10 :].unbind(dim=1)

    ranges = [(max(0.0, 1 - how.strength * value), 1 + how.strength * value) for value in (how.brightness, how.contrast, how.saturation)]
    ranges.append((-how.strength * how.hue, how.strength * how.hue))
    low_F, high_F = torch.tensor(ranges, dtype=uniform_BU.dtype, device=uniform_BU.device).unbind(dim=1)
    nothing_F = uniform_BU.new_tensor([1.0, 1.0, 1.0, 0.0])
    factors_BF = torch.where((jitter_B < how.jitter)[:, None], low_F + (high_F - low_F) * factors_BF, nothing_F)
    order_BF = order_BF.argsort(dim=1)
    matrix_BCC, pull_BCC = jitter(factors_BF, order_BF)
    return Draws(
        box=crop_boxes(uniform_BU[:, :_CROP], height, width, how.scale, how.ratio, aspect_B),
        flip=flip_B < how.flip,
        factors=factors_BF,
        order=order_BF,
        grey=grey_B < how.grey,
        matrix=to_grey(matrix_BCC, grey_B < how.grey),
        pull=to_grey(pull_BCC, grey_B < how.grey),
        blur=blur_B < how.blur,
        sigma=how.sigma[0] + (how.sigma[1] - how.sigma[0]) * sigma_B,
        solarise=solarise_B < how.solarise,
    )
