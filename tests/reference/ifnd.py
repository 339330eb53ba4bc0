"""IFND as slow loops over the paper's equations: confidence, acceptance, and the losses with their
mean over levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def confidence(features: Tensor, centroids: Tensor, labels: list[int], t: float) -> list[float]:
    """Equation 2, with sim(u, v) = exp(cos(u, v) / t)."""
    values = []
    for z, y in zip(features, labels, strict=True):
        sims = [math.exp(float(z @ c / (z.norm() * c.norm())) / t) for c in centroids]
        values.append(sims[y] / sum(sims))
    return values


def acceptance(confidences: list[float], rate: float) -> set[int]:
    """The `rate` most confident samples; of equals the earlier."""
    order = sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))
    return set(order[: round(rate * len(confidences))])


def loss(
    z1: Tensor, z2: Tensor, ids: list[int], levels: list[list[int | None]], t: float, action: str
) -> Tensor:
    """Equation 3 (eliminate) or 4 (attract), mean over the 2B anchors, then over the levels.
    `levels`: the label of each sample of the data set, None where it is not accepted."""
    z = [v / v.norm() for v in [*z1, *z2]]
    sample = ids + ids
    totals = []
    for label in levels:
        losses = []
        for i in range(len(z)):
            others = [n for n in range(len(z)) if sample[n] != sample[i]]
            own = (i + len(z1)) % len(z)
            mine = label[sample[i]]
            kin = [n for n in others if mine is not None and label[sample[n]] == mine]
            positives = [own, *kin] if action == "attract" else [own]
            compared = [own, *(n for n in others if action == "attract" or n not in kin)]
            denominator = sum(
                (torch.exp(z[i] @ z[s] / t) for s in compared), torch.zeros((), dtype=z1.dtype)
            )
            terms = [-torch.log(torch.exp(z[i] @ z[p] / t) / denominator) for p in positives]
            losses.append(sum(terms, torch.zeros((), dtype=z1.dtype)) / len(positives))
        totals.append(torch.stack(losses).mean())
    return torch.stack(totals).mean()
