"""Random resized crop and flip as one resampling.

A crop, a resize with antialiasing and a flip are linear in the pixels and separable, so each image needs two small matrices only:
`out = rows @ image @ columns.T`. The weights are those of torchvision and Pillow for antialiased bilinear resizing (a triangle as wide
as the reduction, read inside the crop only), so the result is theirs up to rounding. A blur of the result, which is linear and
separable too, can be multiplied into the same matrices (see `blur.py`).

Dimension key: B images, T tries, C channels, H × W pixels of the input, S pixels of a side of the output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

NUM_TRIES = 10  # torchvision's number of tries for a crop that fits
LARGE = 64 * 64  # pixels from which a CPU resizes one image at a time


def crop_boxes(
    uniform_BU: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], aspect_B: Tensor | None = None
) -> Tensor:
    """Boxes (B, 4) as top, left, height, width in whole pixels, distributed as torchvision's `RandomResizedCrop.get_params`.

    The share of the area is uniform in `scale`, the logarithm of width / height uniform; of ten tries the first that fits is taken, and
    if none does, the largest centred box with a ratio inside `ratio`.

    Args:
        uniform_BU: (B, 22) numbers in [0, 1): ten for the area, ten for the ratio, two for the place.
        height, width: of the pixels at hand.
        scale, ratio: lowest and highest.
        aspect_B: width / height of the original images, where `height` × `width` holds them squashed; the boxes are then those of the
            original, squashed with it. Without it the pixels are the original.
    """
    aspect_B1 = torch.full_like(uniform_BU[:, :1], width / height) if aspect_B is None else aspect_B.to(uniform_BU)[:, None]
    area_BT = scale[0] + (scale[1] - scale[0]) * uniform_BU[:, :NUM_TRIES]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratio_BT = torch.exp(low + (high - low) * uniform_BU[:, NUM_TRIES : 2 * NUM_TRIES])
    wide_BT = torch.round(width * torch.sqrt(area_BT * ratio_BT / aspect_B1))
    tall_BT = torch.round(height * torch.sqrt(area_BT / ratio_BT * aspect_B1))
    fits_BT = (wide_BT > 0) & (wide_BT <= width) & (tall_BT > 0) & (tall_BT <= height)

    first_B1 = fits_BT.to(torch.uint8).argmax(dim=1, keepdim=True)
    fits_B = fits_BT.any(dim=1)
    whole = centred_boxes(aspect_B1[:, 0], height, width, ratio)
    tall_B = torch.where(fits_B, tall_BT.gather(1, first_B1)[:, 0], whole[:, 2])
    wide_B = torch.where(fits_B, wide_BT.gather(1, first_B1)[:, 0], whole[:, 3])
    top_B = torch.where(fits_B, torch.floor(uniform_BU[:, -2] * (height - tall_B + 1)), whole[:, 0])
    left_B = torch.where(fits_B, torch.floor(uniform_BU[:, -1] * (width - wide_B + 1)), whole[:, 1])
    # float32 can round u · n up to n; the last place is n - 1
    return torch.stack([torch.minimum(top_B, height - tall_B), torch.minimum(left_B, width - wide_B), tall_B, wide_B], dim=1)


def centred_boxes(aspect_B: Tensor, height: int, width: int, ratio: tuple[float, float], share: float = 1.0) -> Tensor:
    """The largest centred box (B, 4) whose width / height, on an original of `aspect_B`, lies in `ratio`; its sides times `share`."""
    wanted_B = aspect_B.clamp(ratio[0], ratio[1])
    wide_B = torch.round(share * width * (wanted_B / aspect_B).clamp(max=1)).clamp(min=1)
    tall_B = torch.round(share * height * (aspect_B / wanted_B).clamp(max=1)).clamp(min=1)
    return torch.stack([torch.floor((height - tall_B) / 2), torch.floor((width - wide_B) / 2), tall_B, wide_B], dim=1)


def resize_weights(start_B: Tensor, length_B: Tensor, in_size: int, out_size: int, flip_B: Tensor | None = None) -> Tensor:
    """Weights (B, S, in_size) that resize the pixels `start` to `start + length` to `out_size`, antialiased bilinear, each row of sum 1."""
    start_B1, length_B1 = start_B[:, None], length_B[:, None]
    step_B1 = length_B1 / out_size
    reach_B1 = step_B1.clamp(min=1)
    place_1S = (torch.arange(out_size, dtype=start_B.dtype, device=start_B.device) + 0.5)[None]
    place_BS = place_1S if flip_B is None else torch.where(flip_B[:, None], out_size - place_1S, place_1S)
    centre_BS = (start_B1 + place_BS * step_B1) / reach_B1
    pixel_1I = (torch.arange(in_size, dtype=start_B.dtype, device=start_B.device) + 0.5)[None]
    inside_BI = (pixel_1I > start_B1) & (pixel_1I < start_B1 + length_B1)
    pixel_BI = torch.where(inside_BI, pixel_1I / reach_B1, float("inf"))  # infinitely far: weight 0
    weights_BSI = (centre_BS[:, :, None] - pixel_BI[:, None, :]).abs_().neg_().add_(1).clamp_(min=0)
    return weights_BSI.div_(weights_BSI.sum(dim=2, keepdim=True))


def resample(pixels_BHWC: Tensor, rows_BSH: Tensor, columns_BSW: Tensor) -> Tensor:
    """`rows @ image @ columns.T` for every channel: (B, C, S, S), float32."""
    batch, height, width, channels = pixels_BHWC.shape
    image = pixels_BHWC.permute(0, 3, 1, 2).contiguous().float()  # moving bytes and then widening them is the faster order
    across = torch.bmm(image.view(batch, channels * height, width), columns_BSW.transpose(1, 2))
    return torch.matmul(rows_BSH[:, None], across.view(batch, channels, height, columns_BSW.shape[1]))


def resample_each(pixels_BHWC: Tensor, box_B4: Tensor, size: int, flip_B: Tensor | None = None) -> Tensor:
    """The same, one image at a time by torch's own resizing of bytes, rounded to whole bytes as torchvision does.

    Only the box is read, and the weights that are zero cost nothing; from 64 × 64 on that is the faster way on a CPU.
    """
    out = torch.empty(len(pixels_BHWC), pixels_BHWC.shape[3], size, size)
    flips = [False] * len(out) if flip_B is None else flip_B.tolist()
    for image_HWC, (top, left, tall, wide), flip, one in zip(pixels_BHWC, box_B4.long().tolist(), flips, out, strict=True):
        part = image_HWC[None, top : top + tall, left : left + wide].permute(0, 3, 1, 2)
        resized = interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0].contiguous()
        one.copy_(resized.flip(2) if flip else resized)
    return out
