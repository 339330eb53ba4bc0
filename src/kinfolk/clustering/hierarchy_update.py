"""One step of the refinement of a hierarchy (RCL, section 4.3): which units of the touched clusters
move to which cluster.

Every touched cluster is split into at most m parts of whole units, the clusters one level below.
Parts and other clusters inside one cluster of the next level (the border) are merged if similar.

Splitting uses density peaks (Rodriguez and Laio, Science 2014) on the units of a cluster:

    ρ_i = Σ_j exp(−d_ij² / d_c²),   δ_i = min over denser j of d_ij (the densest: the largest d_ij),
                                    γ_i = ρ_i δ_i

Prototypes are the m − 1 units with the largest γ and, of the others, the one with the largest δ,
because γ never finds a single outlier. d is the distance of unit-norm centres, d_c² the mean of d².

Dimension key: S slots of units, C slots of clusters, K touched clusters or rings, W places of each
(padded; place 0 is the rest of a large cluster), T touched units, D embedding, m parts, n nodes
(clusters and parts), E edges, P borders, w nodes of each, M units that move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rings:
    """The units of each cluster of a level in a ring, so that changes cost as much as the units
    that move. (S,) `after`, `before`: neighbours of each unit; (C,) `entry`, `units`: one unit of
    each cluster, and their number; (S,) `parent`: cluster of each unit; (S, D) `sums` of its
    features."""

    after: Tensor
    before: Tensor
    entry: Tensor
    units: Tensor
    parent: Tensor
    sums: Tensor

    def walk(self, start_K: Tensor, width: int) -> Tensor:
        """(K, width) units from `start` on; a shorter ring is repeated."""
        path_WK = start_K.new_empty(width, len(start_K))
        unit_K = start_K
        for place in range(width):
            path_WK[place] = unit_K
            unit_K = self.after[unit_K]
        return path_WK.T

    def members(self, start_K: Tensor, number_K: Tensor) -> Tensor:
        """The first `number` units of each ring, from `start` on, ring after ring."""
        path = self.walk(start_K, int(number_K.max()))
        place_W = torch.arange(path.shape[1], device=path.device)
        return path[place_W < number_K.unsqueeze(1)]

    def take_out(self, unit_M: Tensor) -> None:
        """Removes distinct units."""
        unit_M = unit_M.sort().values
        cluster_M = self.parent[unit_M]
        self.units.index_add_(0, cluster_M, torch.full_like(cluster_M, -1))
        left_M, right_M = _skip(unit_M, self.before[unit_M]), _skip(unit_M, self.after[unit_M])
        # units next to each other in a ring have the same two survivors
        self.after[left_M] = right_M
        self.before[right_M] = left_M
        enters_M = self.entry[cluster_M] == unit_M
        self.entry[cluster_M[enters_M]] = right_M[enters_M]
        self.parent[unit_M] = -1

    def put_in(self, unit_M: Tensor, cluster_M: Tensor) -> None:
        """Adds units that are in no cluster, after the entry of the ring."""
        cluster_M, order = cluster_M.sort(stable=True)
        unit_M = unit_M[order]
        cluster_G, number_G = torch.unique_consecutive(cluster_M, return_counts=True)
        last_G = number_G.cumsum(0) - 1
        first_unit_G, last_unit_G = unit_M[last_G - number_G + 1], unit_M[last_G]
        empty_G = self.units[cluster_G] == 0
        entry_G = torch.where(empty_G, last_unit_G, self.entry[cluster_G])
        behind_G = torch.where(empty_G, first_unit_G, self.after[entry_G])
        self.after[unit_M[:-1]] = unit_M[1:]
        self.before[unit_M[1:]] = unit_M[:-1]
        self.after[last_unit_G], self.before[behind_G] = behind_G, last_unit_G
        self.after[entry_G], self.before[first_unit_G] = first_unit_G, entry_G
        self.entry[cluster_G] = torch.where(empty_G, first_unit_G, entry_G)
        self.units[cluster_G] += number_G
        self.parent[unit_M] = cluster_M

    def rebuild(self, cluster_S: Tensor, alive: int) -> None:
        self.units.zero_()
        self.entry.fill_(-1)
        self.parent.fill_(-1)
        self.put_in(torch.arange(alive, device=cluster_S.device), cluster_S[:alive])


def _skip(gone_M: Tensor, neighbour_M: Tensor) -> Tensor:
    """The nearest neighbour that stays, by doubling; `gone_M` is sorted."""
    for _ in range(len(gone_M).bit_length()):
        place_M = torch.searchsorted(gone_M, neighbour_M).clamp(max=len(gone_M) - 1)
        goes_M = gone_M[place_M] == neighbour_M
        if not goes_M.any():
            break
        neighbour_M = torch.where(goes_M, neighbour_M[place_M], neighbour_M)
    return neighbour_M


def by_width(number_K: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The rows in groups of similar length (up to 8, 16, 32, …), and the width of each group."""
    low, high = 0, 8
    while bool((number_K > low).any()):
        rows = ((number_K > low) & (number_K <= high)).nonzero().flatten()
        if len(rows):
            yield rows, int(number_K[rows].max())
        low, high = high, 2 * high


