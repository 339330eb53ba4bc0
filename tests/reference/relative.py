"""The relative contrastive loss as slow loops over equations 2 and 3 of Tang et al., ECCV 2022, and
the retrieval of keys.

An entry of the anchor's own sample is not a negative; every other entry is, also one that was
retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

Entries = list[tuple[Tensor, int]]
"""Vectors and the samples they belong to."""


def equation_3(q: Tensor, key: Tensor, same: bool, negatives: list[Tensor], t: float) -> Tensor:
    """−log[ (1[same] exp(q·z′/t) + 1[not same]) / (exp(q·z′/t) + Σ_k exp(q·s_k/t)) ]."""
    q, key = q / q.norm(), key / key.norm()
    e = torch.exp(q @ key / t)
    denominator = e + sum((torch.exp(q @ s / t) for s in negatives), torch.zeros(()))
    return -torch.log((e if same else torch.ones_like(e)) / denominator)


def equation_2(
    predictions: list[Tensor], key: Tensor, same: list[bool], negatives: list[Tensor], t: float
) -> Tensor:
    """Σ_h L_h / H, `predictions` and `same` one for each criterion."""
    losses = [
        equation_3(q, key, agree, negatives, t) for q, agree in zip(predictions, same, strict=True)
    ]
    return sum(losses, torch.zeros(())) / len(losses)


def rcl(
    predictions: list[list[Tensor]],
    keys: list[list[tuple[Tensor, list[bool]]]],
    ids: list[int],
    queue: Entries,
    t: float,
) -> Tensor:
    """Mean over anchors and over each one's keys, which say under which criteria they are
    positive."""
    losses = []
    for mine, own, i in zip(predictions, keys, ids, strict=True):
        negatives = [vector for vector, sample in queue if sample != i]
        each = [equation_2(mine, key, same, negatives, t) for key, same in own]
        losses.append(sum(each, torch.zeros(())) / len(each))
    return torch.stack(losses).mean()


def nearest(key: Tensor, own: int, queue: Entries) -> Tensor:
    """The vector of another sample that is most similar to the key; the key itself where there is
    none."""
    others = [
        (float(vector @ key), place)
        for place, (vector, sample) in enumerate(queue)
        if sample != own
    ]
    return queue[max(others)[1]][0] if others else key
