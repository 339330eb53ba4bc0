"""Brightness, contrast, saturation, hue and greyscale as one affine map of the colour, one per image.

Each of torchvision's four adjustments is `x -> M x + t` on the colour x (hue nearly so), so the four, in their random order, are one
3 × 4 matrix. Two things are left out: torchvision cuts the values to [0, 1] after each adjustment, this once at the end; and it shifts
the hue in HSV, which is not linear, where this turns the colour about the grey axis by the same angle. The two agree exactly for grey
pixels and for shifts of 0, 1/3 and 2/3 of the circle; in between, the turn keeps the mean of the three channels, HSV their maximum.

Dimension key: B images, C = 3 channels, F = 4 adjustments (brightness, contrast, saturation, hue), P pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey
CONTRAST = 1  # its place among the four adjustments


def jitter(mean_BC: Tensor, factors_BF: Tensor, order_BF: Tensor) -> tuple[Tensor, Tensor]:
    """The four adjustments in the order given: `matrix` (B, 3, 3) and `offset` (B, 3).

    Args:
        mean_BC: mean colour of each image, needed by contrast, which pulls towards the mean grey of what it is given.
        factors_BF: factor of brightness, contrast and saturation (1 changes nothing), shift of hue (in turns).
        order_BF: a permutation of 0..3 per image: which adjustment comes first, second, ...
    """
    luma_C = torch.tensor(LUMA, dtype=mean_BC.dtype, device=mean_BC.device)
    identity_CC = torch.eye(3, dtype=mean_BC.dtype, device=mean_BC.device)
    bright_B11, contrast_B11, saturate_B11 = factors_BF[:, :3, None, None].unbind(dim=1)
    saturate_BCC = saturate_B11 * identity_CC + (1 - saturate_B11) * luma_C
    steps_BFCC = torch.stack([bright_B11 * identity_CC, contrast_B11 * identity_CC, saturate_BCC, turn(factors_BF[:, 3])], dim=1)

    all_B = torch.arange(len(mean_BC), device=mean_BC.device)
    matrix_BCC, offset_BC = identity_CC.expand(len(mean_BC), 3, 3), torch.zeros_like(mean_BC)
    for which_B in order_BF.unbind(dim=1):
        mean_grey_B = ((luma_C @ matrix_BCC) * mean_BC).sum(dim=1) + offset_BC @ luma_C
        pull_B = torch.where(which_B == CONTRAST, (1 - factors_BF[:, CONTRAST]) * mean_grey_B, 0)
        step_BCC = steps_BFCC[all_B, which_B]
        matrix_BCC = torch.bmm(step_BCC, matrix_BCC)
        offset_BC = torch.baddbmm(pull_B[:, None, None], step_BCC, offset_BC[:, :, None])[:, :, 0]
    return matrix_BCC, offset_BC


def turn(turns_B: Tensor) -> Tensor:
    """Rotations (B, 3, 3) of the colour about the grey axis; a third of a turn takes red to green, green to blue, blue to red."""
    angle_B11 = (2 * math.pi * turns_B)[:, None, None]
    root = 1 / math.sqrt(3)
    cross = torch.tensor([[0.0, -root, root], [root, 0.0, -root], [-root, root, 0.0]], dtype=turns_B.dtype, device=turns_B.device)
    identity, third = torch.eye(3, dtype=turns_B.dtype, device=turns_B.device), torch.full_like(cross, 1 / 3)
    return third + torch.cos(angle_B11) * (identity - third) + torch.sin(angle_B11) * cross


def to_grey(matrix_BCC: Tensor, offset_BC: Tensor, grey_B: Tensor) -> tuple[Tensor, Tensor]:
    """The map followed by torchvision's greyscale, where `grey_B` says so."""
    luma_C = torch.tensor(LUMA, dtype=offset_BC.dtype, device=offset_BC.device)
    matrix = torch.where(grey_B[:, None, None], (luma_C @ matrix_BCC)[:, None, :], matrix_BCC)
    return matrix, torch.where(grey_B[:, None], (offset_BC @ luma_C)[:, None], offset_BC)


def recolour(image_BCP: Tensor, matrix_BCC: Tensor, offset_BC: Tensor, out: Tensor | None = None) -> Tensor:
    """`matrix @ colour + offset` for every pixel."""
    return torch.baddbmm(offset_BC[:, :, None], matrix_BCC, image_BCP, out=out)
