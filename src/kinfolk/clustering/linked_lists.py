"""Lists of clusters' units as rings: enumerating, taking out and putting in cost what they move, not what there is.

The units of a cluster stand in a circle, `after` and `before` each other; `entry` of a cluster is one of them, `units` their number. All
functions work on many rings at once and write in place.

Dimension key: S slots of units, C slots of clusters, K rings walked, W steps, M units moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rings:
    """The rings of one level: (S,) `after` and `before` over units, (C,) `entry` and `units` over the clusters that hold them."""

    after: Tensor
    before: Tensor
    entry: Tensor
    units: Tensor

    def walk(self, start_K: Tensor, width: int) -> Tensor:
        """(K, width) units from `start` on, going round again where the ring is shorter."""
        path_WK = start_K.new_empty(width, len(start_K))
        unit_K = start_K
        for place in range(width):
            path_WK[place] = unit_K
            unit_K = self.after[unit_K]
        return path_WK.T

    def take_out(self, unit_M: Tensor, cluster_M: Tensor) -> None:
        """Takes distinct units out of the rings of their clusters."""
        if not len(unit_M):
            return
        self.units.index_add_(0, cluster_M, torch.full_like(cluster_M, -1))
        unit_M, order = unit_M.sort()
        cluster_M = cluster_M[order]
        left_M, right_M = _skip(unit_M, self.before[unit_M]), _skip(unit_M, self.after[unit_M])
        self.after[left_M] = right_M  # units next to each other in a ring have the same two survivors
        self.before[right_M] = left_M
        enters_M = self.entry[cluster_M] == unit_M
        self.entry[cluster_M[enters_M]] = right_M[enters_M]

    def put_in(self, unit_M: Tensor, cluster_M: Tensor) -> None:
        """Puts units that are in no ring into the rings of clusters, behind the entry; an empty cluster's ring begins."""
        if not len(unit_M):
            return
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

    def rebuild(self, cluster_S: Tensor, alive: int) -> None:
        """Makes all rings anew for the units 0 … alive − 1, in the order of their slots."""
        self.units.zero_()
        self.entry.fill_(-1)
        self.put_in(torch.arange(alive, device=cluster_S.device), cluster_S[:alive])


def _skip(gone_M: Tensor, neighbour_M: Tensor) -> Tensor:
    """The nearest neighbour that stays, by doubling; `gone` is sorted. Of a ring that goes whole, any of it."""
    for _ in range(len(gone_M).bit_length()):
        place_M = torch.searchsorted(gone_M, neighbour_M).clamp(max=len(gone_M) - 1)
        goes_M = gone_M[place_M] == neighbour_M
        if not goes_M.any():
            break
        neighbour_M = torch.where(goes_M, neighbour_M[place_M], neighbour_M)
    return neighbour_M
