"""Order statistics of rows, exactly and without a sort.

After Floyd and Rivest, Expected time bounds for selection, CACM 1975: a sample of the columns, sorted, says where about the wanted value
lies; one pass counts what is below that and so corrects it to two values that are closer together; a second pass counts what is below the
lower and takes out the few between them, and only those are selected from. A row whose value is not between them is sorted. Masks are
numbers, not bools, and a few rows are done at a time, so that they stay in the cache: a third of the time.

Dimension key: R rows, C columns, S sampled columns, P parts of the columns, K places where one of P is marked, M entries between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Places = tuple[Tensor, Tensor]


SMALL, _SAMPLED, _DEVIATIONS, _PARTS = 4096, 2048, 3.0, 4
_CACHED = 1 << 21  # entries that are done at a time
_RUN = 16  # neighbours are read together: 64 bytes of float32


@dataclass(frozen=True)
class Cut:
    """The entry of each row that stands at the wanted place: (R,) its value and how many entries of the row are smaller."""

    value_R: Tensor
    below_R: Tensor


@torch.no_grad()
def cut(sim_RC: Tensor, *places: Tensor) -> tuple[Cut, ...]:
    """For each of `places`, (R,) in [0, C): the entry that stands there when a row is in ascending order; −inf stands first.

    Example:
        >>> cut(torch.tensor([[0.3, 0.1, 0.2, 0.2]]), torch.tensor([2]))
        (Cut(value_R=tensor([0.2000]), below_R=tensor([1])),)
    """
    num_rows, num_columns = sim_RC.shape
    if num_columns <= SMALL or not num_rows or not places:
        return tuple(_at_once(sim_RC, place_R) for place_R in places)
    step = min(num_rows, max(1, _CACHED // num_columns)) if sim_RC.device.type == "cpu" else num_rows
    spare, found = sim_RC.new_empty(2, step, num_columns), list[list[Cut]]()
    for part_RC in sim_RC.split(step):  # type: ignore[no-untyped-call]
        order_RS, rows = sampled(part_RC, _SAMPLED).sort(1).values, slice(len(found) * step, len(found) * step + len(part_RC))
        found.append([_between(part_RC, place_R[rows], order_RS, spare[:, : len(part_RC)]) for place_R in places])
    return tuple(Cut(torch.cat([c.value_R for c in each]), torch.cat([c.below_R for c in each])) for each in zip(*found, strict=True))


def few_places(mask_RC: Tensor) -> Places:
    """Where a mask of numbers is 1, row by row, the columns in no order. The largest of every four is looked at first, as ones are few."""
    num_rows, num_columns = mask_RC.shape
    parts = _PARTS if num_columns % _PARTS == 0 and mask_RC.is_contiguous() else 1
    width = num_columns // parts
    row_K, col_K = mask_RC.view(num_rows, parts, width).amax(1).nonzero(as_tuple=True)
    column_KP = col_K.unsqueeze(1) + width * torch.arange(parts, device=mask_RC.device)
    of_M, part_M = mask_RC.reshape(-1)[(row_K * num_columns).unsqueeze(1) + column_KP].nonzero(as_tuple=True)
    return row_K[of_M], column_KP[of_M, part_M]


def _between(sim_RC: Tensor, place_R: Tensor, order_RS: Tensor, spare: Tensor) -> Cut:
    """The algorithm of the module docstring, with the sorted sample and memory for two masks."""
    num_columns, (mask_RC, over_RC) = sim_RC.shape[1], spare
    low_R1, high_R1 = _bracket(sim_RC, place_R, order_RS, mask_RC)
    below_R = num_columns - _number(torch.ge(sim_RC, low_R1, out=mask_RC))
    mask_RC.sub_(torch.gt(sim_RC, high_R1, out=over_RC))
    row_M, col_M = few_places(mask_RC)
    between_R = torch.bincount(row_M, minlength=len(sim_RC))
    rank_R = place_R - below_R
    missed_R = (rank_R < 0) | (rank_R >= between_R)
    sim_M = sim_RC[row_M, col_M]
    value_R = _ranked(sim_M, row_M, between_R, rank_R.masked_fill(missed_R, 0), num_columns)
    below_R = below_R + torch.bincount(row_M[sim_M < value_R[row_M]], minlength=len(sim_RC))
    if missed_R.any():
        mended = _at_once(sim_RC[missed_R], place_R[missed_R])
        value_R[missed_R], below_R[missed_R] = mended.value_R, mended.below_R
    return Cut(value_R, below_R)


def sampled(sim_RC: Tensor, most: int, turn: int = 0) -> Tensor:
    """(R, S) at most `most` columns, in runs spread evenly over all of them; another `turn`, other columns. All where there are no more."""
    num_columns, num_runs = sim_RC.shape[1], most // _RUN
    if num_columns <= most:
        return sim_RC
    step = num_columns // num_runs
    first = turn * _RUN % (step - _RUN + 1)
    return sim_RC[:, : num_runs * step].view(len(sim_RC), num_runs, step)[:, :, first : first + _RUN].flatten(1)


def _at_once(sim_RC: Tensor, place_R: Tensor) -> Cut:
    """For few columns or few rows."""
    if len(sim_RC) and bool((place_R == place_R[0]).all()):
        value_R = sim_RC.kthvalue(int(place_R[0]) + 1, dim=1).values
        return Cut(value_R, (sim_RC < value_R.unsqueeze(1)).sum(1, dtype=torch.int32).long())
    order_RC = sim_RC.sort(1).values
    value_R1 = order_RC.gather(1, place_R.unsqueeze(1))
    return Cut(value_R1.squeeze(1), torch.searchsorted(order_RC, value_R1).squeeze(1))


def _bracket(sim_RC: Tensor, place_R: Tensor, order_RS: Tensor, mask_RC: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 1), (R, 1) two values between which the wanted entries most likely lie. Overwrites `mask_RC`."""
    per_column = order_RS.shape[1] / sim_RC.shape[1]
    rank_R = ((place_R + 0.5) * per_column).long()
    below_R = _number(torch.lt(sim_RC, order_RS.gather(1, rank_R.unsqueeze(1)), out=mask_RC))
    amiss_R = (place_R - below_R) * per_column
    spread_R = _DEVIATIONS * (amiss_R.abs() + 1).sqrt() + 1
    padded_RS = torch.nn.functional.pad(order_RS, (0, 1), value=torch.inf)
    low_R, high_R = (rank_R + amiss_R - spread_R).floor().long(), (rank_R + amiss_R + spread_R).ceil().long()
    low_R1 = order_RS.gather(1, low_R.clamp(0, order_RS.shape[1] - 1).unsqueeze(1)).masked_fill((low_R < 0).unsqueeze(1), -torch.inf)
    return low_R1, padded_RS.gather(1, high_R.clamp(0, order_RS.shape[1]).unsqueeze(1))


def _number(mask_RC: Tensor) -> Tensor:
    """(R,) how many are 1, exactly."""
    return mask_RC.sum(1, dtype=torch.float64 if mask_RC.shape[1] >= 1 << 24 else None).long()


def _ranked(sim_M: Tensor, row_M: Tensor, count_R: Tensor, rank_R: Tensor, num_columns: int) -> Tensor:
    """(R,) the entry at `rank_R` among the `count_R` entries of each row. So many −inf are put before them that all rows want one rank."""
    top = int(rank_R.max())
    front_R = top - rank_R
    width = max(int((front_R + count_R).max()), top + 1)
    within_M = torch.arange(len(row_M), device=row_M.device) - (count_R.cumsum(0) - count_R)[row_M]
    padded_RW = sim_M.new_full((len(rank_R), width), torch.inf)
    padded_RW[torch.arange(width, device=row_M.device) < front_R.unsqueeze(1)] = -torch.inf
    padded_RW[row_M, front_R[row_M] + within_M] = sim_M
    if 2 * width < num_columns:
        return cut(padded_RW, torch.full_like(rank_R, top))[0].value_R
    return padded_RW.kthvalue(top + 1, dim=1).values  # so many are equal that nothing was gained
