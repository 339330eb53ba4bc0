"""Image transforms behind the views, as pure functions on whole batches.

No shape depends on values, and nothing waits for an accelerator, except in `resample_each` and
`apply_blur`, which work image by image: four times as fast for 224 × 224 pixels on a CPU.

Dimension key: V views, B images (or more leading dimensions), U uniform numbers per image, T tries
for a crop, C = 3 channels, F = 4 colour adjustments (brightness, contrast, saturation, hue), H × W
pixels of the input, S pixels of a side of the output, P = S·S pixels, K taps of a blur kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from kinfolk.data.presets import Augmentation

LARGE = 64 * 64  # pixels per image from which a CPU resizes images one by one


@lru_cache(maxsize=256)
def constant(values: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A read-only tensor, copied to each device once."""
    return torch.tensor(values, dtype=dtype).to(device)


# Random parameters

NUM_TRIES = 10  # torchvision's, to find a crop that fits
SIGMA = (0.1, 2.0)  # of the blur, in pixels
_AREA, _RATIO = slice(0, NUM_TRIES), slice(NUM_TRIES, 2 * NUM_TRIES)
_PLACE = slice(2 * NUM_TRIES, 2 * NUM_TRIES + 2)
_FLIP, _JITTER = 2 * NUM_TRIES + 2, 2 * NUM_TRIES + 3
_FACTORS, _ORDER = slice(_JITTER + 1, _JITTER + 5), slice(_JITTER + 5, _JITTER + 9)
_GREY, _BLUR, _SIGMA, _SOLARISE = range(_JITTER + 9, _JITTER + 13)
NUM_UNIFORM = _SOLARISE + 1


@dataclass(frozen=True)
class Draws:
    """Parameters of each image: `box` (…, 4) is top, left, height and width of the crop; `factors`
    and `order` (…, F) are those of the colour adjustments, `matrix` and `pull` (…, C, C) the affine
    map they make together with `grey` (see `jitter`)."""

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

    def __getitem__(self, index: Any) -> Draws:
        return Draws(*(getattr(self, field.name)[index] for field in fields(self)))

    def flatten(self) -> Draws:
        return Draws(*(getattr(self, field.name).flatten(0, 1) for field in fields(self)))


def draw(
    hows: Sequence[Augmentation],
    uniform_VBU: Tensor,
    height: int,
    width: int,
    aspect_B: Tensor | None = None,
) -> Draws:
    """The parameters from `NUM_UNIFORM` numbers in [0, 1) per image and view, each with one use,
    whatever the settings."""
    low_V1U, span_V1U, probability_V1U = _ranges(tuple(hows), uniform_VBU.device)
    value_VBU = low_V1U + span_V1U * uniform_VBU
    chosen_VBU = uniform_VBU < probability_V1U
    nothing_F = constant((1.0, 1.0, 1.0, 0.0), uniform_VBU.device)
    factors_VBF = torch.where(chosen_VBU[..., _JITTER, None], value_VBU[..., _FACTORS], nothing_F)
    order_VBF = uniform_VBU[..., _ORDER].argsort(dim=-1)
    maps_VB2CC = to_grey(
        torch.stack(jitter(factors_VBF, order_VBF), dim=-3), chosen_VBU[..., _GREY, None]
    )
    ratio = constant(tuple((how.ratio,) for how in hows), uniform_VBU.device).unbind(-1)
    ratio_VBT = value_VBU[..., _RATIO].exp()
    return Draws(
        box=crop_boxes(
            value_VBU[..., _AREA], ratio_VBT, value_VBU[..., _PLACE], height, width, ratio, aspect_B
        ),
        flip=chosen_VBU[..., _FLIP],
        factors=factors_VBF,
        order=order_VBF,
        grey=chosen_VBU[..., _GREY],
        matrix=maps_VB2CC[..., 0, :, :],
        pull=maps_VB2CC[..., 1, :, :],
        blur=chosen_VBU[..., _BLUR],
        sigma=value_VBU[..., _SIGMA],
        solarise=chosen_VBU[..., _SOLARISE],
    )


