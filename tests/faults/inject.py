"""Faults to inject: kills at chosen moments, full disks, flipped bits, cut and mixed-up files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kinfolk.files import is_unfinished
from tests.ranks import start


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes with one bit turned."""
    place = bit // 8
    return data[:place] + bytes([data[place] ^ 1 << bit % 8]) + data[place + 1 :]


@contextlib.contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """The file with other bytes, and then as it was."""
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One of the ways in which a file goes bad: bits, a cut, a hole, a repetition, noise, huge or
    negative numbers in its head."""
    kind = chance.randrange(7)
    place = chance.randrange(max(1, len(data)))
    if kind == 0 and data:
        return flipped(data, chance.randrange(len(data) * 8))
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[place + chance.randrange(1, 64) :]
    if kind == 3:
        return data[:place] + data[place : place + 64] * chance.randrange(2, 50) + data[place:]
    if kind == 4:
        return data[:place] + chance.randbytes(chance.randrange(1, 64)) + data[place + 16 :]
    place = chance.randrange(min(256, max(1, len(data))))
    return (
        data[:place]
        + chance.choice(
            [
                b"\xff" * 8,
                b"\0" * 8,
                b"\x7f" + b"\xff" * 7,
                b"-9",
                b"9" * 20,
                b"[" * 3000,
                b"\r\x1b[2J=",
            ]
        )
        + data[place + 8 :]
    )


class FullDiskError(OSError):
    """What a patched writer raises."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def full_disk(after: int) -> Iterator[None]:
    """Every file that is opened for writing by `kinfolk.files` takes `after` more bytes, all
    together, and no more."""
    import kinfolk.files

    left = [after]

    class Limited:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            size = len(memoryview(data).cast("B"))
            if size > left[0]:
                self._file.write(bytes(memoryview(data).cast("B")[: left[0]]))
                left[0] = 0
                raise FullDiskError
            left[0] -= size
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

    def limited(path: Any, mode: str = "r", *others: Any, **more: Any) -> Any:
        file = open(path, mode, *others, **more)  # noqa: SIM115
        return Limited(file) if "w" in mode or "a" in mode else file

    vars(kinfolk.files)["open"] = limited
    try:
        yield
    finally:
        del vars(kinfolk.files)["open"]


def arm(point: int, report: Path | None = None, number: int = signal.SIGKILL) -> None:
    """This process ends itself at the `point`-th moment of its training; 0: never. At the end
    `report` says how many there were.

    Moments are: before and after every rename, link and flush to the disk, half-way through the
    first bytes of every file that is written, and after every step.
    """
    from kinfolk.training.module import TrainingModule

    count = [0]

    def moment() -> None:
        count[0] += 1
        if report is not None:
            report.write_text(str(count[0]))
        if count[0] == point:
            os.kill(os.getpid(), number)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            moment()
            result = function(*args, **more)
            moment()
            return result

        return wrapped

    for name in ("replace", "fsync", "link"):
        setattr(os, name, around(getattr(os, name)))
    step = TrainingModule.training_step

    def training_step(self: Any, *args: Any) -> Any:
        loss = step(self, *args)
        moment()
        return loss

    TrainingModule.training_step = training_step  # type: ignore[method-assign,assignment]
    from kinfolk import files

    write = files._Hashing.write
    halved: set[int] = set()

    def half(self: Any, data: Any) -> int:
        if id(self) in halved:
            return write(self, data)
        halved.add(id(self))
        whole = bytes(data)
        write(self, whole[: len(whole) // 2])
        self.file.flush()
        moment()
        return write(self, whole[len(whole) // 2 :])

    files._Hashing.write = half  # type: ignore[method-assign]


def in_children(
    calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, str]]],
    patience: float = 300.0,
) -> list[int | None]:
    """Calls functions, each with its arguments and additions to its environment, in processes side
    by side; returns their exit codes (negative: a signal). After `patience` seconds those that have
    not ended are killed, and None stands for their code."""
    processes = [start(_call, *call) for call in calls]
    until = time.monotonic() + patience
    codes: list[int | None] = []
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            codes.append(None)
        else:
            codes.append(process.exitcode)
    return codes


def as_ranks(number: int, launcher: str = "torchrun") -> list[dict[str, str]]:
    """The environments of as many ranks, as torchrun or SLURM would set them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number)}
    if launcher == "torchrun":
        shared |= {"TORCHELASTIC_RUN_ID": port, "LOCAL_WORLD_SIZE": str(number), "GROUP_RANK": "0"}
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    shared |= {
        "SLURM_JOB_ID": port,
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(number),
        "SLURM_JOB_NAME": "kinfolk",
    }
    shared |= {
        "SLURM_NTASKS_PER_NODE": str(number),
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
    }
    return [
        {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        for rank in range(number)
    ]


def differences(ours: Path, theirs: Path) -> list[str]:
    """What differs between two runs that should have come to the same, bit for bit; seconds and
    speed are not compared."""
    from kinfolk.training.checkpoint import read_checkpoint
    from kinfolk.training.run_folder import Run

    one, other = Run(ours), Run(theirs)
    found: list[str] = []
    checkpoints = [read_checkpoint(run.checkpoint) for run in (one, other)]
    for part in ("kinfolk", "state_dict", "optimizer_states", "lr_schedulers"):
        _differ(checkpoints[0][part], checkpoints[1][part], part, found)
    names = [
        name
        for name in ("model.safetensors", "towers.safetensors", "samples.parquet", "quarantine.csv")
        if (theirs / name).exists()
    ]
    found += [name for name in names if (ours / name).read_bytes() != (theirs / name).read_bytes()]
    timing = ("seconds", "refresh_seconds", "images_per_second")
    lines = [
        [{key: value for key, value in row.items() if key not in timing} for row in run.epochs()]
        for run in (one, other)
    ]
    if lines[0] != lines[1]:
        found.append("metrics.jsonl")
    leftovers = [
        path.name
        for path in ours.rglob("*")
        if is_unfinished(path.name) and "cache" not in path.parts
    ]
    return found + [f"left behind: {name}" for name in leftovers]


def _call(
    function: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str]
) -> None:
    from kinfolk.errors import KinfolkError

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function(*args)
    except KinfolkError as error:
        sys.exit(f"  in a child: {error}")


def _differ(ours: Any, theirs: Any, where: str, found: list[str]) -> None:
    if isinstance(theirs, torch.Tensor):
        same = (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and _bytes(ours) == _bytes(theirs)
        )
    elif isinstance(theirs, dict):
        same = list(ours) == list(theirs)
        for key in theirs if same else ():
            _differ(ours[key], theirs[key], f"{where}.{key}", found)
    elif isinstance(theirs, list | tuple):
        same = len(ours) == len(theirs)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True) if same else ()):
            _differ(one, other, f"{where}[{number}]", found)
    else:
        same = json.dumps(ours, default=str) == json.dumps(theirs, default=str)
    if not same:
        found.append(where)


def _bytes(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )
