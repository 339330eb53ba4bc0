"""Order statistics of rows, exactly and without a sort.

After Floyd and Rivest, Expected time bounds for selection, CACM 1975: a sample of the columns says between which two values the wanted
one lies, one pass counts what is below and takes out the few between them, and only those are selected from. A row whose value is not
between them, which a sample says of one in some hundreds, is sorted.

Dimension key: R rows, C columns, S sampled columns, M entries between the two values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALL, _SAMPLED, _DEVIATIONS = 4096, 2048, 3.0
_RUN = 16  # neighbours are read together: 64 bytes of float32


@dataclass(frozen=True)
class Cut:
    """The entry of each row that stands at the wanted place: (R,) its value and how many entries of the row are smaller."""

    value_R: Tensor
    below_R: Tensor


@torch.no_grad()
def cut(sim_RC: Tensor, place_R: Tensor) -> Cut:
    """The entry at `place_R`, in [0, C), of each row in ascending order; −inf stands first.

    Example:
        >>> cut(torch.tensor([[0.3, 0.1, 0.2, 0.2]]), torch.tensor([2]))
        Cut(value_R=tensor([0.2000]), below_R=tensor([1]))
    """
    if sim_RC.shape[1] <= _SMALL or not len(sim_RC):
        return _at_once(sim_RC, place_R)
    low_R1, high_R1 = (bound_R.unsqueeze(1) for bound_R in _bracket(sim_RC, place_R))
    above_RC = sim_RC >= low_R1
    below_R = sim_RC.shape[1] - above_RC.sum(1, dtype=torch.int32).long()  # the sum in int64 is thirty times slower
    row_M, col_M = above_RC.logical_and_(sim_RC <= high_R1).nonzero(as_tuple=True)
    between_R = torch.bincount(row_M, minlength=len(sim_RC))
    rank_R = place_R - below_R
    missed_R = (rank_R < 0) | (rank_R >= between_R)
    sim_M = sim_RC[row_M, col_M]
    value_R = _ranked(sim_M, row_M, between_R, rank_R.masked_fill(missed_R, 0), sim_RC.shape[1])
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


def _bracket(sim_RC: Tensor, place_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,), (R,) two values between which the wanted entries most likely lie. Rows want much the same place: one pair of ranks will do."""
    sample_RS = sampled(sim_RC, _SAMPLED)
    num_sampled, bounds = sample_RS.shape[1], []
    for place, sign in ((int(place_R.min()), -1), (int(place_R.max()), 1)):
        share = (place + 0.5) / sim_RC.shape[1]
        rank = round(share * num_sampled + sign * (_DEVIATIONS * math.sqrt(num_sampled * share * (1 - share)) + 1))
        outside = not 0 <= rank < num_sampled
        bounds.append(sim_RC.new_full(place_R.shape, sign * torch.inf) if outside else sample_RS.kthvalue(rank + 1, dim=1).values)
    return bounds[0], bounds[1]


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
        return cut(padded_RW, torch.full_like(rank_R, top)).value_R
    return padded_RW.kthvalue(top + 1, dim=1).values  # so many are equal that nothing was gained
