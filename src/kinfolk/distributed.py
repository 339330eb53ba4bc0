"""What crosses ranks: embeddings with their gradient, ids, per-sample updates. The mathematics is in `contrast.py`.

The convention is that of DistributedDataParallel, which averages the ranks' gradients: every rank returns the loss of the joined batch, and
its gradient is scaled so that the **average** over ranks is the gradient of the joined batch. Ranks may hold batches of unequal size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def world_size() -> int:
    """The number of processes; 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def batch_sizes(local: int, device: torch.device) -> list[int]:
    """The number of rows each rank holds, in the order of ranks."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([local], dtype=torch.int64, device=device))
    return [int(size) for size in sizes]


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """The rows of all ranks in the order of ranks, without gradient. `sizes`: rows on each rank."""
    longest = max(sizes)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def joined(rows: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks of each of these tensors of one length, in the order of ranks, without gradient; of one process, its own."""
    if world_size() == 1:
        return tuple(x.detach() for x in (rows, *others))
    sizes = batch_sizes(len(rows), rows.device)
    return tuple(gather_rows(x.detach().contiguous(), sizes) for x in (rows, *others))


def gather_with_gradient(rows: Tensor, sizes: list[int]) -> Tensor:
    """As `gather_rows`; the gradient that every rank has for this rank's rows comes back summed."""
    gathered: Tensor = _Gather.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a scalar over ranks, with the gradient of DDP's convention (times the number of ranks)."""
    total: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return total


def averaged(parameter: Tensor) -> Tensor:
    """The same value; its gradient comes back as the average over ranks, so that a parameter outside of DistributedDataParallel stays
    the same on all of them. Inside of it nothing changes."""
    if world_size() == 1:
        return parameter
    same: Tensor = _Average.apply(parameter)  # type: ignore[no-untyped-call]
    return same


def gather_update(update: Mapping[str, Tensor], sizes: list[int]) -> dict[str, Tensor]:
    """Per-sample updates of all ranks, row by row in the order of ranks."""
    return {name: gather_rows(rows.contiguous(), sizes) for name, rows in update.items()}


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.span = (sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return gather_rows(rows, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)  # not reduce_scatter: gloo has none
        start, stop = ctx.span
        return grad[start:stop], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * world_size()


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / world_size()
