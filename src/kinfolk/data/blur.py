"""Gaussian blur as a matrix, one per image.

Dimension key: B images, K taps of the kernel, S pixels of a side.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def blur_matrices(sigma_B: Tensor, size: int, num_taps: int) -> Tensor:
    """Matrices (B, S, S) that blur a line of `size` pixels with a Gaussian of `num_taps` (odd) taps, reflected at the edges.

    This is torchvision's `gaussian_blur` along one axis; `blur @ image @ blur.T` does both.
    """
    offset_K = torch.arange(num_taps, dtype=torch.float32, device=sigma_B.device) - num_taps // 2
    kernel_BK = torch.softmax(-0.5 * (offset_K / sigma_B[:, None]).square(), dim=1)
    kernel_BK = kernel_BK.masked_fill(kernel_BK < 1e-9, 0)  # adds nothing, and denormal numbers slow a product down
    return (kernel_BK @ _taps(size, num_taps, sigma_B.device)).view(-1, size, size)


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
