"""The ring of each anchor in one block: what is too far, what is too close, and a draw from what is between.

Dimension key: R rows of a block, C candidates, M places, W widest ring, K drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfolk.detectors.order import Cut, cut
from kinfolk.detectors.peaks import places_above
from kinfolk.pairs import Block

Places = tuple[Tensor, Tensor]



@dataclass(frozen=True)
class Shape:
    """Too far is what lies below `floor_R`, and the places `below`; too close what lies above `roof_R`, but not the places `spared`."""

    floor_R: Tensor | None = None
    below: Places | None = None
    roof_R: Tensor | None = None
    spared: Places | None = None

    def above(self, block: Block) -> Places | None:
        """What is too close."""
        if self.roof_R is None:
            return None
        places = places_above(block.sim_RC, self.roof_R)
        return places if self.spared is None else _without(places, self.spared, block.sim_RC.shape[1])

    def inside(self, block: Block) -> Tensor:
        """(R, C) True in the ring."""
        inside_RC = block.sim_RC > -2
        if self.floor_R is not None:
            inside_RC &= block.sim_RC >= self.floor_R.unsqueeze(1)
            bare_R = ~inside_RC.any(1) & (block.num_negatives_R > 0)  # a learned level above everybody: the most similar stay
            inside_RC[bare_R] = block.sim_RC[bare_R] == block.sim_RC[bare_R].amax(1, keepdim=True)
        for places in (self.below, self.above(block)):
            if places is not None:
                inside_RC[places] = False
        return inside_RC


def exact(block: Block, lower: float, upper: float) -> Shape:
    """⌊lower·n⌋ of each row's n negatives too far, those from ⌊upper·n⌋ on too close. Among equals, the first columns count as farther."""
    n_R = block.num_negatives_R
    first_R = torch.minimum(index(lower, n_R), (n_R - 1).clamp(min=0))
    last_R = index(upper, n_R)
    own_R = block.sim_RC.shape[1] - n_R
    floor_R, below, roof_R, spared = None, None, None, None
    far, close = bool((first_R > 0).any()), bool((last_R < n_R).any())
    places = [(own_R + at_R).clamp(max=block.sim_RC.shape[1] - 1) for at_R, wanted in ((first_R, far), (last_R, close)) if wanted]
    found = cut(block.sim_RC, *places)
    if far:
        lower_cut = found[0]
        floor_R = lower_cut.value_R.masked_fill(first_R == 0, -torch.inf)
        below = _equals(block.sim_RC, lower_cut, (own_R + first_R - lower_cut.below_R) * (first_R > 0))
    if close:
        upper_cut = found[-1]
        roof_R = torch.nextafter(upper_cut.value_R, torch.full_like(upper_cut.value_R, -torch.inf))  # above it: what is not below the value
        roof_R = roof_R.masked_fill(last_R == n_R, torch.inf)
        spared = _equals(block.sim_RC, upper_cut, (own_R + last_R - upper_cut.below_R) * (last_R < n_R))
    return Shape(floor_R, below, roof_R, spared)


def bounded(block: Block, lower_b: Tensor, upper_b: Tensor) -> Shape:
    """Below one threshold too far, above the other too close."""
    upper_R = upper_b.to(block.sim_RC.dtype).repeat_interleave(block.num_views)
    lower_R = torch.minimum(lower_b.to(block.sim_RC.dtype).repeat_interleave(block.num_views), upper_R)
    far, close = bool((lower_R > -torch.inf).any()), bool((upper_R < torch.inf).any())
    return Shape(lower_R if far else None, None, upper_R if close else None)


def index(share: float, n_R: Tensor) -> Tensor:
    """(R,) ⌊share·n⌋ of the share as it was written: 0.29 · 100 is 28.999999999999996 in floating point, but counts as 29.

    A product that falls short of a whole number by less than 10⁻¹² of itself is that number.

    Example:
        >>> index(0.29, torch.tensor([100, 99]))
        tensor([29, 28])
    """
    return torch.minimum((n_R.double() * share * (1 + 1e-12)).floor().long(), n_R)


def drawn(ring_RC: Tensor, number: int) -> Tensor:
    """(R, C) True at `number` places of each row, drawn from its True ones without replacement; at all of them where there are no more."""
    count_R = ring_RC.sum(1)
    if not len(count_R) or int(count_R.max()) <= number:
        return ring_RC
    key_RC = torch.rand(ring_RC.shape, device=ring_RC.device).masked_fill_(~ring_RC, 2.0)
    (last,) = cut(key_RC, torch.full_like(count_R, number - 1))
    kept_RC = (key_RC <= last.value_R.unsqueeze(1)).logical_and_(ring_RC)
    for row in (kept_RC.sum(1) > number).nonzero()[:, 0].tolist():  # the last key was drawn twice: rare
        kept_RC[row] = False
        kept_RC[row, key_RC[row].topk(number, largest=False).indices] = True
    return kept_RC


def _equals(sim_RC: Tensor, found: Cut, number_R: Tensor) -> Places | None:
    """The first `number_R` columns that hold the row's value. Rare, so rows are looked at one by one."""
    rows = (number_R > 0).nonzero()[:, 0].tolist()
    if not rows:
        return None
    columns = [(sim_RC[row] == found.value_R[row]).nonzero()[: int(number_R[row]), 0] for row in rows]
    return torch.cat([torch.full_like(each, row) for row, each in zip(rows, columns, strict=True)]), torch.cat(columns)


def _without(places: Places, others: Places, num_columns: int) -> Places:
    left_M = ~torch.isin(places[0] * num_columns + places[1], others[0] * num_columns + others[1])
    return places[0][left_M], places[1][left_M]
