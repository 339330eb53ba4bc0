"""What a refinement looks at: of the touched clusters all units or some, and beside them some clusters of the same border.

Dimension key: K touched clusters, W places, T touched units, P borders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.clustering.rings import Rings


@dataclass(frozen=True)
class Level:
    """What a refinement reads: the units with their sums, the clusters that hold them, the clusters above as borders."""

    units: Rings
    unit_sum: Tensor
    unit_parent: Tensor
    siblings: Rings
    cluster_sum: Tensor
    cluster_parent: Tensor


def looked_at(level: Level, touched_T: Tensor, cluster_K: Tensor, owner_T: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """(K, W) units to look at, (K, W) where there is one, and (K,) whether a rest remains.

    All units of a cluster that has at most `limit`; of a larger one the touched units first, then those behind them in the ring.
    """
    number_K = level.units.units[cluster_K]
    rest_K = number_K > limit
    width = int(number_K.max().clamp(max=limit))
    first_K = torch.searchsorted(owner_T, torch.arange(len(cluster_K), device=owner_T.device))
    unit_KW = level.units.walk(touched_T[first_K], width)
    large = rest_K.nonzero().flatten()
    if len(large):
        span = len(level.unit_parent)
        keys_T = owner_T[rest_K[owner_T]] * span + touched_T[rest_K[owner_T]]
        keys = (large.unsqueeze(1) * span + unit_KW[large]).flatten()
        place = torch.searchsorted(keys_T, keys).clamp(max=len(keys_T) - 1)
        keys = torch.cat((keys_T, keys[keys_T[place] != keys]))
        owner, order = (keys // span).sort(stable=True)
        rank = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        kept = rank < limit
        unit_KW[owner[kept], rank[kept]] = keys[order][kept] % span
    valid_KW = torch.arange(width, device=owner_T.device) < number_K.unsqueeze(1)
    return unit_KW, valid_KW, rest_K


def siblings(level: Level, cluster_K: Tensor, border_K: Tensor, limit: int) -> Tensor:
    """Clusters of the touched borders that are not touched themselves: all, or those next in the ring."""
    border_P, inverse = torch.unique(border_K, return_inverse=True)
    start_P = torch.empty_like(border_P).scatter_(0, inverse.flip(0), cluster_K.flip(0))  # the first of each border
    number_P = level.siblings.units[border_P].clamp(max=limit)
    path = level.siblings.walk(start_P, int(number_P.max()))
    found = path[torch.arange(path.shape[1], device=path.device) < number_P.unsqueeze(1)]
    place = torch.searchsorted(cluster_K, found).clamp(max=len(cluster_K) - 1)
    return found[cluster_K[place] != found]
