"""Communication between ranks: embeddings with their gradient, ids, and per-sample updates.

As DistributedDataParallel averages the ranks' gradients, every rank returns the loss of the joined
batch, with a gradient whose **average** over ranks is that of the joined batch. Tensors stay on the
device of the caller's data: NCCL takes no CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALIGNMENT = 8
"""Bytes. Every tensor of a packed message begins there, so that it can be read as any type."""
_equal_batches = False


def world_size() -> int:
    """1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return world_size() == 1 or dist.get_rank() == 0


def max_over_ranks(number: int, device: torch.device) -> int:
    if world_size() == 1:
        return number
    highest = torch.tensor(number, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


@contextmanager
def equal_batches(equal: bool = True) -> Iterator[None]:
    """Saves a collective and a wait in every step. With unequal batches, the collectives fail or
    hang."""
    global _equal_batches
    before, _equal_batches = _equal_batches, equal
    try:
        yield
    finally:
        _equal_batches = before


def batch_sizes(local: int, device: torch.device) -> list[int]:
    if _equal_batches:
        return [local] * world_size()
    sizes = torch.empty(world_size(), dtype=torch.int64, device=device)
    _all_gather(sizes, torch.full((1,), local, dtype=torch.int64, device=device))
    found: list[int] = sizes.tolist()
    return found


@contextmanager
def threads_of_waiting_ranks() -> Iterator[None]:
    """Within, torch computes with the CPU threads of all ranks of this machine."""
    before, given = torch.get_num_threads(), os.environ
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # torchrun does so where the user sets nothing
    set_by_torchrun = "TORCHELASTIC_RUN_ID" in given and given.get("OMP_NUM_THREADS") == "1"
    local = int(given.get("LOCAL_WORLD_SIZE", world_size()))
    torch.set_num_threads(max(before, cores if set_by_torchrun else min(cores, before * local)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _all_gather(gathered: Tensor, own: Tensor) -> None:
    try:
        _collective("all_gather_single", "all_gather_into_tensor")(gathered, own)
    except RuntimeError as error:
        _require_unsupported(error)
        dist.all_gather(list(gathered.view(-1, len(own))), own)


def _reduce_scatter(own: Tensor, whole: Tensor) -> None:
    """Fills `own` with this rank's part of the sum of `whole` over ranks."""
    try:
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(own, whole)
    except RuntimeError as error:
        _require_unsupported(error)
        total = whole.clone()
        dist.all_reduce(total)
        own.copy_(total.view(world_size(), *own.shape)[dist.get_rank()])


def _collective(name: str, before: str) -> Callable[[Tensor, Tensor], object]:
    """`before`: its name before torch 2.13."""
    found: Callable[[Tensor, Tensor], object] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _require_unsupported(error: RuntimeError) -> None:
    """Raises the error again, unless the backend lacks the collective, as MPI and older versions of
    gloo do. It is then raised on all ranks before anything is sent."""
    if not any(words in str(error) for words in ("not support", "no support")):
        raise error


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    return gather_together((rows,), sizes)[0]


def gather_together(tensors: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
    """The rows of all ranks of each of these tensors, of any types, in the order of ranks, by one
    collective, without gradient. Each has the same number of rows for every sample."""
    own, longest, world = sizes[dist.get_rank()], max(sizes), len(sizes)
    pieces, layout, start = list[Tensor](), list[tuple[int, int, int]](), 0
    for tensor in tensors:
        each = len(tensor) // own if own else 1
        rows = tensor.detach().contiguous()
        if own < longest:
            rows = torch.cat((rows, rows.new_zeros((each * (longest - own), *rows.shape[1:]))))
        piece = rows.view(-1).view(torch.uint8)
        padding = -len(piece) % _ALIGNMENT
        layout.append((each, start, len(piece)))
        pieces += (piece, piece.new_zeros(padding)) if padding else (piece,)
        start += len(piece) + padding
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    message_WB, found = packed.new_empty(world, start), list[Tensor]()
    _all_gather(message_WB.view(-1), packed)
    for tensor, (each, first, length) in zip(tensors, layout, strict=True):
        rows = message_WB[:, first : first + length].view(tensor.dtype)
        rows = rows.reshape(world, each * longest, *tensor.shape[1:])
        if min(sizes) < longest:
            parts = [part[: each * size] for part, size in zip(rows, sizes, strict=True)]
        found.append(rows.flatten(0, 1) if min(sizes) == longest else torch.cat(parts))
    return found


def gather_all(*tensors: Tensor, sizes: list[int] | None = None) -> tuple[Tensor, ...]:
    """As `gather_together`, for tensors of one length."""
    if world_size() == 1:
        return tuple(x.detach() for x in tensors)
    return tuple(gather_together(tensors, sizes or batch_sizes(len(tensors[0]), tensors[0].device)))


def gather_with_gradient(rows: Tensor, sizes: list[int], *others: Tensor) -> tuple[Tensor, ...]:
    """As `gather_together`; `rows` receive the sum of the gradients of all ranks."""
    gathered: tuple[Tensor, ...] = _Gather.apply(sizes, rows, *others)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a scalar over ranks, with the gradient of DDP's convention."""
    total: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return total


def average_gradient(parameter: Tensor) -> Tensor:
    """For a parameter whose gradient no DistributedDataParallel averages."""
    if world_size() == 1:
        return parameter
    same: Tensor = _Average.apply(parameter)  # type: ignore[no-untyped-call]
    return same


def from_rank_zero(compute: Callable[[], Tensor], empty: Tensor) -> Tensor:
    """`empty`, filled on all ranks with what `compute` returns on rank zero."""
    if is_rank_zero():
        with threads_of_waiting_ranks():
            empty.copy_(compute())
    if world_size() > 1:
        dist.broadcast(empty, 0)
    return empty


def overwrite_from_rank_zero(tensors: Sequence[Tensor], device: torch.device) -> None:
    if world_size() > 1:
        for tensor in tensors:
            there = tensor.to(device)
            dist.broadcast(there, 0)
            tensor.copy_(there)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: list[int], rows: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        rank = dist.get_rank()
        each = len(rows) // sizes[rank] if sizes[rank] else 1
        ctx.rows, ctx.rank, ctx.number = [each * size for size in sizes], rank, len(others)
        gathered = gather_together((rows, *others), sizes)
        ctx.mark_non_differentiable(*gathered[1:])
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        rows, longest = ctx.rows, max(ctx.rows)
        if min(rows) < longest:  # the parts of a reduce-scatter are equally long
            parts = [
                torch.cat((part, part.new_zeros(longest - len(part), *part.shape[1:])))
                for part in torch.split(grad, rows)
            ]
            grad = torch.cat(parts)
        own = grad.new_empty(longest, *grad.shape[1:])
        _reduce_scatter(own, grad.contiguous())
        return None, own[: rows[ctx.rank]], *(None for _ in range(ctx.number))


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
