"""Starts the processes of tests: ranks, trainings that are killed, processes that hold a lock.

A fresh interpreter imports torch anew, which costs some four seconds of CPU time, and ten with the
training. The functions here fork the processes from one server, which has imported what the tests
need and has done nothing else. A process starts in a few hundredths of a second and shares no state
with the tests. There is one server for each pytest process, so all tests must start it with the
same list.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
    "kinfolk.training.train",
    "torch.utils.tensorboard",
    "tensorboard.summary",
    "pyarrow.parquet",
    "safetensors.torch",
    "sklearn.datasets",
    "faiss",
]

LONGEST = 600.0
"""Seconds after which the processes of `spawn` count as hanging."""


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def spawn(function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """Runs `function(rank, *args)` in `nprocs` processes and waits for them; an exception of one is
    raised here."""
    _context()
    running = start_processes(function, args, nprocs, join=False, start_method="forkserver")  # type: ignore[no-untyped-call]
    end = time.monotonic() + LONGEST
    while not running.join(timeout=end - time.monotonic()):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} did not end within {LONGEST} seconds")


def end_rank() -> NoReturn:
    """Ends a process of `spawn` that has ranks. Returning can hang: the last reference to a gloo
    group that dies in the main thread waits for the group's thread, which waits for the GIL."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Runs `function(*args)` in a process of its own and does not wait for it."""
    process = _context().Process(target=function, args=args)
    process.start()
    return process


class Ended(NamedTuple):
    """A program that has ended: its exit code and what it has written."""

    code: int
    out: str
    err: str


def run_program(function: Callable[..., None], folder: Path, *args: Any) -> Ended:
    """Runs `function(*args)` in a process of its own as if it were a program. `folder` holds what
    it writes."""
    process = start(_as_program, function, str(folder), args)
    process.join()
    return Ended(
        process.exitcode or 0,
        *((folder / name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt")),
    )


def _as_program(function: Callable[..., None], folder: str, args: tuple[Any, ...]) -> None:
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    warnings.simplefilter("ignore")
    function(*args)


def exit_codes(function: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> list[int]:
    """Runs `function(*args)` for all `calls` side by side and waits; returns the exit codes
    (negative: the signal)."""
    processes = [start(function, *args) for args in calls]
    for process in processes:
        process.join()
    return [process.exitcode or 0 for process in processes]
