"""Starts the processes of rank tests.

`torch.multiprocessing.spawn` starts a fresh interpreter for every rank, which imports torch anew: some four seconds of CPU time each. The
functions here fork them from one server process that has imported what the tests need and has done nothing else, so a rank starts in a
few hundredths of a second and still shares no state with the tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

PRELOADED = [
    "pytest",
    "hypothesis",
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "kinfolk.frameworks",
    "kinfolk.detectors",
    "kinfolk.objectives",
]


def spawn(function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """Runs `function(rank, *args)` in `nprocs` processes and waits for them; an exception of one is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    start_processes(function, args, nprocs, start_method="forkserver")  # type: ignore[no-untyped-call]