def select_units(
    units: Rings, touched_T: Tensor, cluster_K: Tensor, owner_T: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(K, W) used units, touched ones first; (K, W) where there is one; (K,) whether there are more
    than `limit`."""
    number_K = units.units[cluster_K]
    rest_K = number_K > limit
    width = int(number_K.max().clamp(max=limit))
    first_K = torch.searchsorted(owner_T, torch.arange(len(cluster_K), device=owner_T.device))
    unit_KW = units.walk(touched_T[first_K], width)
    large = rest_K.nonzero().flatten()
    if len(large):
        span = len(units.parent)
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


def siblings(clusters: Rings, cluster_K: Tensor, border_K: Tensor, limit: int) -> Tensor:
    """Untouched clusters of the touched borders: all, or the next `limit` in the ring."""
    border_P, inverse = torch.unique(border_K, return_inverse=True)
    # the first of each border
    start_P = torch.empty_like(border_P).scatter_(0, inverse.flip(0), cluster_K.flip(0))
    found = clusters.members(start_P, clusters.units[border_P].clamp(max=limit))
    place = torch.searchsorted(cluster_K, found).clamp(max=len(cluster_K) - 1)
    return found[cluster_K[place] != found]


def split(centre_KWD: Tensor, valid_KW: Tensor, rest_K: Tensor, parts: int) -> Tensor:
    """(K, W) the part of every unit: that of the most similar prototype. Where `rest_K`, place 0 is
    always a prototype."""
    sim_KWW = centre_KWD @ centre_KWD.mT
    proto_Km, known_Km = peaks(sim_KWW, valid_KW, rest_K, parts)
    near_KmW = sim_KWW.gather(1, proto_Km.unsqueeze(2).expand(-1, -1, sim_KWW.shape[2]))
    return near_KmW.masked_fill(~known_Km.unsqueeze(2), -torch.inf).argmax(1)


def peaks(sim_KWW: Tensor, valid_KW: Tensor, rest_K: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(K, m) places of the prototypes, of equals the earlier, and (K, m) which of them exist."""
    both_KWW = valid_KW.unsqueeze(2) & valid_KW.unsqueeze(1)
    # Symmetric, and 0 if it is only rounding: which of two units is denser must not depend on the
    # last bit.
    square_KWW = 2 - (sim_KWW + sim_KWW.mT)
    square_KWW = square_KWW.masked_fill(
        ~both_KWW | (square_KWW < 64 * torch.finfo(sim_KWW.dtype).eps), 0
    )
    number_K = valid_KW.sum(1)
    scale_K = square_KWW.sum((1, 2)) / (number_K * (number_K - 1)).clamp(min=1)
    scale_K = torch.where(scale_K > 0, scale_K, 1.0)
    rho_KW = (-square_KWW / scale_K.view(-1, 1, 1)).exp().masked_fill(~both_KWW, 0).sum(2)
    rho_KW[:, 0] = torch.where(rest_K, torch.inf, rho_KW[:, 0])
    place_W = torch.arange(valid_KW.shape[1], device=sim_KWW.device)
    denser_KWW = (rho_KW.unsqueeze(1) > rho_KW.unsqueeze(2)) | (
        (rho_KW.unsqueeze(1) == rho_KW.unsqueeze(2))
        & (place_W.view(1, 1, -1) < place_W.view(1, -1, 1))
    )
    nearest_KW = square_KWW.masked_fill(~(denser_KWW & both_KWW), torch.inf).amin(2)
    delta_KW = torch.where(nearest_KW.isinf(), square_KWW.amax(2), nearest_KW).sqrt()
    gamma_KW = (rho_KW * delta_KW).masked_fill(~valid_KW, -1)
    gamma_KW[:, 0] = torch.where(rest_K, torch.inf, gamma_KW[:, 0])
    by_peak_Km = gamma_KW.argsort(dim=1, descending=True, stable=True)[:, : parts - 1]
    left_KW = delta_KW.masked_fill(~valid_KW, -1).scatter(1, by_peak_Km, -1)
    far_K1 = left_KW.argmax(1, keepdim=True)
    known_Km = torch.cat((gamma_KW.gather(1, by_peak_Km), left_KW.gather(1, far_K1)), 1) >= 0
    return torch.cat((by_peak_Km, far_K1), 1), known_Km


def merge_groups(centre_nD: Tensor, border_n: Tensor, similarity: float) -> Tensor:
    """(n,) the group of every node, named by its first: nodes of one border (sorted) that are
    connected by pairs more similar than `similarity`."""
    number_P = torch.unique_consecutive(border_n, return_counts=True)[1]
    first_P = number_P.cumsum(0) - number_P
    edges = [border_n.new_empty(0, 2)]
    for rows, width in by_width(number_P):
        place_w = torch.arange(width, device=border_n.device)
        valid_Pw = place_w < number_P[rows].unsqueeze(1)
        node_Pw = (first_P[rows].unsqueeze(1) + place_w).clamp(max=len(border_n) - 1)
        centre_PwD = centre_nD.index_select(0, node_Pw.flatten()).view(*node_Pw.shape, -1)
        together_Pww = valid_Pw.unsqueeze(2) & valid_Pw.unsqueeze(1)
        alike_Pww = centre_PwD @ centre_PwD.mT > similarity
        border, one, other = (alike_Pww & together_Pww).triu(1).nonzero(as_tuple=True)
        edges.append(torch.stack((node_Pw[border, one], node_Pw[border, other]), 1))
    return components(torch.cat(edges), len(border_n))


def components(edge_E2: Tensor, number: int) -> Tensor:
    """(number,) the smallest node that each node is connected with."""
    group_n = torch.arange(number, device=edge_E2.device)
    one_E, other_E = edge_E2.unbind(1)
    while len(one_E):
        low_E = torch.minimum(group_n[one_E], group_n[other_E])
        new_n = group_n.scatter_reduce(0, one_E, low_E, "amin")
        new_n = new_n.scatter_reduce(0, other_E, low_E, "amin")
        new_n = new_n[new_n]
        if torch.equal(new_n, group_n):
            break
        group_n = new_n
    return group_n


@dataclass(frozen=True)
class Moves:
    """(M,) units and the cluster that each moves to; −1 − g is a new cluster for group g inside
    `border`."""

    unit: Tensor
    to: Tensor
    border: Tensor


def refine(
    units: Rings, clusters: Rings, touched: Tensor, parts: int, similarity: float, max_units: int
) -> Moves:
    """The moves that refine the clusters of the `touched` units (distinct slots). Recomputes the
    sums of clusters that are used whole, so that rounding errors do not add up."""
    cluster_T, order = units.parent[touched].sort(stable=True)
    cluster_K, owner_T = torch.unique_consecutive(cluster_T, return_inverse=True)
    chosen = select_units(units, touched[order], cluster_K, owner_T, max_units)
    part_KW, number_Km, sum_KmD = _split(units, clusters, cluster_K, *chosen, parts)
    unit_KW, valid_KW, rest_K = chosen
    main_K = torch.where(rest_K, 0, number_Km.argmax(1))  # the rest's part is the first
    owns_Km = torch.arange(parts, device=part_KW.device) == main_K.unsqueeze(1)
    alive_Km = number_Km > 0
    slot_Km = torch.where(owns_Km, cluster_K.unsqueeze(1), -1)
    border_K = clusters.parent[cluster_K]
    other = siblings(clusters, cluster_K, border_K, max_units)

    sums = torch.cat((sum_KmD[alive_Km], clusters.sums[other]))
    border_n = torch.cat(
        (border_K.unsqueeze(1).expand_as(alive_Km)[alive_Km], clusters.parent[other])
    )
    slot_n = torch.cat((slot_Km[alive_Km], other))
    number_n = torch.cat((number_Km[alive_Km], units.units[other]))
    target_n = _targets(sums, border_n, slot_n, number_n, similarity)

    num_parts = int(alive_Km.sum())
    target_Km = torch.full_like(number_Km, -1)
    target_Km[alive_Km] = target_n[:num_parts]
    to_KW = target_Km.gather(1, part_KW)
    moves_KW = valid_KW & (to_KW != cluster_K.unsqueeze(1))
    leaving = (target_n[num_parts:] != other).nonzero().flatten()
    unit, to = [unit_KW[moves_KW]], [to_KW[moves_KW]]
    if len(leaving):
        size = units.units[other[leaving]].clamp(max=max_units)
        unit.append(units.members(units.entry[other[leaving]], size))
        to.append(target_n[num_parts:][leaving].repeat_interleave(size))
    return Moves(torch.cat(unit), torch.cat(to), border_n)


def _split(
    units: Rings,
    clusters: Rings,
    cluster_K: Tensor,
    unit_KW: Tensor,
    valid_KW: Tensor,
    rest_K: Tensor,
    parts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(K, W) the part of every unit, (K, m) the number of units of each part, (K, m, D) its sum.
    The rest of a large cluster is in part 0."""
    sum_KWD, used_K = units.sums[unit_KW], valid_KW.sum(1)
    total_K1D = valid_KW.unsqueeze(1).to(sum_KWD.dtype) @ sum_KWD
    others_K1D = clusters.sums[cluster_K].unsqueeze(1) - total_K1D
    sum_KWD = torch.cat((others_K1D, sum_KWD), 1)  # place 0: the rest
    valid_KW = torch.cat((rest_K.unsqueeze(1), valid_KW), 1)
    part_KW = split(F.normalize(sum_KWD, dim=2), valid_KW, rest_K, parts)
    part_KW[:, 0] = 0
    part_m = torch.arange(parts, device=cluster_K.device).view(1, -1, 1)
    held_KmW = (part_KW.unsqueeze(1) == part_m) & valid_KW.unsqueeze(1)
    number_Km, sum_KmD = held_KmW.sum(2), held_KmW.to(sum_KWD.dtype) @ sum_KWD
    number_Km[:, 0] += torch.where(rest_K, units.units[cluster_K] - used_K - 1, 0)
    clusters.sums[cluster_K[~rest_K]] = sum_KmD[~rest_K].sum(1)
    return part_KW[:, 1:], number_Km, sum_KmD


def _targets(
    sum_nD: Tensor, border_n: Tensor, slot_n: Tensor, number_n: Tensor, similarity: float
) -> Tensor:
    """(n,) the slot that each node ends in: the first of the largest nodes of its group that have
    one, or −1 − g."""
    border, order = border_n.sort(stable=True)
    found = merge_groups(F.normalize(sum_nD[order], dim=1), border, similarity)
    group_n = torch.empty_like(order).scatter_(0, order, order[found])
    weight_n = torch.where(slot_n >= 0, number_n, 0)
    most_n = torch.zeros_like(group_n).scatter_reduce(0, group_n, weight_n, "amax")[group_n]
    none = torch.iinfo(slot_n.dtype).max
    best_n = torch.where((weight_n == most_n) & (weight_n > 0), slot_n, none)
    keeper_n = torch.full_like(group_n, none).scatter_reduce(0, group_n, best_n, "amin")
    return torch.where(most_n > 0, keeper_n[group_n], -1 - group_n)
