"""Decoded pixels, in memory or in a cache folder that a later run finds again.

In a cache folder `index.json` names a pixel file, its checksums and a table of samples. All are
written under temporary names and renamed, the index last, so a half-written cache is never used.
The index holds digests of the two small files and of itself; pixels have a checksum for each 64
KiB. A small cache is verified completely when it is opened, and written again if it is damaged;
each part of a large one is verified when it is first read.
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
from kinfolk.errors import KinfolkError
from kinfolk.files import (
    UNFINISHED,
    DamagedFileError,
    explain_write_errors,
    is_running,
    move_into_place,
    write_atomically,
    write_text,
)


def available_memory() -> int:
    """Bytes of memory this process can still use: what the system reports, or less if a control
    group limits it."""
    return min(_of_system(), _of_group(Path("/sys/fs/cgroup")))


def _of_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def _of_group(folder: Path) -> int:
    try:
        limit = (folder / "memory.max").read_text().strip()
        return (
            int(limit) - int((folder / "memory.current").read_text()) if limit != "max" else 1 << 62
        )
    except (OSError, ValueError):
        return 1 << 62


_CHUNK = 1 << 16
_LONG_AGO = 3600.0


@final
class MemoryStore:
    """Rows in memory."""

    def __init__(self, rows: int, height: int, width: int) -> None:
        self._cache = torch.empty((rows, height, width, 3), dtype=torch.uint8)
        self._array = self._cache.numpy()
        self.rows = 0

    def add(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Appends one image (H, W, 3)."""
        self._array[self.rows] = pixels
        self.rows += 1

    def finish(self) -> Tensor:
        """The rows that were added."""
        return self._cache[: self.rows]

    def abandon(self) -> None:
        """Does nothing: memory needs no cleaning up."""


