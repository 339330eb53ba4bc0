"""Random resized crop and flip as one resampling.

A crop, a resize with antialiasing and a flip are linear in the pixels and separable, so each image needs two small matrices only:
`out = rows @ image @ columns.T`. The weights are those of torchvision and Pillow for antialiased bilinear resizing (a triangle as wide
as the reduction, read inside the crop only), so the result is theirs up to rounding. A blur of the result, which is linear and
separable too, can be multiplied into the same matrices (see `blur.py`).

Dimension key: B images, T tries, C channels, H × W pixels of the input, S pixels of a side of the output.

The random parameters of one view of a batch, drawn at once.

Dimension key: B images, U numbers per image, F = 4 adjustments of the colour (brightness, contrast, saturation, hue).

CIE L*a*b*: lightness apart from colour, so that a picture falls into two views of its own.

sRGB → linear light → XYZ under daylight D65 → Lab (CIE 15; IEC 61966-2-1), with values of sRGB in [0, 1]:

    linear = v / 12.92 if v ≤ 0.04045 else ((v + 0.055) / 1.055)^2.4,      XYZ = M linear
    f(x) = x^(1/3) if x > (6/29)³ else x / (3 (6/29)²) + 4/29
    L = 116 f(Y/Yn) − 16,    a = 500 (f(X/Xn) − f(Y/Yn)),    b = 200 (f(Y/Yn) − f(Z/Zn))

The white point is that of M, so white and every grey have a = b = 0 up to rounding. L is in [0, 100]; a and b of sRGB's colours are in
[−86.2, 98.3] and [−107.9, 94.5].

Dimension key: B images, C = 3 channels (red, green, blue, or L, a, b), H × W pixels.

Brightness, contrast, saturation, hue and greyscale as one affine map of the colour, one per image.

Each of torchvision's four adjustments is linear in the colour x and the mean colour m of the image, so the four, in their random order,
are `x -> A x + D m`: a 3 × 3 matrix and an offset. Only contrast needs the mean, which it pulls towards:

    contrast(x) = c x + (1 - c) grey(m),    and so    m -> c m + (1 - c) grey(m)

The other adjustments do the same to x and m. Hence A is the product of the adjustments with `c` for contrast, A + D the product with
contrast's effect on m. Two things are left out: torchvision cuts the values to [0, 1] after each adjustment, this once at the end; and
it shifts the hue in HSV, which is not linear, where this turns the colour about the grey axis by the same angle. The two agree for
grey pixels and for shifts of 0, 1/3 and 2/3 of the circle; in between, the turn keeps the mean of the three channels, HSV their
maximum and minimum.

Dimension key: B images, C = 3 channels, F = 4 adjustments (brightness, contrast, saturation, hue), P pixels.

Gaussian blur as a matrix, one per image.

Dimension key: B images, K taps of the kernel, S pixels of a side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kinfolk.data.augmentation.presets import Augmentation

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


LAB_MEAN = (50.8, 0.4, 5.9)
LAB_STD = (24.4, 10.3, 15.9)
"""Of L, a and b over the pixels of photographs: measured on the first 8,000 training pictures of CIFAR-10, rounded."""

_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_KNEE = 6 / 29


def to_lab(rgb_BCHW: Tensor) -> Tensor:
    """L, a, b of sRGB values in [0, 1]."""
    linear = torch.where(rgb_BCHW <= 0.04045, rgb_BCHW / 12.92, ((rgb_BCHW + 0.055) / 1.055) ** 2.4)
    matrix, white_C = _matrix(rgb_BCHW)
    share = torch.einsum("kc,bchw->bkhw", matrix / white_C[:, None], linear)
    bent = torch.where(share > _KNEE**3, share.clamp_min(_KNEE**3) ** (1 / 3), share / (3 * _KNEE**2) + 4 / 29)
    x, y, z = bent.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), 1)


def from_lab(lab_BCHW: Tensor) -> Tensor:
    """The inverse of `to_lab`; colours that sRGB does not have are cut to [0, 1]."""
    lightness, a, b = lab_BCHW.unbind(1)
    y = (lightness + 16) / 116
    bent = torch.stack((y + a / 500, y, y - b / 200), 1)
    share = torch.where(bent > _KNEE, bent**3, 3 * _KNEE**2 * (bent - 4 / 29))
    matrix, white_C = _matrix(lab_BCHW)
    linear = torch.einsum("kc,bchw->bkhw", torch.linalg.inv(matrix), share * white_C[:, None, None])
    root = 1.055 * linear.clamp_min(0) ** (1 / 2.4) - 0.055
    return torch.where(linear <= 0.04045 / 12.92, 12.92 * linear, root).clamp(0, 1)


def _matrix(like: Tensor) -> tuple[Tensor, Tensor]:
    """M, and XYZ of white."""
    matrix = torch.tensor(_TO_XYZ, dtype=like.dtype, device=like.device)
    return matrix, matrix.sum(1)


LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey


def jitter(factors_BF: Tensor, order_BF: Tensor) -> tuple[Tensor, Tensor]:
    """The four adjustments in the order given: A and D (B, 3, 3), for `x -> A x + D mean`.

    Args:
        factors_BF: factor of brightness, contrast and saturation (1 changes nothing), shift of hue (in turns).
        order_BF: a permutation of 0..3 per image: which adjustment comes first, second, ...
    """
    identity_CC = torch.eye(3, dtype=factors_BF.dtype, device=factors_BF.device)
    luma_C = factors_BF.new_tensor(LUMA)
    scaled_BFCC = factors_BF[:, :3, None, None] * identity_CC
    towards_grey_BFCC = scaled_BFCC + (1 - factors_BF[:, :3, None, None]) * luma_C  # each channel gets the same grey
    bright, contrast, _ = scaled_BFCC.unbind(dim=1)
    _, contrast_of_mean, saturate = towards_grey_BFCC.unbind(dim=1)
    hue = turn(factors_BF[:, 3])

    all_2B = torch.arange(2 * len(factors_BF), device=factors_BF.device)
    each = torch.stack([bright, contrast, saturate, hue], dim=1)
    of_mean = torch.stack([bright, contrast_of_mean, saturate, hue], dim=1)
    first, second, third, fourth = torch.cat([each, of_mean])[all_2B[:, None], order_BF.repeat(2, 1)].unbind(dim=1)
    matrix_BCC, both_BCC = torch.bmm(torch.bmm(fourth, third), torch.bmm(second, first)).chunk(2)
    return matrix_BCC, both_BCC - matrix_BCC


def turn(turns_B: Tensor) -> Tensor:
    """Rotations (B, 3, 3) of the colour about the grey axis; a third of a turn takes red to green, green to blue, blue to red."""
    angle_B11 = (2 * math.pi * turns_B)[:, None, None]
    root = 1 / math.sqrt(3)
    cross = torch.tensor([[0.0, -root, root], [root, 0.0, -root], [-root, root, 0.0]], dtype=turns_B.dtype, device=turns_B.device)
    identity, third = torch.eye(3, dtype=turns_B.dtype, device=turns_B.device), torch.full_like(cross, 1 / 3)
    return third + torch.cos(angle_B11) * (identity - third) + torch.sin(angle_B11) * cross


def to_grey(matrix_BCC: Tensor, grey_B: Tensor) -> Tensor:
    """The map followed by torchvision's greyscale, where `grey_B` says so."""
    return torch.where(grey_B[:, None, None], (matrix_BCC.new_tensor(LUMA) @ matrix_BCC)[:, None, :], matrix_BCC)


