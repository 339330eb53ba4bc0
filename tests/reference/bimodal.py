"""CLIP, bimodal SogCLR and FastCLIP as slow loops over the papers' equations. Higher
always means more similar.

GloFND, section 3.3 and appendix B, for the two directions; FastCLIP, version 3, for the
temperature. Each is the mean of the two directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Kinship = Callable[[int, int], float]
"""Kinship in [0, 1] of an anchor and a candidate, by their positions in the batch."""


def no_kin(i: int, j: int) -> float:
    return 0.0


def directions(images: Tensor, texts: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Anchors and candidates of the two directions, of unit norm."""
    z, w = [v / v.norm() for v in images], [v / v.norm() for v in texts]
    return [(z, w), (w, z)]


def roles(
    i: int, keys: Sequence[int], kinship: Kinship, action: str, stay: bool
) -> tuple[list[int], list[tuple[float, int]]]:
    """The positives of anchor i, its own first, and its negatives with their weights. What shares
    its key is neither."""
    positives, negatives = [i], []
    for j in range(len(keys)):
        if keys[j] == keys[i]:
            continue
        kin = kinship(i, j)
        if action == "attract":
            if kin:
                positives.append(j)
            if stay or not kin:
                negatives.append((1.0, j))
        elif kin < 1:
            negatives.append((1.0 - kin, j))
    return positives, negatives


def clip(
    images: Tensor,
    texts: Tensor,
    t: Tensor,
    keys: Sequence[int],
    kinship: Kinship = no_kin,
    action: str = "eliminate",
) -> Tensor:
    """Radford et al. 2021, figure 3, with false negatives; differentiable by the temperature
    too."""
    losses = []
    for anchors, candidates in directions(images, texts):
        for i, anchor in enumerate(anchors):
            positives, negatives = roles(i, keys, kinship, action, stay=True)
            denominator = torch.exp(anchor @ candidates[i] / t)
            for weight, j in negatives:
                denominator = denominator + weight * torch.exp(anchor @ candidates[j] / t)
            terms = [
                -torch.log(torch.exp(anchor @ candidates[p] / t) / denominator) for p in positives
            ]
            losses.append(torch.stack(terms).mean())
    return torch.stack(losses).mean()


Averages = list[dict[int, float]]
"""u of the images and of the texts, by sample id."""


def sogclr(
    images: Tensor,
    texts: Tensor,
    ids: Sequence[int],
    keys: Sequence[int],
    u: Averages,
    t: float,
    gamma: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
) -> tuple[float, Tensor, Averages]:
    """The value, a surrogate whose gradient is the estimator of appendix B (halved), and the new
    u."""
    value, surrogate = 0.0, torch.zeros((), dtype=images.dtype)
    new: Averages = [{}, {}]
    for side, (anchors, candidates) in enumerate(directions(images, texts)):
        for i, anchor in enumerate(anchors):
            positives, negatives = roles(i, keys, kinship, action, stay=False)
            total = sum(
                (w * torch.exp(anchor @ candidates[j] / t) for w, j in negatives), torch.zeros(())
            )
            g = total / sum(w for w, _ in negatives)
            mixed = (
                (1 - gamma) * u[side][ids[i]] + gamma * g.item() if ids[i] in u[side] else g.item()
            )
            new[side][ids[i]] = mixed
            pull = torch.stack([anchor @ candidates[p] for p in positives]).mean()
            value += (-pull.item() + t * math.log(mixed)) / (2 * len(ids))
            surrogate = surrogate + (-pull + t / mixed * g) / (2 * len(ids))
    return value, surrogate, new


def fastclip(
    images: Tensor,
    texts: Tensor,
    ids: Sequence[int],
    keys: Sequence[int],
    u: Averages,
    t: Tensor,
    gamma: float,
    rho: float,
    epsilon: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
    released: bool = False,
) -> tuple[float, Tensor, Averages]:
    """The value, a surrogate with the estimator's gradient (also by t), and the new u. With
    `released` the surrogate is that of the published code: ĝ once with the candidates held
    and once with the anchors and the positive held, the temperature never, so that ∂ĝ/∂t is in it
    twice."""
    value, surrogate = 0.0, torch.zeros((), dtype=images.dtype)
    new: Averages = [{}, {}]
    for side, (anchors, candidates) in enumerate(directions(images, texts)):
        for i, anchor in enumerate(anchors):
            positives, negatives = roles(i, keys, kinship, action, stay=False)
            pull = torch.stack([anchor @ candidates[p] for p in positives]).mean()
            total = sum(
                (w * torch.exp((anchor @ candidates[j] - pull) / t) for w, j in negatives),
                torch.zeros(()),
            )
            g = total / sum(w for w, _ in negatives)
            mixed = (
                (1 - gamma) * u[side][ids[i]] + gamma * g.item() if ids[i] in u[side] else g.item()
            )
            new[side][ids[i]] = mixed
            held = t.detach()
            value += (held.item() * math.log(epsilon + mixed) + rho * held.item()) / (2 * len(ids))
            if released:
                parts = [
                    sum(
                        (w * torch.exp((a @ c[j] - p) / t) for w, j in negatives),
                        torch.zeros(()),
                    )
                    for a, c, p in (
                        (anchor, [z.detach() for z in candidates], pull),
                        (anchor.detach(), candidates, pull.detach()),
                    )
                ]
                g = (parts[0] + parts[1]) / sum(w for w, _ in negatives)
            row = held / (epsilon + mixed) * g + t * math.log(epsilon + mixed) + rho * t
            surrogate = surrogate + row / (2 * len(ids))
    return value, surrogate, new
