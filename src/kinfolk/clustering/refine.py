"""One level of the online refinement: which units of the touched clusters belong where, after trying a split and a merge.

RCL, section 4.3: every touched cluster is split into at most m parts whose units are the clusters one level below; the parts and the other
clusters of the same cluster above are merged where they are alike. Nothing is written before both are decided, so that a part that is
merged back where it was costs nothing.

Dimension key: K touched clusters, W places (place 0: the rest of a cluster too large to look at whole), D embedding, m parts, n nodes,
T touched units, M units that move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.clustering.looked import Level, looked_at, siblings
from kinfolk.clustering.merge import merged
from kinfolk.clustering.split import Rule, split
from kinfolk.clustering.widths import by_width


@dataclass(frozen=True)
class Limits:
    """m, σ_m, how to assign and merge, and the most units or siblings of one cluster that are looked at in a step."""

    parts: int
    similarity: float
    rule: Rule
    max_units: int


@dataclass(frozen=True)
class Moves:
    """(M,) units with the cluster each goes to; −1 − g: the new cluster of group g, made inside `border`. No unit stays where it was."""

    unit: Tensor
    to: Tensor
    border: Tensor


def refine(level: Level, touched: Tensor, limits: Limits) -> Moves:
    """What moves when the clusters of the `touched` units (distinct slots) are refined. Also takes the sums of the clusters that are looked
    at whole anew from their units, so that rounding does not add up."""
    cluster_T, order = level.unit_parent[touched].sort(stable=True)
    cluster_K, owner_T = torch.unique_consecutive(cluster_T, return_inverse=True)
    unit_KW, valid_KW, rest_K = looked_at(level, touched[order], cluster_K, owner_T, limits.max_units)
    part_KW, number_Km, sum_KmD = _split(level, cluster_K, unit_KW, valid_KW, rest_K, limits)
    main_K = torch.where(rest_K, 0, number_Km.argmax(1))  # the rest's part is the first
    owns_Km = torch.arange(limits.parts, device=part_KW.device) == main_K.unsqueeze(1)
    alive_Km = number_Km > 0
    slot_Km = torch.where(owns_Km, cluster_K.unsqueeze(1), -1)
    border_K = level.cluster_parent[cluster_K]
    other = siblings(level, cluster_K, border_K, limits.max_units)

    sums = torch.cat((sum_KmD[alive_Km], level.cluster_sum[other]))
    border_n = torch.cat((border_K.unsqueeze(1).expand_as(alive_Km)[alive_Km], level.cluster_parent[other]))
    slot_n = torch.cat((slot_Km[alive_Km], other))
    number_n = torch.cat((number_Km[alive_Km], level.units.units[other]))
    target_n = _targets(sums, border_n, slot_n, number_n, limits)

    num_parts = int(alive_Km.sum())
    target_Km = torch.full_like(number_Km, -1)
    target_Km[alive_Km] = target_n[:num_parts]
    to_KW = target_Km.gather(1, part_KW)
    moves_KW = valid_KW & (to_KW != cluster_K.unsqueeze(1))
    leaving = (target_n[num_parts:] != other).nonzero().flatten()
    unit, to = [unit_KW[moves_KW]], [to_KW[moves_KW]]
    if len(leaving):
        size = level.units.units[other[leaving]].clamp(max=limits.max_units)
        path = level.units.walk(level.units.entry[other[leaving]], int(size.max()))
        there = torch.arange(path.shape[1], device=path.device) < size.unsqueeze(1)
        unit.append(path[there])
        to.append(target_n[num_parts:][leaving].unsqueeze(1).expand_as(path)[there])
    return Moves(torch.cat(unit), torch.cat(to), border_n)


def _split(
    level: Level, cluster_K: Tensor, unit_KW: Tensor, valid_KW: Tensor, rest_K: Tensor, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    """(K, W) the part of every unit, (K, m) how many units a part has, (K, m, D) its sum; the rest of a large cluster is in part 0."""
    part_KW = torch.zeros_like(unit_KW)
    number_Km = cluster_K.new_zeros(len(cluster_K), limits.parts)
    sum_KmD = level.unit_sum.new_zeros(len(cluster_K), limits.parts, level.unit_sum.shape[1])
    part_m = torch.arange(limits.parts, device=cluster_K.device).view(1, -1, 1)
    looked_K = valid_KW.sum(1)
    for rows, width in by_width(torch.where(rest_K, max(2 * limits.max_units, 9), looked_K)):  # large clusters are a group of their own
        width = min(width, unit_KW.shape[1])
        cluster, unit, valid, rest = cluster_K[rows], unit_KW[rows, :width], valid_KW[rows, :width], rest_K[rows]
        sums, large = level.unit_sum.index_select(0, unit.flatten()).view(*unit.shape, -1), bool(rest[0])
        if large:
            total = valid.unsqueeze(1).to(sums.dtype) @ sums
            sums = torch.cat((level.cluster_sum[cluster].unsqueeze(1) - total, sums), 1)
            valid = torch.cat((rest.unsqueeze(1), valid), 1)
        part = split(F.normalize(sums, dim=2), valid, rest, limits.parts, limits.rule)
        if large:
            part[:, 0] = 0
        held = (part.unsqueeze(1) == part_m) & valid.unsqueeze(1)
        number_Km[rows], sum_KmD[rows] = held.sum(2), held.to(sums.dtype) @ sums
        part_KW[rows, :width] = part[:, 1:] if large else part
        if not large:
            level.cluster_sum[cluster] = sum_KmD[rows].sum(1)
    number_Km[:, 0] += torch.where(rest_K, level.units.units[cluster_K] - looked_K - 1, 0)
    return part_KW, number_Km, sum_KmD


def _targets(sum_nD: Tensor, border_n: Tensor, slot_n: Tensor, number_n: Tensor, limits: Limits) -> Tensor:
    """(n,) the slot each node ends in: that of the group's largest node that has one, the first of equals; −1 − g where none has."""
    border, order = border_n.sort(stable=True)
    group_n = torch.empty_like(order)
    group_n[order] = order[merged(F.normalize(sum_nD[order], dim=1), border, limits.similarity, limits.rule)]
    weight_n = torch.where(slot_n >= 0, number_n, 0)
    most_n = torch.zeros_like(group_n).scatter_reduce(0, group_n, weight_n, "amax")
    best_n = torch.where((weight_n == most_n[group_n]) & (weight_n > 0), slot_n, torch.iinfo(slot_n.dtype).max)
    keeper_n = torch.full_like(group_n, torch.iinfo(slot_n.dtype).max).scatter_reduce(0, group_n, best_n, "amin")
    return torch.where(most_n[group_n] > 0, keeper_n[group_n], -1 - group_n)
