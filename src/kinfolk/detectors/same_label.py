"""Who has the anchor's label, as places: in time linear in the matches, where comparing all pairs would cost as much as the loss.

Dimension key: R rows of a block, C candidates, G candidates with a shared label, M matches, L levels, N data set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.pairs import Block, Places, own_matches


@dataclass
class SameLabel:
    """The candidates' labels in order, for as long as candidates and labels are the same: all blocks of a step share them.

    Labels of `num_clusters` of its level or above belong to one sample alone and are never looked for.
    """

    num_clusters: tuple[int, ...]
    _ids_C: Tensor | None = None
    _version: int = -1
    _levels: tuple[tuple[Tensor, Tensor], ...] = ()

    def forget(self) -> None:
        """To be called when labels have changed."""
        self._ids_C, self._levels = None, ()

    def __call__(self, block: Block, labels_LN: Tensor) -> list[Places]:
        """For each level the places where the candidate has the anchor's label, without the anchor's own."""
        self._sort(block.candidate_ids, labels_LN)
        found = []
        for level_N, (sorted_G, column_G) in zip(labels_LN, self._levels, strict=True):
            row_M, col_M = own_matches(level_N[block.ids].repeat_interleave(block.num_views), sorted_G, column_G)
            other_M = block.sim_RC[row_M, col_M] != -torch.inf
            found.append((row_M[other_M], col_M[other_M]))
        return found

    def _sort(self, ids_C: Tensor, labels_LN: Tensor) -> None:
        version = -1 if ids_C.is_inference() else ids_C._version  # a queue overwrites its ids in place
        if ids_C is self._ids_C and version == self._version and version >= 0:
            return
        levels = []
        for level_N, number in zip(labels_LN, self.num_clusters, strict=True):
            label_C = level_N[ids_C]
            column_G = (label_C < number).nonzero().squeeze(1)
            sorted_G, order_G = label_C[column_G].sort(stable=True)
            levels.append((sorted_G, column_G[order_G]))
        self._ids_C, self._version, self._levels = ids_C, version, tuple(levels)
