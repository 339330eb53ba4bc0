"""Order statistics of rows, exactly and without a sort; and columns that stand for all.

`torch.kthvalue` of 256 rows of 65,536 takes longer than the matrix product that they come from. Instead a bound is sought that stands some
thirty entries before the wanted one, by counting what is below it: first along a sorted sample, then along the line through the last two
counts. The wanted entry is then among the smallest ones from that bound on. A row where it is not is selected from by `kthvalue`. Two
places of each row take 60 instead of 290 ms with two threads.

Dimension key: R rows, C columns, S sampled columns, K smallest entries, G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.kinship import greater, parts

_FEW = 4096  # columns up to which nothing is gained
_SAMPLED, _LISTED, _GROUPS = 2048, 64, 1024
_CACHED = 1 << 20  # entries that are done at a time, so that they stay in the cache
_RUN = 16  # neighbours are read together: 64 bytes of float32


@dataclass(frozen=True)
class Cut:
    """The entry of each row that stands at the wanted place: (R,) its value and how many entries of the row are smaller."""

    value_R: Tensor
    below_R: Tensor


@torch.no_grad()
def cut(sim_RC: Tensor, *places: Tensor) -> tuple[Cut, ...]:
    """For each of `places`, (R,) in [0, C): the entry that stands there when a row is in ascending order. Entries are finite, and on a CPU.

    Example:
        >>> cut(torch.tensor([[0.3, 0.1, 0.2, 0.2]]), torch.tensor([2]))
        (Cut(value_R=tensor([0.2000]), below_R=tensor([1])),)
    """
    num_rows, num_columns = sim_RC.shape
    if num_columns <= _FEW or not num_rows:
        return tuple(_at_once(sim_RC, place_R) for place_R in places)
    found = list[list[Cut]]()
    for rows in parts(sim_RC, _CACHED):
        order_RS = _sorted(sampled(sim_RC[rows], _SAMPLED))
        found.append([_counted(sim_RC[rows], place_R[rows], order_RS) for place_R in places])
    return tuple(Cut(torch.cat([c.value_R for c in each]), torch.cat([c.below_R for c in each])) for each in zip(*found, strict=True))


def _counted(sim_RC: Tensor, place_R: Tensor, order_RS: Tensor) -> Cut:
    """The algorithm of the module docstring, with the sorted sample."""
    aim_R, per_column = (place_R - _LISTED // 2).clamp(min=0), order_RS.shape[1] / sim_RC.shape[1]
    before_R = _at(order_RS, aim_R * per_column)
    fewer_R = _below(sim_RC, before_R)
    bound_R = _at(order_RS, (2 * aim_R - fewer_R) * per_column)
    below_R = _below(sim_RC, bound_R)
    for _ in range(2):
        slope_R = ((bound_R - before_R) / (below_R - fewer_R)).nan_to_num(0.0, 0.0, 0.0)
        before_R, fewer_R, bound_R = bound_R, below_R, torch.addcmul(bound_R, slope_R, (aim_R - below_R).to(slope_R.dtype))
        below_R = _below(sim_RC, bound_R)
    bound_R, below_R = bound_R.masked_fill(aim_R == 0, -torch.inf), below_R.masked_fill(aim_R == 0, 0)
    rank_R1 = (place_R - below_R).unsqueeze(1)
    least_RK = _least(sim_RC, bound_R.unsqueeze(1))
    value_R1 = least_RK.gather(1, rank_R1.clamp(0, _LISTED - 1))
    value_R, below_R = value_R1.squeeze(1), below_R + (least_RK < value_R1).sum(1)
    missed_R = ((rank_R1 < 0) | (rank_R1 >= _LISTED)).squeeze(1)
    if bool(missed_R.any()):
        mended = _at_once(sim_RC[missed_R], place_R[missed_R])
        value_R[missed_R], below_R[missed_R] = mended.value_R, mended.below_R
    return Cut(value_R, below_R)


def _at(order_RS: Tensor, rank_R: Tensor) -> Tensor:
    """(R,) the entries at these ranks, or at the nearest that there are."""
    return order_RS.gather(1, rank_R.long().clamp(0, order_RS.shape[1] - 1).unsqueeze(1)).squeeze(1)


def _below(sim_RC: Tensor, bound_R: Tensor) -> Tensor:
    """(R,) how many entries are below the bound, exactly. As numbers, which a CPU counts ten times as fast as bools."""
    mask_RC = greater(bound_R.unsqueeze(1), sim_RC)
    return mask_RC.sum(1, dtype=torch.float64 if mask_RC.shape[1] >= 1 << 24 else None).long()


def _least(sim_RC: Tensor, bound_R1: Tensor) -> Tensor:
    """(R, K) the smallest entries from the bound on, ascending. They are in those groups of columns that have the smallest least entries:
    to look for the groups first takes a third of the time."""
    num_rows, num_columns = sim_RC.shape
    each = -(-num_columns // _GROUPS)
    from_RC = torch.add(sim_RC, greater(bound_R1, sim_RC), alpha=3e38)  # `torch.where` takes ten times as long
    if each * _GROUPS != num_columns:
        from_RC = F.pad(from_RC, (0, each * _GROUPS - num_columns), value=torch.inf)
    group_R1K = from_RC.view(num_rows, each, _GROUPS).amin(1).topk(_LISTED, 1, largest=False).indices.unsqueeze(1)
    column_RPK = group_R1K + _GROUPS * torch.arange(each, device=sim_RC.device).unsqueeze(1)
    return from_RC.gather(1, column_RPK.flatten(1)).topk(_LISTED, 1, largest=False).values


def _sorted(x_RS: Tensor) -> Tensor:
    """Each row in ascending order; numpy takes a third of the time of torch, which also sorts the places."""
    import numpy as np

    return torch.from_numpy(np.sort(x_RS.numpy(), axis=1))


def _at_once(sim_RC: Tensor, place_R: Tensor) -> Cut:
    """For few columns or few rows."""
    if len(sim_RC) and bool((place_R == place_R[0]).all()):
        value_R = sim_RC.kthvalue(int(place_R[0]) + 1, dim=1).values
        return Cut(value_R, _below(sim_RC, value_R))
    order_RC = sim_RC.sort(1).values
    value_R1 = order_RC.gather(1, place_R.unsqueeze(1))
    return Cut(value_R1.squeeze(1), torch.searchsorted(order_RC, value_R1).squeeze(1))


def sampled(sim_RC: Tensor, most: int, turn: int = 0) -> Tensor:
    """(R, S) at most `most` columns, in runs spread evenly over all of them; another `turn`, other columns. All where there are no more."""
    num_columns, num_runs = sim_RC.shape[1], most // _RUN
    if num_columns <= most:
        return sim_RC
    step = num_columns // num_runs
    first = turn * _RUN % (step - _RUN + 1)
    return sim_RC[:, : num_runs * step].view(len(sim_RC), num_runs, step)[:, :, first : first + _RUN].flatten(1)
