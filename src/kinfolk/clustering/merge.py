"""Merging clusters inside one cluster of the level above: who belongs together.

Dimension key: n nodes (clusters and parts of clusters), D embedding, E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.clustering.propagation import possibility
from kinfolk.clustering.split import Rule

CHUNK = 256


def merged(centre_nD: Tensor, border_n: Tensor, similarity: float, rule: Rule) -> Tensor:
    """(n,) the group of every node, named by its first node: nodes joined by a chain of pairs more alike than `similarity`.

    Args:
        centre_nD: unit-norm centres.
        border_n: the cluster one level above, **sorted**; only nodes of one border are ever joined.
        similarity: σ_m: of the centres; for "propagation" the similarity at which two nodes alone are joined.
        rule: "centres", or "propagation": possibility above 1/2 in the graph of all nodes of the border.
    """
    ends, number = list[int](), 0
    for span in torch.unique_consecutive(border_n, return_counts=True)[1].tolist():
        if ends and number + span <= CHUNK:
            ends[-1] += span
        else:
            ends.append(span + (ends[-1] if ends else 0))
            number = 0
        number += span
    edges, start = [], 0
    for end in ends:
        centre, border = centre_nD[start:end], border_n[start:end]
        together = border.unsqueeze(0) == border.unsqueeze(1)
        sim = centre @ centre.T
        alike = sim > similarity if rule == "centres" else possibility(sim, together, similarity) > 0.5
        edges.append((alike & together).triu(1).nonzero() + start)
        start = end
    return components(torch.cat(edges) if edges else border_n.new_empty(0, 2), len(border_n))


def components(edge_E2: Tensor, number: int) -> Tensor:
    """(number,) the smallest node that each node is connected with."""
    group_n = torch.arange(number, device=edge_E2.device)
    one_E, other_E = edge_E2.unbind(1)
    while len(one_E):
        low_E = torch.minimum(group_n[one_E], group_n[other_E])
        new_n = group_n.scatter_reduce(0, one_E, low_E, "amin").scatter_reduce(0, other_E, low_E, "amin")
        new_n = new_n[new_n]
        if torch.equal(new_n, group_n):
            break
        group_n = new_n
    return group_n
