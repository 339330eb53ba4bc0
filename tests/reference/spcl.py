"""SPCL's losses as slow loops over its equations 1, 3 and 4, and symmetric cross-entropy; sums are
divided by the number of terms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def contrast(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """Equations 1 and 2: the denominator runs over all z̄ but z and z′. Mean over z."""
    z = [row / row.norm() for row in torch.cat((z1, z2))]
    n, total = len(z1), torch.zeros((), dtype=z1.dtype)
    for i in range(2 * n):
        other = (i + n) % (2 * n)
        denominator = sum(
            (torch.exp(z[i] @ z[k] / temperature) for k in range(2 * n) if k not in (i, other)),
            torch.zeros(()),
        )
        total = total - torch.log(torch.exp(z[i] @ z[other] / temperature) / denominator)
    return total / (2 * n)


def metric(
    h: Tensor, pairs: list[tuple[int, int, int]], head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Equation 3 for (h^p, ĥ^p, ĥ^q), −1: none. Mean over the pairs."""
    total, number = torch.zeros((), dtype=h.dtype), 0
    for anchor, same, other in pairs:
        total = total - torch.log(torch.sigmoid(head((h[anchor] - h[same]).abs()).squeeze()))
        number += 1
        if other >= 0:
            total = total - torch.log(
                1 - torch.sigmoid(head((h[anchor] - h[other]).abs()).squeeze())
            )
            number += 1
    return total / number


def anchors(prototypes: list[int]) -> list[int]:
    """The samples of the most frequent prototypes that together hold half of the batch; the lower
    number first where they are equal."""
    held: list[int] = []
    for prototype in sorted(set(prototypes), key=lambda p: (-prototypes.count(p), p)):
        if 2 * len(held) >= len(prototypes):
            break
        held += [i for i, each in enumerate(prototypes) if each == prototype]
    return sorted(held)


def cross_entropy(
    logits: Tensor, labels: list[int], reverse_weight: float = 0.0, log_zero: float = -4.0
) -> Tensor:
    """Equation 4, and with a weight for it the reverse cross-entropy of Wang et al. Mean over the
    rows; −1: 0."""
    total = torch.zeros((), dtype=logits.dtype)
    for row, label in zip(logits, labels, strict=True):
        if label < 0:
            continue
        p = torch.exp(row) / torch.exp(row).sum()
        total = total - torch.log(p[label])
        for k in range(len(p)):
            q = 1.0 if k == label else 0.0
            total = total - reverse_weight * p[k] * (math.log(q) if q else log_zero)
    return total / len(labels)
