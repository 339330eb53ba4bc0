"""Where pixels are put while they are decoded: in memory, or in a file when they would take too much of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kinfolk.errors import KinfolkError
from kinfolk.files import UNFINISHED, telling

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
        """Nothing is left behind in memory."""


@final
class FileStore:
    """Rows appended to a file, which is not there under its name before it is finished.

    Written and not mapped while it grows: a full disk is then an error message and not a crash.
    """

    def __init__(self, folder: Path | None, rows: int, height: int, width: int) -> None:
        self._shape, self.rows = (height, width), 0
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        needed, free = rows * height * width * 3, shutil.disk_usage(folder).free
        if needed > free:
            sizes = f"needs {needed / 1e9:.1f} GB and `{folder}` has {free / 1e9:.1f} GB"
            raise KinfolkError(f"the pixel cache {sizes}; give another `cache_dir` or a smaller image size")
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
                f"the pixel cache in `{self.path.parent}` can't be written: {error.strerror}; give another `cache_dir`"
            ) from error
        self.checksums.add(data)
        self.rows += 1

    def close_as(self, target: Path) -> tuple[int, int, int]:
        """Makes sure that all is on the disk, and gives the file its name; returns (rows, height, width)."""
        with telling(target):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.path, target)
        return self.rows, *self._shape

    def finish(self) -> Tensor:
        """The rows, from a file that nobody else will find; it is gone when they are let go of."""
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
    """CRC-32 of each `rows` rows that are added."""

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
        """Of all chunks; the last may be shorter."""
        return np.array([*self._done, *([self._last] if self._added % self.rows else [])], dtype="<u4")


@final
class Verify:
    """Compares pixels with their checksums when they are first asked for.

    Args:
        path: of the file, for messages.
        cache: (R, H, W, 3) uint8, mapped.
        rows: of a chunk.
        checksums: CRC-32 of each chunk.
    """

    def __init__(self, path: Path, cache: Tensor, rows: int, checksums: npt.NDArray[np.uint32]) -> None:
        self.path, self._array, self._rows, self._checksums = path, cache.numpy(), rows, checksums
        self._good = np.zeros(len(checksums), dtype=bool)

    def __call__(self, rows: Tensor) -> None:
        """Raises if the chunk of any of these rows is not as it was written."""
        chunks = np.unique(rows.numpy() // self._rows)
        for chunk in chunks[~self._good[chunks]].tolist():
            start = chunk * self._rows
            if zlib.crc32(self._array[start : start + self._rows].data) != self._checksums[chunk]:
                raise KinfolkError(
                    f"the pixel cache {self.path} is damaged around image {start}; remove the folder {self.path.parent} and start again "
                    "(with --resume in a run): the images are then read anew"
                )
            self._good[chunk] = True

    def all(self) -> bool:
        """Whether all is as it was written."""
        try:
            self(torch.arange(0, len(self._array), self._rows))
        except KinfolkError:
            return False
        return True


def chunk_rows(row_bytes: int) -> int:
    """Rows of a chunk: about 64 KiB, so that looking at one image does not mean reading many."""
    return max(1, _CHUNK // max(1, row_bytes))


def map_pixels(path: Path, rows: int, height: int, width: int) -> Tensor:
    """A finished file as a tensor (rows, H, W, 3). Read only, so that several processes share the pages."""
    if path.stat().st_size != rows * height * width * 3:
        raise OSError(f"{path} has not the size of {rows} images of {height} x {width}")
    array = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, height, width, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


def _sweep(folder: Path) -> None:
    """Removes what killed processes of this machine left half-written."""
    for path in folder.glob(f"kinfolk-{_host()}-*.part"):
        pid = path.name[len(f"kinfolk-{_host()}-") :].split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not _is_running(int(pid)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LONG_AGO:
                path.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum()) or "host"
