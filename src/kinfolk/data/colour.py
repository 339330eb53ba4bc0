"""Brightness, contrast, saturation, hue and greyscale as one affine map of the colour, one per image.

Each of torchvision's four adjustments is linear in the colour x and the mean colour m of the image, so the four, in their random order,
are `x -> A x + D m`: a 3 × 3 matrix and an offset. Only contrast needs the mean, which it pulls towards:

    contrast(x) = c x + (1 - c) grey(m),    and so    m -> c m + (1 - c) grey(m)

The other adjustments do the same to x and m. Hence A is the product of the adjustments with `c` for contrast, A + D the product with
contrast's effect on m. Two things are left out: torchvision cuts the values to [0, 1] after each adjustment, this once at the end; and
it shifts the hue in HSV, which is not linear, where this turns the colour about the grey axis by the same angle. The two agree for
grey pixels and for shifts of 0, 1/3 and 2/3 of the circle; in between, the turn keeps the mean of the three channels, HSV their
maximum and minimum.

Dimension key: B images, C = 3 channels, F = 4 adjustments (brightness, contrast, saturation, hue), P pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
