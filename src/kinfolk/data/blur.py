"""Gaussian blur as a matrix, one per image.

Dimension key: B images, K taps of the kernel, S pixels of a side.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

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
