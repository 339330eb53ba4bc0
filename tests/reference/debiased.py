"""Debiased, hard-negative and decoupled InfoNCE as slow loops over the papers' equations."""

from __future__ import annotations

import torch
from torch import Tensor


def debiased_ntxent(
    z1: Tensor,
    z2: Tensor,
    t: float,
    prior: float = 0.0,
    hardness: float = 0.0,
    decoupled: bool = False,
) -> Tensor:
    """Mean over 2B anchors, in the words of the published code of Robinson et al.: `imp`,
    `reweight_neg`, `Ng`."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n = len(z1)
    losses = []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        pos = torch.exp(z[i] @ z[own] / t)
        neg = torch.stack([torch.exp(z[i] @ z[j] / t) for j in range(2 * n) if j not in (i, own)])
        imp = torch.exp(hardness * torch.log(neg))
        reweight_neg = (imp * neg).sum() / imp.mean()
        number = 2 * n - 2
        ng = (-prior * number * pos + reweight_neg) / (1 - prior)
        ng = torch.clamp(ng, min=number * torch.exp(torch.tensor(-1 / t, dtype=z1.dtype)))
        losses.append(-torch.log(pos / (ng if decoupled else pos + ng)))
    return torch.stack(losses).mean()