def recolour(image_BCP: Tensor, matrix_BCC: Tensor, offset_BC: Tensor, out: Tensor | None = None) -> Tensor:
    """`matrix @ colour + offset` for every pixel."""
    return torch.baddbmm(offset_BC[:, :, None], matrix_BCC, image_BCP, out=out)


CUT = 4.0  # standard deviations
_BAND = 56  # lines at a time: a quarter of 224, the fastest of those tried


def blur_matrices(sigma_B: Tensor, size: int, num_taps: int) -> Tensor:
    """Matrices (B, S, S) that blur a line of `size` pixels with a Gaussian of `num_taps` (odd) taps, reflected at the edges.

    This is torchvision's `gaussian_blur` along one axis; `blur @ image @ blur.T` does both. Taps further out than `CUT` standard
    deviations are left out: they would add less than a ten-thousandth.
    """
    offset_K = torch.arange(num_taps, dtype=torch.float32, device=sigma_B.device) - num_taps // 2
    distance_BK = (offset_K / sigma_B[:, None]).abs()
    kernel_BK = torch.softmax((-0.5 * distance_BK.square()).masked_fill(distance_BK > CUT, float("-inf")), dim=1)
    return (kernel_BK @ _taps(size, num_taps, sigma_B.device)).view(-1, size, size)


def blurred(image_CSS: Tensor, matrix_SS: Tensor, radius: int) -> Tensor:
    """`matrix @ image @ matrix.T` for a matrix of `blur_matrices` that is zero further than `radius` from the diagonal."""
    channels, size, _ = image_CSS.shape
    across_CSS, both_CSS = torch.empty_like(image_CSS), torch.empty_like(image_CSS)
    bands = []
    for start in range(0, size, _BAND):
        lines = slice(start, min(start + _BAND, size))
        bands.append((lines, slice(max(0, start - radius), min(lines.stop + radius, size))))
    for lines, read in bands:
        torch.mm(image_CSS.view(-1, size)[:, read], matrix_SS[lines, read].T, out=across_CSS.view(-1, size)[:, lines])
    for lines, read in bands:
        for channel in range(channels):
            torch.mm(matrix_SS[lines, read], across_CSS[channel, read], out=both_CSS[channel, lines])
    return both_CSS


def taps_for(share: float, size: int) -> int:
    """The odd number of taps nearest above `share` of `size`: 23 for a tenth of 224, as SimCLR has it."""
    return int(share * size) | 1


@lru_cache(maxsize=8)
def _taps(size: int, num_taps: int, device: torch.device) -> Tensor:
    """(K, S·S): where each tap reads, `out[k, i, reflect(i + k - K // 2)] = 1`; a product with it is a sum without scattering."""
    line_S = torch.arange(size)
    read_KS = line_S[None, :] + torch.arange(num_taps)[:, None] - num_taps // 2
    period = max(2 * (size - 1), 1)
    read_KS = (size - 1 - (read_KS.remainder(period) - (size - 1)).abs()).clamp(min=0)
    return torch.nn.functional.one_hot(read_KS, size).float().view(num_taps, size * size).to(device)
