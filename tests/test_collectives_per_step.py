"""What a step sends: its collectives, their bytes, and what replaces those that a backend lacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.objectives import NTXentLoss
from tests.ranks import end_rank, spawn

D, SIZES = 6, (5, 3)
Calls = list[tuple[str, int]]


def join(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=len(SIZES))


def rows_of(rank: int) -> Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(2 * SIZES[rank], D, generator=g, dtype=torch.float64).requires_grad_()


def gathered_gradient(rank: int) -> tuple[Tensor, Tensor]:
    rows = rows_of(rank)
    ids = torch.arange(len(rows), dtype=torch.int32)
    found, _ = distributed.gather_with_gradient(rows, list(SIZES), ids)
    value = (found.square() * (rank + 1) * torch.arange(len(found)).unsqueeze(1)).sum()
    return found.detach(), torch.autograd.grad(value, rows)[0]


def lacking(name: str, before: str) -> Callable[[Tensor, Tensor], object]:
    """What MPI says of the two in older versions of torch."""
    refusals = {
        "all_gather_into_tensor": "no support for _allgather_base in MPI process group",
        "reduce_scatter_tensor": "Backend mpi does not support _reduce_scatter_base",
    }

    def refuse(*given: Tensor) -> object:
        raise RuntimeError(refusals[before])

    return refuse


def compare_with_fallback(rank: int, folder: str) -> None:
    join(rank, folder)
    direct = gathered_gradient(rank)
    whole = torch.cat([rows_of(each).detach() for each in range(len(SIZES))])
    torch.testing.assert_close(direct[0], whole, rtol=0, atol=0)
    factor = sum(range(1, len(SIZES) + 1)) * torch.arange(len(whole)).unsqueeze(1)
    own = slice(2 * sum(SIZES[:rank]), 2 * sum(SIZES[: rank + 1]))
    torch.testing.assert_close(direct[1], (2 * whole * factor)[own])
    distributed._collective = lacking
    assert distributed.batch_sizes(SIZES[rank], whole.device) == list(SIZES)
    for one, other in zip(gathered_gradient(rank), direct, strict=True):
        torch.testing.assert_close(one, other)
    end_rank()


def test_a_backend_without_them_gives_the_same(tmp_path: Path) -> None:
    spawn(compare_with_fallback, (str(tmp_path),), len(SIZES))


def test_another_error_is_not_taken_for_a_missing_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*given: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "_collective", lambda *names: lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        distributed._all_gather(torch.zeros(2), torch.zeros(1))


def count_step(rank: int, folder: str) -> None:
    join(rank, folder)
    calls: Calls = []
    original, reduce = distributed._collective, dist.all_reduce

    def counted(name: str, before: str) -> Callable[[Tensor, Tensor], object]:
        def call(result: Tensor, given: Tensor) -> object:
            calls.append((name, max(result.nbytes, given.nbytes)))
            return original(name, before)(result, given)

        return call

    def reduced(given: Tensor, *how: Any) -> Any:
        calls.append(("all_reduce", given.nbytes))
        return reduce(given, *how)

    distributed._collective, dist.all_reduce = counted, reduced  # type: ignore[assignment]
    batch, world = 4, len(SIZES)
    one, other = torch.randn(2, batch, D, generator=torch.Generator().manual_seed(rank))
    with distributed.equal_batches():
        loss = NTXentLoss(temperature=0.1)(
            one.requires_grad_(), other, torch.arange(batch) + rank * batch
        )
        loss.backward()
    embeddings, ids = 2 * batch * world * D * 4, 2 * batch * world * 8
    assert calls == [
        ("all_gather_single", embeddings + ids),
        ("all_reduce", 4),  # the loss
        ("reduce_scatter_single", embeddings),  # of the gradient; nothing is reduced for all ranks
    ]
    end_rank()


def test_a_step_sends_one_gather_one_number_and_one_reduce_scatter(tmp_path: Path) -> None:
    spawn(count_step, (str(tmp_path),), len(SIZES))
