"""CMC and LA as slow loops over the equations of the Ring paper (Wu et al., ICLR 2021), with a
minus sign: section 2 (CMC, two losses of equation 3 with the banks swapped, without the constant
log(k + 1)) and equation 5 (LA).
"""

from __future__ import annotations

import torch
from torch import Tensor


def cmc(
    light: Tensor,
    colour: Tensor,
    ids: list[int],
    light_bank: Tensor,
    colour_bank: Tensor,
    drawn: list[int],
    t: float,
) -> Tensor:
    """The sum of two directions; each is a mean over the batch. A drawn entry of the anchor's own
    sample is not a negative."""
    total = torch.zeros((), dtype=light.dtype)
    for anchors, bank in ((light, colour_bank), (colour, light_bank)):
        for anchor, i in zip(anchors, ids, strict=True):
            f = anchor / anchor.norm()
            own = torch.exp(f @ bank[i] / t)
            everything = own
            for j in drawn:
                if j != i:
                    everything = everything + torch.exp(f @ bank[j] / t)
            total = total - torch.log(own / everything) / len(ids)
    return total


def background(anchor: Tensor, i: int, bank: Tensor, number: int) -> set[int]:
    """B_i: the nearest entries of the bank in Euclidean distance, apart from the own one."""
    f = anchor / anchor.norm()
    others = sorted(
        (j for j in range(len(bank)) if j != i), key=lambda j: (f - bank[j]).norm().item()
    )
    return set(others[:number])


def close(i: int, clusterings: list[list[int]]) -> set[int]:
    """C_i: who shares the cluster of sample i in any clustering; sample i is among them."""
    return {j for labels in clusterings for j in range(len(labels)) if labels[j] == labels[i]}


def la(
    z: Tensor,
    ids: list[int],
    bank: Tensor,
    clusterings: list[list[int]],
    number: int,
    t: float,
    averaged: bool = False,
) -> Tensor:
    """Equation 5 with C_i ∩ B_i for C_i, as its first paper has it, and the own entry in both.
    `averaged`: with 1 / |C_i| and 1 / |B_i|."""
    losses = []
    for anchor, i in zip(z, ids, strict=True):
        f = anchor / anchor.norm()
        b = background(anchor, i, bank, number) | {i}
        c = close(i, clusterings) & b
        above = sum((torch.exp(f @ bank[j] / t) for j in sorted(c)), torch.zeros(()))
        below = sum((torch.exp(f @ bank[j] / t) for j in sorted(b)), torch.zeros(()))
        losses.append(
            -torch.log((above / len(c)) / (below / len(b)) if averaged else above / below)
        )
    return torch.stack(losses).mean()
