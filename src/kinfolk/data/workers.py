"""Decoding in worker processes; results are returned in the order of the files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kinfolk.data import decode
from kinfolk.data.decode import Place, Read, read_file, strict_pillow
from kinfolk.errors import KinfolkError

_CHUNK = 16
_CRASHED = Read(0, 0, reason="the decoder crashed on this file")
_PROGRAM = decode.__file__
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " runpy.run_path(sys.argv[1], run_name='__main__')"
)


def default_workers() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1, 32)


def read_files(
    places: Sequence[Place], height: int, width: int, pixel_cap: int, workers: int
) -> Iterator[Read]:
    """Decodes in `workers` processes. A file that crashes its worker is refused."""
    pool = DecodePool(height, width, pixel_cap, workers, digests=True)
    step = 4 * _CHUNK * workers
    ahead = ThreadPoolExecutor(1, "kinfolk-ahead")
    try:
        reading = ahead.submit(pool.read, places[:step])
        for start in range(step, len(places) + step, step):
            rows, reads = reading.result()
            reading = ahead.submit(pool.read, places[start : start + step])
            for row, read in zip(rows, reads, strict=True):
                yield read if read.reason is not None else read._replace(pixels=np.array(row))
    finally:
        pool.close()
        ahead.shutdown(wait=True, cancel_futures=True)


@final
class DecodePool:
    """Persistent worker processes; `read` may be called from several threads at once. Workers write
    pixels to a file in memory that this process maps. With 0 `workers` this process decodes."""

    def __init__(
        self, height: int, width: int, pixel_cap: int, workers: int, digests: bool = False
    ) -> None:
        self.height, self.width, self.workers = height, width, workers
        self._setting = height, width, pixel_cap, digests
        self._closing, self._idle = threading.Event(), deque[_Worker]()
        self._threads = ThreadPoolExecutor(max(1, workers), "kinfolk-decode")
        self._boards: list[_SharedRows] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._closing, self._idle, self._boards)

    def read(self, places: Sequence[Place]) -> tuple[npt.NDArray[np.uint8], list[Read]]:
        """(B, H, W, 3) pixels, arbitrary in the rows of refused images, and the result for each
        image. The memory of the pixels is reused as soon as nothing refers to them."""
        if not self.workers:
            return self._read_here(places)
        board = self._board(len(places))
        rows = board.rows[: len(places)]
        weakref.finalize(rows, board.release).atexit = False
        chunk = min(_CHUNK, max(1, len(places) // (2 * self.workers)))
        parts = [
            self._threads.submit(self._chunk, places[start : start + chunk], board.path, start)
            for start in range(0, len(places), chunk)
        ]
        return rows, [read for part in parts for read in part.result()]

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._finalizer()

    def _chunk(self, places: Sequence[Place], board: str, first: int) -> list[Read]:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._setting, self._closing)
        reads = worker.read(places, board, first)
        self._idle.append(worker)
        return reads

    def _read_here(self, places: Sequence[Place]) -> tuple[npt.NDArray[np.uint8], list[Read]]:
        with strict_pillow():
            reads = [read_file(place, *self._setting) for place in places]
        rows = np.zeros((len(places), self.height, self.width, 3), dtype=np.uint8)
        for row, read in zip(rows, reads, strict=True):
            if read.pixels is not None:
                row[:] = read.pixels
        return rows, reads

    def _board(self, rows: int) -> _SharedRows:
        with self._lock:
            free = (board for board in self._boards if board.free and len(board.rows) >= rows)
            if (found := next(free, None)) is None:
                found = _SharedRows(rows, self.height, self.width)
                self._boards.append(found)
            found.free = False
            return found


class _SharedRows:
    """A file with a row for each image, shared with the workers: on Linux in memory and without a
    name, so that it is freed however this process ends."""

    def __init__(self, rows: int, height: int, width: int) -> None:
        shape = max(1, rows), height, width, 3
        self._is_named = not hasattr(os, "memfd_create")
        if self._is_named:
            self._handle, self.path = tempfile.mkstemp(prefix="kinfolk-")
        else:
            self._handle = os.memfd_create("kinfolk")
            self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        os.truncate(self._handle, math.prod(shape))
        self.rows = np.memmap(self.path, dtype=np.uint8, mode="r+", shape=shape)
        self.free = True

    def release(self) -> None:
        self.free = True

    def close(self) -> None:
        os.close(self._handle)
        if self._is_named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _end(closing: threading.Event, idle: deque[_Worker], boards: list[_SharedRows]) -> None:
    closing.set()
    while idle:
        idle.pop().stop()
    for board in boards:
        board.close()


@final
class _Worker:
    def __init__(self, setting: tuple[int, ...], closing: threading.Event) -> None:
        self._setting, self._closing = json.dumps(setting), closing
        self._start()

    def read(self, places: Sequence[Place], board: str, first: int) -> list[Read]:
        try:
            return self._ask(places, board, first)
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closing.is_set():
                return [_CRASHED] * len(places)
            self.stop()
            self._start()
            if len(places) == 1:
                return [_CRASHED]
            singly = (self.read([place], board, row) for row, place in enumerate(places, first))
            return [read for reads in singly for read in reads]

    def stop(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent bytes for a process that has ended
                pipe.close()
        self._errors.close()

    def _start(self) -> None:
        paths = json.dumps([entry for entry in sys.path if entry])
        # closed by stop; decoders write warnings there, which would spoil the progress bar
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, _PROGRAM, paths, self._setting],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n" and not self._closing.is_set():
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.stop()
            raise KinfolkError(
                f"a decoding worker did not start: {lines[-1] if lines else 'no message'}; use"
                " `workers=0` to decode in the main process"
            )

    def _ask(self, places: Sequence[Place], board: str, first: int) -> list[Read]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((list(places), board, first), self._process.stdin)
        self._process.stdin.flush()
        return [Read(*answer) for answer in pickle.load(self._process.stdout)]