@lru_cache(maxsize=64)
def _ranges(hows: tuple[Augmentation, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(V, 1, U) each: start and width of the range of every number, and the probability it is
    compared with."""
    low, high, probability = torch.zeros(3, len(hows), 1, NUM_UNIFORM, dtype=torch.float64)
    high += 1
    for view, how in enumerate(hows):
        low[view, 0, _AREA], high[view, 0, _AREA] = how.scale
        low[view, 0, _RATIO], high[view, 0, _RATIO] = map(math.log, how.ratio)
        low[view, 0, _SIGMA], high[view, 0, _SIGMA] = SIGMA
        values = (how.brightness, how.contrast, how.saturation)
        for place, value in enumerate(values, _FACTORS.start):
            low[view, 0, place] = max(0.0, 1 - how.strength * value)
            high[view, 0, place] = 1 + how.strength * value
        hue = how.strength * how.hue
        low[view, 0, _FACTORS.stop - 1], high[view, 0, _FACTORS.stop - 1] = -hue, hue
        shares = (how.flip, how.jitter, how.grey, how.blur, how.solarise)
        places = (_FLIP, _JITTER, _GREY, _BLUR, _SOLARISE)
        probability[view, 0, places] = torch.tensor(shares, dtype=torch.float64)
    span = (high - low).float()
    span[..., _FACTORS] = high[..., _FACTORS].float() - low[..., _FACTORS].float()
    return low.float().to(device), span.to(device), probability.float().to(device)


# Crop, resize and flip: `out = rows @ image @ columns.T`, with Pillow's weights for antialiased
# bilinear resizing. A blur can be multiplied into the same matrices.


def crop_boxes(
    area_BT: Tensor,
    ratio_BT: Tensor,
    place_B2: Tensor,
    height: int,
    width: int,
    limits: Sequence[Tensor | float],
    aspect_B: Tensor | None = None,
) -> Tensor:
    """Boxes (B, 4) as by torchvision's `RandomResizedCrop`: the first of T tries that fits, or the
    largest centred box with a ratio inside `limits`. `place_B2`: the vertical and the horizontal
    position, in [0, 1). `aspect_B`: of the originals, if the pixels, and so the boxes, are
    squashed."""
    size_2 = constant((height, width), area_BT.device, area_BT.dtype)
    aspect_B1 = constant((width / height,), area_BT.device, area_BT.dtype)
    if aspect_B is not None:
        aspect_B1 = aspect_B.to(area_BT)[..., None]
    shares = [area_BT / ratio_BT * aspect_B1, area_BT * ratio_BT / aspect_B1]
    share_B2T = torch.stack(shares, dim=-2)
    sides_B2T = torch.round(size_2[:, None] * share_B2T.sqrt())
    fits_BT = ((sides_B2T > 0) & (sides_B2T <= size_2[:, None])).all(dim=-2)
    first_B1 = fits_BT.to(torch.uint8).argmax(dim=-1, keepdim=True)
    fits_B1 = fits_BT.any(dim=-1, keepdim=True)
    centred_B4 = centred_boxes(aspect_B1[..., 0], height, width, limits)
    first_B21 = first_B1[..., None, :].expand(*sides_B2T.shape[:-1], 1)
    sides_B2 = torch.where(fits_B1, sides_B2T.gather(-1, first_B21)[..., 0], centred_B4[..., 2:])
    room_B2 = size_2 - sides_B2
    # float32 can round u · n up to n; the last position is n - 1
    start_B2 = torch.minimum(torch.floor(place_B2 * (room_B2 + 1)), room_B2)
    return torch.cat([torch.where(fits_B1, start_B2, centred_B4[..., :2]), sides_B2], dim=-1)


def centred_boxes(
    aspect_B: Tensor, height: int, width: int, limits: Sequence[Tensor | float], share: float = 1.0
) -> Tensor:
    """The largest centred box (B, 4) whose width / height, on an original of `aspect_B`, is within
    `limits`; its sides times `share`."""
    size_2 = constant((height, width), aspect_B.device, aspect_B.dtype)
    low, high = (
        x if isinstance(x, Tensor) else constant(float(x), aspect_B.device, aspect_B.dtype)
        for x in limits
    )
    ratio_B = aspect_B.clamp(low, high)
    part_B2 = torch.stack([aspect_B / ratio_B, ratio_B / aspect_B], dim=-1).clamp(max=1)
    whole_2 = constant((share * height, share * width), aspect_B.device, aspect_B.dtype)
    sides_B2 = torch.round(whole_2 * part_B2).clamp(min=1)
    return torch.cat([torch.floor((size_2 - sides_B2) / 2), sides_B2], dim=-1)


def resize_weights(
    start_B: Tensor, length_B: Tensor, in_size: int, out_size: int, flip_B: Tensor | None = None
) -> Tensor:
    """(B, S, in_size), to resize pixels `start` to `start + length` to `out_size`."""
    start_B1, length_B1 = start_B[..., None], length_B[..., None]
    step_B1 = length_B1 / out_size
    reach_B1 = step_B1.clamp(min=1)
    place_BS = _centres(out_size, start_B.device)
    if flip_B is not None:
        place_BS = torch.where(flip_B[..., None], out_size - place_BS, place_BS)
    centre_BS = (start_B1 + place_BS * step_B1) / reach_B1
    pixel_I = _centres(in_size, start_B.device)
    inside_BI = (pixel_I > start_B1) & (pixel_I < start_B1 + length_B1)
    # infinitely far away: weight 0
    pixel_BI = torch.where(inside_BI, pixel_I / reach_B1, constant(math.inf, start_B.device))
    weights_BSI = (
        (centre_BS[..., :, None] - pixel_BI[..., None, :]).abs_().neg_().add_(1).clamp_(min=0)
    )
    return weights_BSI.div_(weights_BSI.sum(dim=-1, keepdim=True))


@lru_cache(maxsize=64)
def _centres(size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, dtype=torch.float32) + 0.5).to(device)


def resample(pixels_BHWC: Tensor, rows_BSH: Tensor, columns_BSW: Tensor) -> Tensor:
    """(B, C, S, S) float32; of V·B matrices, B images are used V times."""
    batch, height, width, channels = pixels_BHWC.shape
    # faster than converting before moving
    image = pixels_BHWC.permute(0, 3, 1, 2).contiguous().float()
    if len(rows_BSH) > batch:
        image = image.repeat(len(rows_BSH) // batch, 1, 1, 1)
    lines = image.view(len(image), channels * height, width)
    across = torch.bmm(lines, columns_BSW.transpose(1, 2))
    return torch.matmul(rows_BSH[:, None], across.view(len(image), channels, height, -1))


def resample_each(
    pixels_BHWC: Tensor, box_B4: Tensor, size: int, flip_B: Tensor | None = None
) -> Tensor:
    """As `resample`, with torch's resizing of bytes, rounded to whole bytes as by torchvision."""
    out = torch.empty(len(pixels_BHWC), pixels_BHWC.shape[3], size, size, dtype=torch.float32)
    flips = [False] * len(out) if flip_B is None else flip_B.tolist()
    boxes = box_B4.long().tolist()
    for image, (top, left, tall, wide), flip, target in zip(
        pixels_BHWC, boxes, flips, out, strict=True
    ):
        part = image[None, top : top + tall, left : left + wide].permute(0, 3, 1, 2)
        resized = interpolate(part, size=(size, size), mode="bilinear", antialias=True)
        target.copy_((resized.flip(3) if flip else resized)[0].contiguous())
    return out


# Gaussian blur, as a matrix

CUT = 4.0  # standard deviations
_BAND = 56  # lines at a time, the fastest of the sizes measured
# a standard deviation for which the matrix of `blur_matrices` is exactly the identity
NO_BLUR = 1e-3


def blur_matrices(sigma_B: Tensor, size: int, num_taps: int) -> Tensor:
    """(B, S, S): blur a line as torchvision, with `num_taps` (odd) taps, none beyond `CUT` standard
    deviations."""
    distance_BK = (_offsets(num_taps, sigma_B.device) / sigma_B[:, None]).abs()
    kernel_BK = torch.softmax(
        (-0.5 * distance_BK.square()).masked_fill(distance_BK > CUT, float("-inf")), dim=1
    )
    return (kernel_BK @ _taps(size, num_taps, sigma_B.device)).view(-1, size, size)


def apply_blur(image_CSS: Tensor, matrix_SS: Tensor, radius: int) -> Tensor:
    """`matrix @ image @ matrix.T` for a matrix that is zero further than `radius` from the
    diagonal."""
    size = image_CSS.shape[-1]
    for _ in range(2):  # along one axis, then along the other
        bands = []
        for start in range(0, size, _BAND):
            band = slice(start, min(start + _BAND, size))
            read = slice(max(0, band.start - radius), band.stop + radius)
            bands.append(image_CSS[..., read] @ matrix_SS[band, read].T)
        image_CSS = torch.cat(bands, dim=-1).transpose(1, 2)
    return image_CSS


def taps_for(size: int) -> int:
    """The odd number next to a tenth of `size`, as in SimCLR: 23 for 224."""
    return int(0.1 * size) | 1


@lru_cache(maxsize=8)
def _offsets(num_taps: int, device: torch.device) -> Tensor:
    return (torch.arange(num_taps, dtype=torch.float32) - num_taps // 2).to(device)


@lru_cache(maxsize=8)
def _taps(size: int, num_taps: int, device: torch.device) -> Tensor:
    """(K, S·S) which pixel each tap reads: `out[k, i, reflect(i + k - K // 2)] = 1`."""
    line_S = torch.arange(size)
    read_KS = line_S[None, :] + torch.arange(num_taps)[:, None] - num_taps // 2
    period = max(2 * (size - 1), 1)
    read_KS = (size - 1 - (read_KS.remainder(period) - (size - 1)).abs()).clamp(min=0)
    return one_hot(read_KS, size).float().view(num_taps, size * size).to(device)


# Brightness, contrast, saturation, hue and greyscale, as one affine map of the colour
#
# Each of torchvision's four adjustments is linear in the colour x and the mean colour m of the
# image, so all four, in their random order, are `x -> A x + D m`. Only contrast needs the mean:
# contrast(x) = c x + (1 - c) grey(m), and so m -> c m + (1 - c) grey(m). A is the product of the
# adjustments with `c` for contrast, A + D the product with contrast's effect on m. The hue is
# rotated about the grey axis, because torchvision's shift in HSV is not linear; they agree for grey
# pixels and for thirds of the circle.

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey


def jitter(factors_BF: Tensor, order_BF: Tensor) -> tuple[Tensor, Tensor]:
    """A and D (B, 3, 3) of the four adjustments in the order `order_BF`. `factors_BF`: of
    brightness, contrast and saturation (1 changes nothing), and the shift of the hue in turns."""
    base_2FCC, first_2FCC, second_2FCC = _adjustments(factors_BF.device, factors_BF.dtype)
    is_hue_F = constant((False, False, False, True), factors_BF.device, torch.bool)
    angle_BF = 2 * math.pi * factors_BF
    first_BF = torch.where(is_hue_F, angle_BF.cos(), factors_BF)[..., None, :, None, None]
    second_BF = torch.where(is_hue_F, angle_BF.sin(), 1 - factors_BF)[..., None, :, None, None]
    maps_B2FCC = base_2FCC + first_BF * first_2FCC + second_BF * second_2FCC
    ordered_B2FCC = maps_B2FCC.gather(-3, order_BF[..., None, :, None, None].expand_as(maps_B2FCC))
    pairs_B22CC = ordered_B2FCC[..., 1::2, :, :] @ ordered_B2FCC[..., 0::2, :, :]
    matrix_BCC, both_BCC = (pairs_B22CC[..., 1, :, :] @ pairs_B22CC[..., 0, :, :]).unbind(-3)
    return matrix_BCC, both_BCC - matrix_BCC


@lru_cache(maxsize=8)
def _adjustments(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(2, F, 3, 3) each, for the colour and for the mean: adjustment f is `base + factor · first +
    (1 - factor) · second`, the hue `base + cos(angle) · first + sin(angle) · second`."""
    root = 1 / math.sqrt(3)
    cross = torch.tensor([[0.0, -root, root], [root, 0.0, -root], [-root, root, 0.0]], dtype=dtype)
    identity, zero = torch.eye(3, dtype=dtype), torch.zeros(3, 3, dtype=dtype)
    third = torch.full((3, 3), 1 / 3, dtype=dtype)
    grey = torch.tensor(LUMA, dtype=dtype).expand(3, 3)  # every channel gets the same grey
    base = torch.stack([zero, zero, zero, third]).expand(2, 4, 3, 3)
    first = torch.stack([identity, identity, identity, identity - third]).expand(2, 4, 3, 3)
    second = torch.stack([torch.stack([zero, contrast, grey, cross]) for contrast in (zero, grey)])
    return base.to(device), first.to(device), second.to(device)


def to_grey(matrix_BCC: Tensor, grey_B: Tensor) -> Tensor:
    luma_C = constant(LUMA, matrix_BCC.device, matrix_BCC.dtype)
    return torch.where(grey_B[..., None, None], (luma_C @ matrix_BCC)[..., None, :], matrix_BCC)


# CIE L*a*b*: lightness and colour in separate channels, which are two views of an image
#
# sRGB in [0, 1] → linear light → XYZ under daylight D65 → Lab (CIE 15; IEC 61966-2-1):
#
#     linear = v / 12.92 if v ≤ 0.04045 else ((v + 0.055) / 1.055)^2.4,      XYZ = M linear
#     f(x) = x^(1/3) if x > (6/29)³ else x / (3 (6/29)²) + 4/29
#     L = 116 f(Y/Yn) − 16,    a = 500 (f(X/Xn) − f(Y/Yn)),    b = 200 (f(Y/Yn) − f(Z/Zn))
#
# The white point is that of M, so every grey has a = b = 0.

LAB_MEAN = (50.8, 0.4, 5.9)  # over the first 8,000 training images of CIFAR-10
LAB_STD = (24.4, 10.3, 15.9)

_TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
_KNEE = 6 / 29


def to_lab(rgb_BCHW: Tensor) -> Tensor:
    linear = torch.where(rgb_BCHW <= 0.04045, rgb_BCHW / 12.92, ((rgb_BCHW + 0.055) / 1.055) ** 2.4)
    share = torch.einsum("kc,bchw->bkhw", _to_share(rgb_BCHW.device, rgb_BCHW.dtype), linear)
    root, line = share.clamp_min(_KNEE**3) ** (1 / 3), share / (3 * _KNEE**2) + 4 / 29
    bent = torch.where(share > _KNEE**3, root, line)
    x, y, z = bent.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), 1)


@lru_cache(maxsize=8)
def _to_share(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Linear light to the share of the white point."""
    matrix = torch.tensor(_TO_XYZ, dtype=dtype)
    return (matrix / matrix.sum(1)[:, None]).to(device)
