"""Label propagation: Zhou et al., NIPS 2004, as in Liu et al., ICLR 2019.

    S = D^(−1/2) A D^(−1/2),   F = (I − α S)^(−1) Y

over a graph of unit-norm centres. A has ones on its diagonal, so that a point far from all others keeps its label to itself.

Dimension key: K graphs, W nodes of each (padded), m labels, n nodes of one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALPHA = 0.9
TEMPERATURE = 0.1


def propagate(sim_KWW: Tensor, valid_KW: Tensor, proto_Km: Tensor) -> Tensor:
    """(K, m, W) how much of each prototype's label reaches each node."""
    both_KWW = valid_KW.unsqueeze(2) & valid_KW.unsqueeze(1)
    graph_KWW = ((sim_KWW - 1) / TEMPERATURE).exp().masked_fill(~both_KWW, 0)
    spread_KWW = _spread(graph_KWW)
    return spread_KWW.gather(1, proto_Km.unsqueeze(2).expand(-1, -1, sim_KWW.shape[2]))


def possibility(sim_nn: Tensor, together_nn: Tensor, similarity: float) -> Tensor:
    """(n, n) in [0, 1], symmetric: how far the labels of two nodes reach each other, F_ij / √(F_ii F_jj) with Y = I.

    The graph's weight is such that two nodes alone, of a similarity equal to `similarity`, reach each other to 1/2; a third one near
    both adds to it. `together`: which nodes may be joined at all.
    """
    half = 0.5 * (1 - ALPHA) / (ALPHA - 0.5)
    graph_nn = (half * ((sim_nn - similarity) / TEMPERATURE).exp()).clamp(max=1).masked_fill(~together_nn, 0)
    reach_nn = _spread(graph_nn)
    own_n = reach_nn.diagonal().clamp(min=torch.finfo(reach_nn.dtype).tiny).sqrt()
    return reach_nn / own_n.unsqueeze(0) / own_n.unsqueeze(1)


def _spread(graph: Tensor) -> Tensor:
    """(I − α S)^(−1) of (…, n, n) graphs; their diagonals are set to 1."""
    eye = torch.eye(graph.shape[-1], dtype=graph.dtype, device=graph.device)
    graph = graph * (1 - eye) + eye
    root = graph.sum(-1).rsqrt()
    return torch.linalg.inv(eye - ALPHA * graph * root.unsqueeze(-1) * root.unsqueeze(-2))
