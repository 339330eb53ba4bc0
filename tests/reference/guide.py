"""A guide's degrees and the targets of soft attraction as slow loops."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_targets(
    z1: Tensor,
    z2: Tensor,
    similarity: Tensor,
    t: float,
    guide_t: float,
    own_weight: float | None = None,
) -> Tensor:
    """Mean over 2B anchors of the cross-entropy between softmax(guide / t_g) and softmax(s / t),
    over all views but the anchor.

    `similarity`: (B, B) of the guide. X-CLR: own view and others in one softmax. With an
    `own_weight` λ, as in SCE: λ for the own view, and 1 − λ shared by the others as softmax(guide /
    t_g)."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n = len(z1)
    losses = []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, own)]
        log_all = torch.log(
            sum((torch.exp(z[i] @ z[j] / t) for j in [own, *others]), torch.zeros(()))
        )
        strength = {j: torch.exp(similarity[i % n, j % n] / guide_t) for j in others}
        total = sum(strength.values(), torch.zeros(()))
        if own_weight is None:
            own_strength = torch.exp(torch.tensor(1.0, dtype=z1.dtype) / guide_t)
            target = {
                own: own_strength / (own_strength + total),
                **{j: x / (own_strength + total) for j, x in strength.items()},
            }
        else:
            target = {
                own: torch.tensor(own_weight),
                **{j: (1 - own_weight) * x / total for j, x in strength.items()},
            }
        losses.append(
            sum((-y * (z[i] @ z[j] / t - log_all) for j, y in target.items()), torch.zeros(()))
        )
    return torch.stack(losses).mean()


def weighted_attraction(
    z1: Tensor, z2: Tensor, t: float, degree: Tensor, own_weight: float | None
) -> Tensor:
    """Mean over 2B anchors of −Σ y log p in loops; `degree` (2B, 2B), views of z1 first."""
    z = [v / v.norm() for v in [*z1, *z2]]
    n, losses = len(z1), []
    for i in range(2 * n):
        own = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, own)]
        mass = sum(float(degree[i, j]) for j in others)
        log_all = torch.log(
            sum((torch.exp(z[i] @ z[j] / t) for j in [own, *others]), torch.zeros(()))
        )
        loss = torch.zeros((), dtype=torch.float64)
        for j in [own, *others]:
            share = 1.0 if j == own else float(degree[i, j])
            y = share / (1 + mass)
            if own_weight is not None:
                y = (
                    (own_weight if mass else 1.0)
                    if j == own
                    else (1 - own_weight) * share / mass
                    if mass
                    else 0.0
                )
            loss = loss - y * (z[i] @ z[j] / t - log_all)
        losses.append(loss)
    return torch.stack(losses).mean()
