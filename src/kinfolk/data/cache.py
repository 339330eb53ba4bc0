"""A cache of decoded pixels in a folder, which a later run finds again.

`index.json` names a pixel file, its checksums and a table of samples. All are written beside their place and renamed, the index last, so a
half-written cache is never picked up. The index holds the digests of the other two small files and one of itself; pixels have a checksum
for each 64 KiB. All of a small cache is verified when it is opened, and a damaged one is written anew; of a large one each part is
verified when it is first read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from kinfolk.data.pixel_store import FileStore, Verify, map_pixels
from kinfolk.data.samples import Samples
from kinfolk.errors import KinfolkError
from kinfolk.files import DamagedFileError, write_atomically, write_text

_VERSION = 2
_VERIFIED_AT_ONCE = 1 << 30


@dataclass(frozen=True)
class Contents:
    """What a finished cache holds.

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
    """The place below `root` for one setting (source, size, cap)."""

    def __init__(self, root: str | Path, **setting: int | str) -> None:
        name = hashlib.blake2b(json.dumps([_VERSION, setting], sort_keys=True).encode(), digest_size=8).hexdigest()
        self.path = Path(root) / f"pixels-{name}"
        self.verify: Verify | None = None

    def find(self, agrees: Callable[[Contents], bool]) -> tuple[Contents, Tensor] | None:
        """What is there, with the pixels (R, H, W, 3) memory-mapped, if it is complete and `agrees` says that it belongs here."""
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
        """Makes a filled store the cache, in place of what was there."""
        old = self._index()
        content = hashlib.blake2b("".join(contents.samples.digests).encode(), digest_size=8).hexdigest()
        names = {"pixels": f"{content}.u8", "samples": f"{content}.parquet", "checksums": f"{content}.crc32"}
        shape = store.close_as(self.path / names["pixels"])
        checksums = store.checksums.values().tobytes()
        write_atomically(self.path / names["checksums"], lambda file: file.write(checksums))
        contents.samples.to_parquet(self.path / names["samples"])
        digests = {name: _digest((self.path / names[name]).read_bytes()) for name in ("samples", "checksums")}
        index = {**names, "shape": shape, "chunk": store.checksums.rows, "digests": digests}
        index |= {"unread": contents.unread, "refused": contents.refused}
        write_text(self.path / "index.json", json.dumps({"digest": _digest(json.dumps(index).encode()), **index}))
        for name in {old[kind] for kind in names} - set(names.values()) if old is not None else ():
            (self.path / name).unlink(missing_ok=True)
        cache = map_pixels(self.path / names["pixels"], *shape)
        self.verify = _verify(self.path, index, cache)
        return cache

    def _index(self) -> dict[str, Any] | None:
        return _index_of(self.path)


def map_cache(folder: Path) -> tuple[Tensor, Verify] | None:
    """The pixels (R, H, W, 3) of a complete cache, memory-mapped, and what verifies each part of them when it is first read; None where
    there is none."""
    index = _index_of(folder)
    if index is None:
        return None
    cache = map_pixels(folder / index["pixels"], *index["shape"])
    return cache, _verify(folder, index, cache)


def _verify(folder: Path, index: dict[str, Any], cache: Tensor) -> Verify:
    checksums = (folder / index["checksums"]).read_bytes()
    if _digest(checksums) != index["digests"]["checksums"]:
        raise DamagedFileError(f"{folder / index['checksums']} is damaged: its bytes do not match its digest")
    return Verify(folder / index["pixels"], cache, int(index["chunk"]), np.frombuffer(checksums, dtype="<u4"))


def _index_of(folder: Path) -> dict[str, Any] | None:
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        digest = index.pop("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return index if digest == _digest(json.dumps(index).encode()) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
