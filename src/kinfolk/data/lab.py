"""CIE L*a*b*: lightness apart from colour, so that a picture falls into two views of its own.

sRGB → linear light → XYZ under daylight D65 → Lab (CIE 15; IEC 61966-2-1), with values of sRGB in [0, 1]:

    linear = v / 12.92 if v ≤ 0.04045 else ((v + 0.055) / 1.055)^2.4,      XYZ = M linear
    f(x) = x^(1/3) if x > (6/29)³ else x / (3 (6/29)²) + 4/29
    L = 116 f(Y/Yn) − 16,    a = 500 (f(X/Xn) − f(Y/Yn)),    b = 200 (f(Y/Yn) − f(Z/Zn))

The white point is that of M, so white and every grey have a = b = 0 up to rounding. L is in [0, 100]; a and b of sRGB's colours are in
[−86.2, 98.3] and [−107.9, 94.5].

Dimension key: B images, C = 3 channels (red, green, blue, or L, a, b), H × W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
