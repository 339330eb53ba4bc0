"""Concentration and ProtoNCE of PCL as slow loops over its equations 11 and 12."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def concentration(
    features: Tensor, labels: list[int], centroids: Tensor, temperature: float, alpha: float
) -> list[float]:
    """Single or coinciding members: the largest of the others. Scaled to the mean `temperature`;
    every cluster has a member."""
    phi = []
    for k in range(len(centroids)):
        members = [i for i, label in enumerate(labels) if label == k]
        total = sum(float((features[i] - centroids[k]).norm()) for i in members)
        phi.append(
            total / (len(members) * math.log(len(members) + alpha)) if len(members) > 1 else 0.0
        )
    phi = [value or max(phi) for value in phi]
    mean = sum(phi) / len(phi)
    return [temperature * value / mean for value in phi]


def prototype_term(
    anchors: Tensor,
    prototypes: Tensor,
    phi: list[float],
    labels: list[int],
    allowed: list[int] | None = None,
) -> Tensor:
    """Mean over the anchors; `allowed`: the prototypes that are negatives, None: all."""
    total = torch.zeros((), dtype=anchors.dtype)
    c = [row / row.norm() for row in prototypes]
    for anchor, own in zip(anchors, labels, strict=True):
        if own < 0:
            continue
        v = anchor / anchor.norm()
        others = [j for j in (range(len(c)) if allowed is None else allowed) if j != own]
        denominator = sum(
            (torch.exp(v @ c[j] / phi[j]) for j in [own, *others]),
            torch.zeros((), dtype=anchors.dtype),
        )
        total = total - torch.log(torch.exp(v @ c[own] / phi[own]) / denominator)
    return total / len(anchors)
