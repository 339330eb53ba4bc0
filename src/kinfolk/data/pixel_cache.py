"""Decoded pixels, in memory or in a cache folder that a later run finds again.

In a cache folder `index.json` names a pixel file, its checksums and a table of samples. It is
written last, and holds digests of the small files and of itself; pixels have a checksum for each
64 KiB. A small cache is verified when it is opened, each part of a large one when it is first
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kinfolk.data.sample_table import Samples
from kinfolk.data.source import Refusals
from kinfolk.errors import KinfolkError
from kinfolk.files import (
    UNFINISHED,
    DamagedFileError,
    explain_write_errors,
    is_running,
    move_into_place,
    read_sealed_text,
    write_atomically,
    write_sealed_text,
)

_CHUNK = 1 << 16
_LONG_AGO = 3600.0
_VERSION = 3
_VERIFIED_AT_ONCE = 1 << 30


def available_memory() -> int:
    """Bytes of memory that the system, and a control group, still allow."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (free,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        free = 4 << 30
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" if there is none
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


@final
class MemoryStore:
    """Rows in memory."""

    def __init__(self, rows: int, height: int, width: int) -> None:
        self._array = np.empty((rows, height, width, 3), dtype=np.uint8)
        self.rows = 0

    def add(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._array[self.rows] = pixels
        self.rows += 1

    def finish(self) -> Tensor:
        return torch.from_numpy(self._array[: self.rows])

    def abandon(self) -> None:
        pass


@final
class FileStore:
    """Rows appended to a file, which gets its name when it is finished. It is written, not mapped,
    so that a full disk is an error and not a crash. `checksums`: CRC-32 of every `chunk` rows."""

    def __init__(self, folder: Path | None, rows: int, height: int, width: int) -> None:
        self._shape, self.rows = (height, width), 0
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(folder)
        needed, free = rows * height * width * 3, shutil.disk_usage(folder).free
        if needed > free:
            raise KinfolkError(
                f"the pixel cache needs {needed / 1e9:.1f} GB and `{folder}` has {free / 1e9:.1f}"
                " GB; give another `cache_dir` or a smaller image size"
            )
        self.path = folder / f"kinfolk-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.part"
        self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close_as, finish or abandon
        self.chunk = max(1, _CHUNK // (height * width * 3))
        self.checksums: list[int] = []

    def add(self, pixels: npt.NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(pixels).data
        try:
            self._file.write(data)
        except OSError as error:
            self.abandon()
            raise KinfolkError(
                f"the pixel cache in `{self.path.parent}` can't be written: {error.strerror}; give"
                " another `cache_dir`"
            ) from error
        before = self.checksums.pop() if self.rows % self.chunk else 0
        self.checksums.append(zlib.crc32(data, before))
        self.rows += 1

    def close_as(self, target: Path) -> tuple[int, int, int]:
        """Flushes the file to disk and gives it its name; returns (rows, height, width)."""
        with explain_write_errors(target):
            self._file.close()
            move_into_place(self.path, target)
        return self.rows, *self._shape

    def finish(self) -> Tensor:
        """The rows, mapped from a file without a name that disappears with them."""
        self._file.close()
        cache = map_pixels(self.path, self.rows, *self._shape)
        if os.name == "posix":
            self.path.unlink()
        return cache

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        self.path.unlink(missing_ok=True)


def _remove_left_behind(folder: Path) -> None:
    prefix = f"kinfolk-{_host()}-"
    for path in folder.glob(f"{prefix}*.part"):
        pid = path.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not is_running(int(pid)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LONG_AGO:
                path.unlink()


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum()) or "host"


@final
class Verify:
    """Compares mapped pixels with their checksums when they are first read."""

    def __init__(
        self, path: Path, cache: Tensor, rows: int, checksums: npt.NDArray[np.uint32]
    ) -> None:
        self.path, self._array, self._rows, self._checksums = path, cache.numpy(), rows, checksums
        self._good = np.zeros(len(checksums), dtype=bool)

    def __call__(self, rows: Tensor) -> None:
        chunks = np.unique(rows.numpy() // self._rows)
        for chunk in chunks[~self._good[chunks]].tolist():
            start = chunk * self._rows
            if zlib.crc32(self._array[start : start + self._rows].data) != self._checksums[chunk]:
                raise DamagedFileError(
                    f"the pixel cache {self.path} is damaged around image {start}; remove the"
                    f" folder {self.path.parent} and start again (with --resume in a run): the"
                    " images are then read again"
                )
            self._good[chunk] = True


def map_pixels(path: Path, rows: int, height: int, width: int) -> Tensor:
    """A finished file as a tensor (rows, H, W, 3), read only."""
    if path.stat().st_size != rows * height * width * 3:
        raise OSError(f"{path} has not the size of {rows} images of {height} x {width}")
    array = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, height, width, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


@dataclass(frozen=True)
class Contents:
    """One row per decoded image; (path, reason) of what the source refused; (path, reason, size,
    time of modification) of what the decoder refused."""

    samples: Samples
    unread: Refusals
    refused: list[tuple[str, str, int, int]]


@final
class CacheFolder:
    """The folder below `root` for one combination of source, size and pixel cap."""

    def __init__(self, root: str | Path, **setting: int | str) -> None:
        name = _digest(json.dumps([_VERSION, setting], sort_keys=True).encode())[:16]
        self.path = Path(root) / f"pixels-{name}"
        self.verify: Verify | None = None

    def find(self, agrees: Callable[[Contents], bool]) -> tuple[Contents, Tensor] | None:
        """The contents and the mapped pixels, if the cache is complete and `agrees` accepts
        them."""
        try:
            index = _read_index(self.path)
            cache, verify = _map(self.path, index)
            table = self.path / index["samples"]
            if _digest(table.read_bytes()) != index["digests"]["samples"]:
                return None
            samples = Samples.read(table)
            if cache.nbytes <= _VERIFIED_AT_ONCE:
                verify(torch.arange(0, len(cache), int(index["chunk"])))
        except (KinfolkError, OSError, ValueError, KeyError, TypeError):
            return None  # missing, cut short or damaged
        unread, refused = ([tuple(row) for row in index[kind]] for kind in ("unread", "refused"))
        contents = Contents(samples, unread, refused)
        if len(samples) != len(cache) or not agrees(contents):
            return None
        self.verify = verify
        return contents, cache

    def publish(self, store: FileStore, contents: Contents) -> Tensor:
        content = _digest("".join(contents.samples.digests).encode())[:16]
        kinds = {"pixels": "u8", "samples": "parquet", "checksums": "crc32"}
        names = {name: f"{content}.{kind}" for name, kind in kinds.items()}
        shape = store.close_as(self.path / names["pixels"])
        checksums = np.array(store.checksums, dtype="<u4").tobytes()
        write_atomically(self.path / names["checksums"], lambda file: file.write(checksums))
        contents.samples.to_parquet(self.path / names["samples"])
        small = ("samples", "checksums")
        digests = {name: _digest((self.path / names[name]).read_bytes()) for name in small}
        index = {**names, "shape": shape, "chunk": store.chunk, "digests": digests}
        index |= {"unread": contents.unread, "refused": contents.refused}
        write_sealed_text(self.path / "index.json", json.dumps(index))
        for name in names.values():
            for old in self.path.glob(f"*{Path(name).suffix}"):
                if old.name != name:
                    old.unlink(missing_ok=True)
        cache, self.verify = _map(self.path, index)
        return cache


def map_cache(folder: Path) -> tuple[Tensor, Verify]:
    return _map(folder, _read_index(folder))


def _map(folder: Path, index: dict[str, Any]) -> tuple[Tensor, Verify]:
    pixels, file = folder / index["pixels"], folder / index["checksums"]
    cache, checksums = map_pixels(pixels, *index["shape"]), file.read_bytes()
    if _digest(checksums) != index["digests"]["checksums"]:
        raise DamagedFileError(f"{file} is damaged: its bytes do not match its digest")
    return cache, Verify(pixels, cache, int(index["chunk"]), np.frombuffer(checksums, dtype="<u4"))


def _read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(read_sealed_text(folder / "index.json"))
    return index


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
