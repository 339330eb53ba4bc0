"""The losses over a queue and a bank as slow loops over the equations of the Ring paper (Wu et al.,
ICLR 2021), with a minus sign and without the constant log(k + 1): equation 4 (MoCo) and equation 3
(IR). An entry of the anchor's own sample is not a negative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Entries = list[tuple[Tensor, int]]
"""Vectors and the samples they belong to."""
Kinship = Callable[[int, int], float]
"""Kinship in [0, 1] of an anchor's position in the batch and an entry's position in the queue or
bank."""


def no_kin(i: int, j: int) -> float:
    return 0.0


def moco(
    queries: Tensor,
    keys: Tensor,
    ids: list[int],
    queue: Entries,
    t: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
) -> Tensor:
    """Equation 4: the own positive is the key, the others are the queue's."""
    return _mean(queries, [key / key.norm() for key in keys], ids, queue, t, kinship, action)


def ir(
    z: Tensor,
    ids: list[int],
    bank: Tensor,
    drawn: list[int],
    t: float,
    kinship: Kinship = no_kin,
    action: str = "eliminate",
) -> Tensor:
    """Equation 3: the own positive is M[i], the others are the entries drawn. `kinship` speaks of
    positions in `drawn`."""
    return _mean(z, [bank[i] for i in ids], ids, [(bank[j], j) for j in drawn], t, kinship, action)


def _mean(
    anchors: Tensor,
    own: list[Tensor],
    ids: list[int],
    entries: Entries,
    t: float,
    kinship: Kinship,
    action: str,
) -> Tensor:
    losses = []
    for i, anchor in enumerate(anchors):
        f = anchor / anchor.norm()
        positives = [torch.exp(f @ own[i] / t)]
        denominator = positives[0]
        for j, (vector, sample) in enumerate(entries):
            if sample == ids[i]:
                continue
            e = torch.exp(f @ vector / t)
            kin = kinship(i, j)
            if action == "attract" and kin:
                positives.append(e)
            denominator = denominator + (e if action == "attract" else (1 - kin) * e)
        terms = [-torch.log(p / denominator) for p in positives]
        losses.append(sum(terms, torch.zeros(())) / len(terms))
    return torch.stack(losses).mean()


def pushed(queue: Entries, size: int, rows: Entries) -> Entries:
    """The queue after rows entered one by one, oldest first."""
    for row in rows:
        queue = [*queue, row][-size:]
    return queue


def written(bank: Tensor, ids: list[int], z: Tensor, momentum: float) -> Tensor:
    """The bank after a batch; several rows of one sample count as their mean."""
    new = bank.clone()
    for sample in set(ids):
        mine = [v / v.norm() for v, i in zip(z, ids, strict=True) if i == sample]
        mixed = momentum * bank[sample] + (1 - momentum) * sum(mine, torch.zeros(())) / len(mine)
        new[sample] = mixed / mixed.norm()
    return new
