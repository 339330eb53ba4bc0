"""Counts the collectives of a process group, and refuses tensors that NCCL would refuse.

Rank tests run over gloo, which takes tensors of any device. NCCL takes CUDA tensors only, so code
that hands it a CPU tensor passes every gloo test and fails on the first machine with several GPUs.

    with collectives(device_only=True) as log, pretended():
        loss = framework(views, ids)      # a collective on a CPU tensor raises
    assert log.total <= 3

With tensors of the pretended device (`tests/pretended/device.py`) the communication itself still
runs over gloo.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)


class CollectiveLog:
    """How often each collective was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def reset(self) -> None:
        self.calls.clear()


@contextlib.contextmanager
def collectives(device_only: bool = False) -> Iterator[CollectiveLog]:
    """Counts the collectives called within; with `device_only`, one that is given a CPU tensor
    raises as NCCL does."""
    log = CollectiveLog()
    originals = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}

    def wrapped(name: str) -> Any:
        @functools.wraps(originals[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            log.calls[name] += 1

            def plain(value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if device_only and value.device.type != "cuda":
                    raise RuntimeError(
                        f"No backend type associated with device type cpu: {name} of a tensor"
                        f" {tuple(value.shape)}"
                    )
                return getattr(value, "held", value)

            return originals[name](*tree_map(plain, args), **tree_map(plain, kwargs))

        return call

    try:
        for name in originals:
            setattr(dist, name, wrapped(name))
        yield log
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
