"""Decoding in worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

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
    """In the order of `places`. A file that crashes its worker is refused."""
    pool = DecodePool(height, width, pixel_cap, workers, digests=True)
    ahead: deque[Future[list[Read]]] = deque()
    try:
        for start in range(0, len(places), _CHUNK):
            ahead.append(pool.submit(places[start : start + _CHUNK]))
            if len(ahead) > 4 * workers:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        pool.close()


@final
class DecodePool:
    """Persistent worker processes; with 0 `workers` this process decodes. `read` may be called from
    several threads at once."""

    def __init__(
        self, height: int, width: int, pixel_cap: int, workers: int, digests: bool = False
    ) -> None:
        self.workers, self._setting = workers, (height, width, pixel_cap, digests)
        self._closing, self._idle = threading.Event(), deque[_Worker]()
        self._threads = ThreadPoolExecutor(max(1, workers), "kinfolk-decode")
        self._finalizer = weakref.finalize(self, _end, self._closing, self._idle)

    def read(self, places: Sequence[Place]) -> list[Read]:
        chunk = min(_CHUNK, max(1, len(places) // (2 * max(1, self.workers))))
        starts = range(0, len(places), chunk)
        parts = [self.submit(places[start : start + chunk]) for start in starts]
        return [read for part in parts for read in part.result()]

    def submit(self, places: Sequence[Place]) -> Future[list[Read]]:
        return self._threads.submit(self._read, places)

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._finalizer()

    def _read(self, places: Sequence[Place]) -> list[Read]:
        if not self.workers:
            with strict_pillow():
                return [read_file(place, *self._setting) for place in places]
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._setting, self._closing)
        reads = worker.read(places)
        self._idle.append(worker)
        return reads


def _end(closing: threading.Event, idle: deque[_Worker]) -> None:
    closing.set()
    while idle:
        idle.pop().stop()


@final
class _Worker:
    def __init__(self, setting: tuple[int, ...], closing: threading.Event) -> None:
        self._setting, self._closing = json.dumps(setting), closing
        self._start()

    def read(self, places: Sequence[Place]) -> list[Read]:
        try:
            return self._ask(places)
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closing.is_set():
                return [_CRASHED] * len(places)
            self.stop()
            self._start()
            if len(places) == 1:
                return [_CRASHED]
            return [read for place in places for read in self.read([place])]

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

    def _ask(self, places: Sequence[Place]) -> list[Read]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(list(places), self._process.stdin)
        self._process.stdin.flush()
        return [Read(*answer) for answer in pickle.load(self._process.stdout)]
