"""Decoding in worker processes; the results come in the order of the files."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from kinfolk.data.decode import Place, Read
from kinfolk.errors import KinfolkError

_CHUNK = 16
_CRASHED = Read(0, 0, "", 0, 0, None, "the decoder crashed on this file")


def default_workers() -> int:
    """As many as this process may use processors, at most 32."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return min(count, 32)


def read_files(paths: Sequence[Place], height: int, width: int, pixel_cap: int, workers: int) -> Iterator[Read]:
    """Each file read and decoded, by `workers` processes. A file on which its worker dies is refused; the others are not affected."""
    local, all_workers, closing = threading.local(), list[_Worker](), threading.Event()

    def start() -> None:
        local.worker = _Worker(height, width, pixel_cap, closing)
        all_workers.append(local.worker)

    def read(chunk: Sequence[Place]) -> list[Read]:
        if not hasattr(local, "worker"):
            start()
        worker: _Worker = local.worker
        return worker.read(chunk)

    chunks = (paths[begin : begin + _CHUNK] for begin in range(0, len(paths), _CHUNK))
    pool = ThreadPoolExecutor(workers)
    pending: deque[Future[list[Read]]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(read, chunk))
            if len(pending) > 3 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        closing.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in all_workers:
            worker.stop()
        pool.shutdown(wait=True)
        for worker in all_workers:
            worker.stop()


@final
class _Worker:
    """One worker process, used by one thread; started again when it dies."""

    def __init__(self, height: int, width: int, pixel_cap: int, closing: threading.Event) -> None:
        self._setting = json.dumps([[entry for entry in sys.path if entry], height, width, pixel_cap])
        self._closing = closing
        self._start()

    def read(self, paths: Sequence[Place]) -> list[Read]:
        try:
            return self._ask(paths)
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closing.is_set():
                return []
            self.stop()
            self._start()
            if len(paths) == 1:
                return [_CRASHED]
            return [read for path in paths for read in self.read([path])]

    def stop(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                pipe.close()
        self._errors.close()

    def _start(self) -> None:
        program = Path(__file__).with_name("decode_worker.py")
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop; decoders write warnings there, which would spoil the progress bar
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(program), self._setting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n" and not self._closing.is_set():
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.stop()
            raise KinfolkError(f"a decoding worker did not start: {lines[-1] if lines else 'no message'}; `workers=0` does without")

    def _ask(self, paths: Sequence[Place]) -> list[Read]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(list(paths), self._process.stdin)
        self._process.stdin.flush()
        return [Read(*answer) for answer in pickle.load(self._process.stdout)]
