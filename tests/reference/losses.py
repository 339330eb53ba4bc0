"""NT-Xent, SupCon and SogCLR as slow loops over the papers' equations. Higher always means more
similar."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Kinship = Callable[[int, int], float]
"""Kinship in [0, 1] of two positions in the list of 2B views (z1 first, then z2)."""


def no_kin(i: int, j: int) -> float:
    return 0.0


def ntxent(
    z1: Tensor,
    z2: Tensor,
    t: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
    rescale: bool = False,
) -> Tensor:
    """Mean over 2B anchors. `reweight`: the factor of a pair is 1 − kinship. `rescale`: as in
    GloFND's published code for SimCLR, the sum over the kept negatives is divided by their number
    and multiplied by 2(B − 1)."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n = len(z1)
    losses = []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        positives = [own]
        denominator = torch.exp(z[i] @ z[own] / t)
        kept = sum(1 for j in range(2 * n) if j not in (i, own) and not kinship(i, j))
        for j in range(2 * n):
            if j in (i, own):
                continue
            kin = kinship(i, j)
            if action == "attract":
                factor = 1.0
                if kin:
                    positives.append(j)
            else:
                factor = 1.0 - kin
            denominator = denominator + factor * torch.exp(z[i] @ z[j] / t) * (
                2 * (n - 1) / kept if rescale else 1
            )
        terms = [-torch.log(torch.exp(z[i] @ z[p] / t) / denominator) for p in positives]
        losses.append(sum(terms, torch.zeros(())) / len(positives))
    return torch.stack(losses).mean()


def supcon(z1: Tensor, z2: Tensor, labels: Tensor, t: float) -> Tensor:
    """Khosla et al. 2020, equation 2 (L_out)."""
    z = [v / v.norm() for v in [*z1, *z2]]
    label = [int(x) for x in [*labels, *labels]]
    total = torch.zeros((), dtype=z1.dtype)
    for i in range(len(z)):
        positives = [p for p in range(len(z)) if p != i and label[p] == label[i]]
        denominator = sum(
            (torch.exp(z[i] @ z[a] / t) for a in range(len(z)) if a != i), torch.zeros(())
        )
        total = total - sum(
            (torch.log(torch.exp(z[i] @ z[p] / t) / denominator) for p in positives),
            torch.zeros(()),
        ) / len(positives)
    return total / len(z)


def sogclr(
    z1: Tensor,
    z2: Tensor,
    ids: list[int],
    u: dict[int, float],
    t: float,
    gamma: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
) -> tuple[float, Tensor, dict[int, float]]:
    """The value, a surrogate whose gradient is the paper's estimator, and the new u of the samples
    of the batch (ids distinct)."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n = len(z1)
    value, surrogate = 0.0, torch.zeros((), dtype=z1.dtype)
    new: dict[int, list[float]] = {}
    for i in range(2 * n):
        sample, own = ids[i % n], (i + n) % (2 * n)
        positives, weights, others = [own], [], []
        for j in range(2 * n):
            if j in (i, own):
                continue
            kin = kinship(i, j)
            if action == "attract" and kin:
                positives.append(j)
                continue
            weights.append(1.0 - kin)
            others.append(j)
        g = sum(
            (w * torch.exp(z[i] @ z[j] / t) for w, j in zip(weights, others, strict=True)),
            torch.zeros(()),
        ) / sum(weights)
        mixed = (1 - gamma) * u[sample] + gamma * g.item() if sample in u else g.item()
        new.setdefault(sample, []).append(mixed)
        pull = sum((z[i] @ z[p] for p in positives), torch.zeros(())) / len(positives)
        value += (-pull.item() + t * math.log(mixed)) / (2 * n)
        surrogate = surrogate + (-pull + t / mixed * g) / (2 * n)
    return value, surrogate, {sample: sum(values) / len(values) for sample, values in new.items()}
