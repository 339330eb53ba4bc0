"""DBSCAN (Ester et al., KDD 1996) at several radii, in memory linear in the data set.

scikit-learn's keeps all neighbours of all samples, a good part of N² at a radius at which clusters form. Here similarities are taken in row
blocks, twice: once to count neighbours, once to join the core samples. The time is that of two products of N × N × D.

Dimension key: N samples, D features, R radii, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def dbscan(features: Tensor, radii: Sequence[float], *, min_samples: int = 4, nested: bool = True) -> Tensor:
    """(R, N) clusters of (N, D) features, named by one of their samples; noise is a cluster of its own.

    A sample with at least `min_samples` samples within the radius, itself among them, is a core; cores within the radius of each other
    share a cluster; another sample within the radius of a core joins the nearest one's.

    Args:
        radii: growing; Euclidean distances of the unit-norm features: cos = 1 − r² / 2.
        min_samples: of a core.
        nested: a sample that is no core stays, from the first radius at which it joins a cluster, with that cluster. As cores remain cores
            and stay together when the radius grows, every cluster is then a part of one at the next radius. False: each for itself.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]])
        >>> dbscan(points, [0.3], min_samples=2)
        tensor([[0, 0, 0, 3]])
    """
    if not radii:
        raise ValueError("`radii` must name at least one radius")
    check_dbscan(radii, min_samples)
    require_finite(features)
    unit_ND = F.normalize(features.float(), dim=1)
    near = [1 - r * r / 2 for r in radii]
    number, device = len(unit_ND), unit_ND.device
    rows = max(1, _BLOCK_ELEMENTS // max(number, 1))
    blocks = [(start, unit_ND[start : start + rows]) for start in range(0, number, rows)]
    core_RN = torch.zeros(len(near), number, dtype=torch.bool, device=device)
    for start, block in blocks:
        sim_bN = block @ unit_ND.T
        sim_bN.diagonal(start).fill_(1)
        for r, least in enumerate(near):
            core_RN[r, start : start + rows] = (sim_bN >= least).sum(1) >= min_samples
    part_RN = torch.arange(number, device=device).repeat(len(near), 1)
    anchor_RN = torch.where(core_RN, part_RN, -1)
    for start, block in blocks:
        sim_bN = block @ unit_ND.T
        for r, least in enumerate(near):
            part_RN[r] = _joined(part_RN[r], sim_bN >= least, core_RN[r], start)
            best = sim_bN.masked_fill(~core_RN[r], -torch.inf).max(1)
            span = slice(start, start + rows)
            reached = (best.values >= least) & ~core_RN[r, span]
            anchor_RN[r, span] = torch.where(reached, best.indices, anchor_RN[r, span])
    for r in range(1, len(near) if nested else 0):
        follows = ~core_RN[r] & (anchor_RN[r - 1] >= 0)
        anchor_RN[r] = torch.where(follows, anchor_RN[r - 1], anchor_RN[r])
    noise_RN = anchor_RN < 0
    own_N = torch.arange(number, device=device)
    return torch.where(noise_RN, own_N, part_RN.gather(1, anchor_RN.clamp(min=0)))


def check_dbscan(radii: Sequence[float], min_samples: int) -> None:
    """Refuses what no data can be clustered with."""
    grow = all(a < b for a, b in pairwise(radii))
    if not grow or not all(r > 0 for r in radii):
        fall = not grow and all(a > b for a, b in pairwise(radii))
        hint = "; the paper prints them from the last level to the first" if fall else ""
        raise ValueError(f"`radii` (={list(radii)}) must be above 0 and grow from one level to the next{hint}")
    if min_samples < 1:
        raise ValueError(f"`min_samples` (={min_samples}) must be at least 1")


def require_finite(features: Tensor) -> None:
    """Refuses what can't be clustered: one row for each sample, and numbers."""
    if features.ndim != 2 or not features.isfinite().all():
        raise ValueError(f"`features` (={tuple(features.shape)}) must have the shape (samples, features) and be finite")


def _joined(part_N: Tensor, near_bN: Tensor, core_N: Tensor, start: int) -> Tensor:
    """The parts of the cores after joining those that are near each other; each named by its smallest."""
    stop = start + len(near_bN)
    new_bN = near_bN & core_N & core_N[start:stop].unsqueeze(1) & (part_N != part_N[start:stop].unsqueeze(1))
    row, column = new_bN.nonzero(as_tuple=True)
    if not len(row):
        return part_N
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = (part_N[start + row].cpu().numpy(), part_N[column].cpu().numpy())
    graph = coo_array((torch.ones(len(row)).numpy(), ends), shape=(len(part_N), len(part_N)))
    component = torch.from_numpy(connected_components(graph, directed=False)[1]).to(part_N.device, torch.int64)
    first = torch.full_like(part_N, len(part_N)).scatter_reduce(0, component, torch.arange(len(part_N), device=part_N.device), "amin")
    return first[component[part_N]]
