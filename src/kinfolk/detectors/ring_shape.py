"""The ring of each anchor in one block: what is too far, what is too close, and a draw from what is between.

Dimension key: R rows of a block, C candidates, K drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.detectors.order import SMALL, Cut, cut
from kinfolk.kinship import Form, Interval, Mask, others
from kinfolk.pairs import Block

Shape = tuple[Form | None, Form | None]
"""What is too close, and what is too far; None: nothing can be."""


def exact(block: Block, lower: float, upper: float) -> Shape:
    """⌊lower·n⌋ of each row's n negatives too far, those from ⌊upper·n⌋ on too close. Among equals, the first columns count as farther."""
    n_R, num_candidates = block.num_negatives_R, block.sim_RC.shape[1]
    own_R = num_candidates - n_R
    first_R = own_R + torch.minimum(index(lower, n_R), (n_R - 1).clamp(min=0))
    last_R = own_R + index(upper, n_R)
    if block.sim_RC.device.type == "cpu" and num_candidates > SMALL:
        return _by_cuts(block, first_R, last_R, lower > 0, upper < 1)
    order_RC = block.sim_RC.sort(dim=1, stable=True).indices
    place_C = torch.arange(num_candidates, device=order_RC.device).expand_as(order_RC)
    rank_RC = torch.empty_like(order_RC).scatter_(1, order_RC, place_C)
    close = Mask(rank_RC >= last_R.unsqueeze(1)) if upper < 1 else None
    return close, Mask(rank_RC < first_R.unsqueeze(1)) if lower > 0 else None


def bounded(block: Block, lower_b: Tensor, upper_b: Tensor, lower: float, upper: float) -> Shape:
    """Below one threshold too far, above the other too close; a share of 0 or 1 has no threshold."""
    upper_R = block.per_row(upper_b.to(block.sim_RC.dtype))
    lower_R = torch.minimum(block.per_row(lower_b.to(block.sim_RC.dtype)), upper_R)
    return Interval(upper_R) if upper < 1 else None, Interval(upper_R=lower_R) if lower > 0 else None


def inside(block: Block, shape: Shape) -> Tensor:
    """(R, C) True in the ring; of an interval that lies above all, the most similar."""
    close, far = shape
    if isinstance(far, Interval) and far.upper_R is not None:
        far = Interval(upper_R=torch.minimum(far.upper_R, block.sim_RC.amax(1)))
    inside_RC = others(block.sim_RC)
    for form in (close, far):
        inside_RC = inside_RC if form is None else inside_RC * (1 - form.mask(block.sim_RC))
    return inside_RC > 0


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
    if number >= ring_RC.shape[1]:
        return ring_RC
    key_RC = torch.rand(ring_RC.shape, device=ring_RC.device).masked_fill_(~ring_RC, 2.0)
    drawn_RK = key_RC.topk(number, dim=1, largest=False).indices
    return torch.zeros_like(ring_RC).scatter_(1, drawn_RK, True) & ring_RC


def _by_cuts(block: Block, first_R: Tensor, last_R: Tensor, far: bool, close: bool) -> Shape:
    """The same by order statistics alone, without a sort: for a CPU, where a sort of a queue takes five times as long."""
    sim_RC, last = block.sim_RC, block.sim_RC.shape[1]
    wanted = [place_R for place_R, needed in ((first_R, far), (last_R.clamp(max=last - 1), close)) if needed]
    found, forms = list(cut(sim_RC, *wanted)), list[Form | None]()
    for place_R, needed, above in ((last_R, close, True), (first_R, far, False)):
        if not needed:
            forms.append(None)
            continue
        at = found[-1] if above else found[0]
        level_R = at.value_R.masked_fill(place_R == last, torch.inf)
        equals_R = (place_R - at.below_R).where(place_R < last, 0)  # how many of those at the value count as farther
        if bool((equals_R > 0).any()):
            forms.append(Mask(_beyond(sim_RC, at, equals_R, above) & (place_R < last if above else place_R > -1).unsqueeze(1)))
        else:
            down_R = torch.full_like(level_R, -torch.inf)
            forms.append(Interval(torch.nextafter(level_R, down_R)) if above else Interval(upper_R=level_R))
    return forms[0], forms[1]


def _beyond(sim_RC: Tensor, at: Cut, number_R: Tensor, above: bool) -> Tensor:
    """(R, C) True above the row's value, or below it, where the first `number_R` columns that hold it count as below."""
    value_R1 = at.value_R.unsqueeze(1)
    equal_RC = sim_RC == value_R1
    farther_RC = (sim_RC < value_R1) | (equal_RC & (equal_RC.cumsum(1) <= number_R.unsqueeze(1)))
    return ~farther_RC if above else farther_RC
