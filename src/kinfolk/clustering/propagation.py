"""Label propagation over a graph of unit-norm centres, in closed form (Zhou et al., NIPS 2004; Liu et al., ICLR 2019).

    F = (I + L)^(−1) Y,   L = D − A the graph's Laplacian,   A_ij = exp((s_ij − s₀) / t)

Every node takes what its neighbours have and holds on to its own label. The Laplacian is not normalised by the degrees: with it, the more
nodes are alike, the less would reach each of them, and many alike would never be merged.

Dimension key: K graphs, W nodes of each (padded), m labels, n nodes of one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

TEMPERATURE = 0.05
MOST = 5.0  # of the exponent: beyond it the graph is too stiff to solve in single precision, and nothing is decided


def propagate(sim_KWW: Tensor, valid_KW: Tensor, proto_Km: Tensor) -> Tensor:
    """(K, m, W) how much of each prototype's label reaches each node; s₀ is the largest similarity of two nodes of the graph."""
    others_KWW = valid_KW.unsqueeze(2) & valid_KW.unsqueeze(1) & ~torch.eye(sim_KWW.shape[1], dtype=torch.bool, device=sim_KWW.device)
    most_K = sim_KWW.masked_fill(~others_KWW, -1).amax((1, 2), keepdim=True)
    graph_KWW = ((sim_KWW - most_K) / TEMPERATURE).exp().masked_fill(~others_KWW, 0)
    return _spread(graph_KWW).gather(1, proto_Km.unsqueeze(2).expand(-1, -1, sim_KWW.shape[2]))


def possibility(sim_Knn: Tensor, together_Knn: Tensor, similarity: float) -> Tensor:
    """(…, n, n) in [0, 1], symmetric: how far the labels of two nodes reach each other, F_ij / √(F_ii F_jj) with Y = I, s₀ = `similarity`.

    Two nodes alone reach each other to A / (1 + A), above 1/2 where they are more alike than `similarity`; a third one near both adds to
    it. `together`: which nodes may be joined at all.
    """
    others_Knn = together_Knn & ~torch.eye(sim_Knn.shape[-1], dtype=torch.bool, device=sim_Knn.device)
    strength_Knn = ((sim_Knn - similarity) / TEMPERATURE).clamp(max=MOST)
    reach_Knn = _spread(strength_Knn.exp().masked_fill(~others_Knn, 0))
    own_Kn = reach_Knn.diagonal(dim1=-2, dim2=-1).rsqrt()
    return reach_Knn * own_Kn.unsqueeze(-2) * own_Kn.unsqueeze(-1)


def _spread(graph: Tensor) -> Tensor:
    """(I + D − A)^(−1) of (…, n, n) graphs without loops."""
    spread: Tensor = torch.linalg.inv(torch.diag_embed(1 + graph.sum(-1)) - graph)
    return spread
