"""Decoded pixels, in memory or in a cache folder that a later run finds again.

`index.json`, written last, names the files of pixels and checksums and the table of samples, and
has digests of itself and of the checksums. A small cache is verified when it is opened, an image of
a large one when it is first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kinfolk.data.sample_table import Samples
from kinfolk.data.source import Refusals
from kinfolk.errors import KinfolkError
from kinfolk.files import (
    DamagedFileError,
    explain_write_errors,
    move_into_place,
    read_sealed_text,
    write_atomically,
    write_sealed_text,
)

_VERSION = 4
_VERIFIED_AT_ONCE = 1 << 30
Pixels = npt.NDArray[np.uint8]


def available_memory() -> int:
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
    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self._array = np.empty(shape, dtype=np.uint8)
        self.rows = 0

    def add(self, pixels: Pixels) -> None:
        self._array[self.rows] = pixels
        self.rows += 1

    def finish(self) -> Tensor:
        return torch.from_numpy(self._array[: self.rows])

    def abandon(self) -> None:
        pass


@final
class FileStore:
    """Rows appended to a file in `folder`, or to one without a name. It is written, not mapped, so
    that a full disk is an error and not a crash. `checksums`: CRC-32 of every row."""

    def __init__(self, folder: Path | None, shape: tuple[int, int, int, int]) -> None:
        self._shape, self._folder = shape[1:], folder or Path(tempfile.gettempdir())
        needed, free = int(np.prod(shape)), shutil.disk_usage(self._folder).free
        if needed > free:
            raise KinfolkError(
                f"the pixel cache needs {needed / 1e9:.1f} GB and `{self._folder}` has"
                f" {free / 1e9:.1f} GB; give another `cache_dir` or a smaller image size"
            )
        self.path = None if folder is None else folder / f"pixels-{secrets.token_hex(4)}.part"
        # closed by close_as, finish or abandon
        self._file: Any = (
            tempfile.TemporaryFile() if self.path is None else open(self.path, "wb")  # noqa: SIM115
        )
        self.checksums: list[int] = []

    def add(self, pixels: Pixels) -> None:
        data = np.ascontiguousarray(pixels).data
        with explain_write_errors(self.path or self._folder):
            self._file.write(data)
        self.checksums.append(zlib.crc32(data))

    def close_as(self, target: Path) -> tuple[int, ...]:
        """Returns the shape of the pixels."""
        assert self.path is not None
        with explain_write_errors(target):
            self._file.close()
            move_into_place(self.path, target)
        return len(self.checksums), *self._shape

    def finish(self) -> Tensor:
        self._file.flush()
        cache = map_pixels(self._file, (len(self.checksums), *self._shape))
        self._file.close()
        return cache

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@final
class Verify:
    def __init__(self, path: Path, cache: Tensor, checksums: npt.NDArray[np.uint32]) -> None:
        self.path, self._array, self._checksums = path, cache.numpy(), checksums
        self._good = np.zeros(len(checksums), dtype=bool)

    def __call__(self, rows: Tensor) -> None:
        unread = np.unique(rows.numpy())
        for row in unread[~self._good[unread]].tolist():
            if zlib.crc32(self._array[row].data) != self._checksums[row]:
                raise DamagedFileError(
                    f"the pixel cache {self.path} is damaged at image {row}; remove the folder"
                    f" {self.path.parent} and start again (with --resume in a run)"
                )
            self._good[row] = True


def map_pixels(file: Any, shape: tuple[int, ...]) -> Tensor:
    array = np.memmap(file, dtype=np.uint8, mode="r", shape=shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


class Contents(NamedTuple):
    """One row per decoded image; what the decoder refused; the pixels."""

    samples: Samples
    refused: Refusals
    pixels: Tensor


@final
class CacheFolder:
    """The folder for one combination of source, size and pixel cap; `state`: of the source."""

    def __init__(self, root: str | Path, state: str, **setting: int | str) -> None:
        name = _digest(json.dumps([_VERSION, setting], sort_keys=True).encode())[:16]
        self.path, self.state = Path(root) / f"pixels-{name}", state
        self.verify: Verify | None = None

    def find(self) -> Contents | None:
        try:
            index = _read_index(self.path)
            cache, verify = _map(self.path, index)
            samples = Samples.open(self.path / f"{index['name']}.arrow")
            if index["state"] != self.state or len(samples) != len(cache):
                return None
            if cache.nbytes <= _VERIFIED_AT_ONCE:
                verify(torch.arange(len(cache)))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # missing, cut short or damaged
        self.verify = verify
        return Contents(samples, [(path, reason) for path, reason in index["refused"]], cache)

    def publish(self, store: FileStore, samples: Samples, refused: Refusals) -> Contents:
        table = samples.map_from_file(self.path).file
        assert table is not None
        shape = store.close_as(table.with_suffix(".u8"))
        checksums = np.array(store.checksums, dtype="<u4").tobytes()
        write_atomically(table.with_suffix(".crc32"), lambda file: file.write(checksums))
        index = {"name": table.stem, "shape": shape, "checksums": _digest(checksums)}
        index |= {"refused": refused, "state": self.state}
        write_sealed_text(self.path / "index.json", json.dumps(index))
        for old in (*self.path.glob("*.u8"), *self.path.glob("*.crc32"), *self.path.glob("*.part")):
            if old.stem != table.stem:
                old.unlink(missing_ok=True)
        cache, self.verify = _map(self.path, index)
        return Contents(samples, refused, cache)


def map_cache(folder: Path) -> tuple[Tensor, Verify]:
    return _map(folder, _read_index(folder))


def _map(folder: Path, index: dict[str, Any]) -> tuple[Tensor, Verify]:
    path, file = (folder / f"{index['name']}.{kind}" for kind in ("u8", "crc32"))
    if path.stat().st_size != np.prod(index["shape"]):
        raise DamagedFileError(f"{path} does not have the size of its images")
    cache, checksums = map_pixels(path, tuple(index["shape"])), file.read_bytes()
    if _digest(checksums) != index["checksums"]:
        raise DamagedFileError(f"{file} is damaged: its bytes do not match its digest")
    return cache, Verify(path, cache, np.frombuffer(checksums, dtype="<u4"))


def _read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(read_sealed_text(folder / "index.json"))
    return index


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
