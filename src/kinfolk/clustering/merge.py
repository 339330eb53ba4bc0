"""Merging clusters inside one cluster of the level above: who belongs together.

Dimension key: n nodes (clusters and parts of clusters), D embedding, E edges, P borders, w places of each (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.clustering.propagation import possibility
from kinfolk.clustering.split import Rule
from kinfolk.clustering.widths import by_width


def merged(centre_nD: Tensor, border_n: Tensor, similarity: float, rule: Rule) -> Tensor:
    """(n,) the group of every node, named by its first node: nodes joined by a chain of pairs more alike than `similarity`.

    Args:
        centre_nD: unit-norm centres.
        border_n: the cluster one level above, **sorted**; only nodes of one border are ever joined.
        similarity: σ_m: of the centres; for "propagation" the similarity at which two nodes alone are joined.
        rule: "centres", or "propagation": possibility above 1/2 in the graph of all nodes of the border.
    """
    number_P = torch.unique_consecutive(border_n, return_counts=True)[1]
    first_P = number_P.cumsum(0) - number_P
    edges = [border_n.new_empty(0, 2)]
    for rows, width in by_width(number_P):
        place_w = torch.arange(width, device=border_n.device)
        valid_Pw = place_w < number_P[rows].unsqueeze(1)
        node_Pw = (first_P[rows].unsqueeze(1) + place_w).clamp(max=len(border_n) - 1)
        centre_PwD = centre_nD.index_select(0, node_Pw.flatten()).view(*node_Pw.shape, -1)
        together_Pww = valid_Pw.unsqueeze(2) & valid_Pw.unsqueeze(1)
        sim_Pww = centre_PwD @ centre_PwD.mT
        alike_Pww = sim_Pww > similarity if rule == "centres" else possibility(sim_Pww, together_Pww, similarity) > 0.5
        border, one, other = (alike_Pww & together_Pww).triu(1).nonzero(as_tuple=True)
        edges.append(torch.stack((node_Pw[border, one], node_Pw[border, other]), 1))
    return components(torch.cat(edges), len(border_n))


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