@final
class FileStore:
    """Rows appended to a file, which gets its name only when it is finished.

    The file is written instead of mapped while it grows, so that a full disk causes an error
    message and not a crash.
    """

    def __init__(self, folder: Path | None, rows: int, height: int, width: int) -> None:
        self._shape, self.rows = (height, width), 0
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        needed, free = rows * height * width * 3, shutil.disk_usage(folder).free
        if needed > free:
            sizes = f"needs {needed / 1e9:.1f} GB and `{folder}` has {free / 1e9:.1f} GB"
            raise KinfolkError(
                f"the pixel cache {sizes}; give another `cache_dir` or a smaller image size"
            )
        self.path = folder / f"kinfolk-{_host()}-{os.getpid()}-{secrets.token_hex(4)}.part"
        self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close_as, finish or abandon
        self.checksums = Checksums(chunk_rows(height * width * 3))

    def add(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Appends one image (H, W, 3)."""
        data = np.ascontiguousarray(pixels).data
        try:
            self._file.write(data)
        except OSError as error:
            self.abandon()
            raise KinfolkError(
                f"the pixel cache in `{self.path.parent}` can't be written: {error.strerror}; give"
                " another `cache_dir`"
            ) from error
        self.checksums.add(data)
        self.rows += 1

    def close_as(self, target: Path) -> tuple[int, int, int]:
        """Flushes the file to disk and gives it its name; returns (rows, height, width)."""
        with explain_write_errors(target):
            self._file.close()
            move_into_place(self.path, target)
        return self.rows, *self._shape

    def finish(self) -> Tensor:
        """The rows, mapped from an anonymous file that disappears when they are released."""
        self._file.close()
        cache = map_pixels(self.path, self.rows, *self._shape)
        if os.name == "posix":  # the mapping outlives the name
            self.path.unlink()
        return cache

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        self.path.unlink(missing_ok=True)


class Checksums:
    """CRC-32 of every chunk of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows, self._added, self._last = rows, 0, 0
        self._done: list[int] = []

    def add(self, data: memoryview) -> None:
        """Appends one row."""
        self._last = zlib.crc32(data, self._last)
        self._added += 1
        if self._added % self.rows == 0:
            self._done.append(self._last)
            self._last = 0

    def values(self) -> npt.NDArray[np.uint32]:
        """The checksums of all chunks; the last chunk may be shorter."""
        return np.array(
            [*self._done, *([self._last] if self._added % self.rows else [])], dtype="<u4"
        )


@final
class Verify:
    """Compares pixels with their checksums when they are first read.

    Args:
        path: of the file, for messages.
        cache: (R, H, W, 3) uint8, mapped.
        rows: of a chunk.
        checksums: CRC-32 of each chunk.
    """

    def __init__(
        self, path: Path, cache: Tensor, rows: int, checksums: npt.NDArray[np.uint32]
    ) -> None:
        self.path, self._array, self._rows, self._checksums = path, cache.numpy(), rows, checksums
        self._good = np.zeros(len(checksums), dtype=bool)

    def __call__(self, rows: Tensor) -> None:
        """Raises if the chunk of any of these rows is damaged."""
        chunks = np.unique(rows.numpy() // self._rows)
        for chunk in chunks[~self._good[chunks]].tolist():
            start = chunk * self._rows
            if zlib.crc32(self._array[start : start + self._rows].data) != self._checksums[chunk]:
                raise KinfolkError(
                    f"the pixel cache {self.path} is damaged around image {start}; remove the"
                    f" folder {self.path.parent} and start again (with --resume in a run): the"
                    " images are then read again"
                )
            self._good[chunk] = True

    def all(self) -> bool:
        """Whether all chunks are intact."""
        try:
            self(torch.arange(0, len(self._array), self._rows))
        except KinfolkError:
            return False
        return True


def chunk_rows(row_bytes: int) -> int:
    """Number of rows in a chunk of about 64 KiB, so that reading one image does not mean reading
    many."""
    return max(1, _CHUNK // max(1, row_bytes))


def map_pixels(path: Path, rows: int, height: int, width: int) -> Tensor:
    """A finished file as a tensor (rows, H, W, 3). Read only, so that several processes share the
    pages."""
    if path.stat().st_size != rows * height * width * 3:
        raise OSError(f"{path} has not the size of {rows} images of {height} x {width}")
    array = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, height, width, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


def _sweep(folder: Path) -> None:
    """Removes half-written files of killed processes of this machine."""
    for path in folder.glob(f"kinfolk-{_host()}-*.part"):
        pid = path.name[len(f"kinfolk-{_host()}-") :].split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not is_running(int(pid)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LONG_AGO:
                path.unlink()


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum()) or "host"


_VERSION = 2
_VERIFIED_AT_ONCE = 1 << 30


@dataclass(frozen=True)
class Contents:
    """The contents of a finished cache.

    Args:
        samples: one row per decoded image.
        unread: (path, reason) refused by the source without being read.
        refused: (path, reason, size, time of modification) refused by the decoder.
    """

    samples: Samples
    unread: list[tuple[str, str]]
    refused: list[tuple[str, str, int, int]]


@final
class CacheFolder:
    """The folder below `root` for one combination of source, size and pixel cap."""

    def __init__(self, root: str | Path, **setting: int | str) -> None:
        name = hashlib.blake2b(
            json.dumps([_VERSION, setting], sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        self.path = Path(root) / f"pixels-{name}"
        self.verify: Verify | None = None

    def find(self, agrees: Callable[[Contents], bool]) -> tuple[Contents, Tensor] | None:
        """The contents and the memory-mapped pixels (R, H, W, 3), if the cache is complete and
        `agrees` accepts its contents."""
        index = self._index()
        if index is None:
            return None
        try:
            cache = map_pixels(self.path / index["pixels"], *index["shape"])
            if _digest((self.path / index["samples"]).read_bytes()) != index["digests"]["samples"]:
                return None
            samples = Samples.read(self.path / index["samples"])
            verify = _verify(self.path, index, cache)
            if cache.nbytes <= _VERIFIED_AT_ONCE and not verify.all():
                return None
        except (KinfolkError, OSError, ValueError):  # missing, cut short or damaged
            return None
        self.verify = verify
        refused = [(path, reason, size, time) for path, reason, size, time in index["refused"]]
        contents = Contents(samples, [(path, reason) for path, reason in index["unread"]], refused)
        return (contents, cache) if len(samples) == len(cache) and agrees(contents) else None

    def publish(self, store: FileStore, contents: Contents) -> Tensor:
        """Replaces the cache by a filled store."""
        old = self._index()
        content = hashlib.blake2b(
            "".join(contents.samples.digests).encode(), digest_size=8
        ).hexdigest()
        names = {
            "pixels": f"{content}.u8",
            "samples": f"{content}.parquet",
            "checksums": f"{content}.crc32",
        }
        shape = store.close_as(self.path / names["pixels"])
        checksums = store.checksums.values().tobytes()
        write_atomically(self.path / names["checksums"], lambda file: file.write(checksums))
        contents.samples.to_parquet(self.path / names["samples"])
        digests = {
            name: _digest((self.path / names[name]).read_bytes())
            for name in ("samples", "checksums")
        }
        index = {**names, "shape": shape, "chunk": store.checksums.rows, "digests": digests}
        index |= {"unread": contents.unread, "refused": contents.refused}
        write_text(
            self.path / "index.json",
            json.dumps({"digest": _digest(json.dumps(index).encode()), **index}),
        )
        for name in {old[kind] for kind in names} - set(names.values()) if old is not None else ():
            (self.path / name).unlink(missing_ok=True)
        cache = map_pixels(self.path / names["pixels"], *shape)
        self.verify = _verify(self.path, index, cache)
        return cache

    def _index(self) -> dict[str, Any] | None:
        return _index_of(self.path)


def map_cache(folder: Path) -> tuple[Tensor, Verify] | None:
    """The memory-mapped pixels (R, H, W, 3) of a complete cache and their `Verify`; None if there
    is no such cache."""
    index = _index_of(folder)
    if index is None:
        return None
    cache = map_pixels(folder / index["pixels"], *index["shape"])
    return cache, _verify(folder, index, cache)


def _verify(folder: Path, index: dict[str, Any], cache: Tensor) -> Verify:
    checksums = (folder / index["checksums"]).read_bytes()
    if _digest(checksums) != index["digests"]["checksums"]:
        raise DamagedFileError(
            f"{folder / index['checksums']} is damaged: its bytes do not match its digest"
        )
    return Verify(
        folder / index["pixels"], cache, int(index["chunk"]), np.frombuffer(checksums, dtype="<u4")
    )


def _index_of(folder: Path) -> dict[str, Any] | None:
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        digest = index.pop("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return index if digest == _digest(json.dumps(index).encode()) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
