"""A cache of decoded pixels in a folder, which a later run finds again.

`index.json` names a pixel file and a table of samples. All are written beside their place and renamed, the index last, so a half-written
cache is never picked up.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from kinfolk.data.pixel_store import FileStore, map_pixels
from kinfolk.data.samples import Samples
from kinfolk.errors import KinfolkError

_VERSION = 1


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

    def find(self, agrees: Callable[[Contents], bool]) -> tuple[Contents, Tensor] | None:
        """What is there, with the pixels (R, H, W, 3) memory-mapped, if it is complete and `agrees` says that it belongs here."""
        index = self._index()
        if index is None:
            return None
        try:
            cache = map_pixels(self.path / index["pixels"], *index["shape"])
            samples = Samples.read(self.path / index["samples"])
        except (KinfolkError, OSError, ValueError):  # missing or cut short
            return None
        refused = [(path, reason, size, time) for path, reason, size, time in index["refused"]]
        contents = Contents(samples, [(path, reason) for path, reason in index["unread"]], refused)
        return (contents, cache) if len(samples) == len(cache) and agrees(contents) else None

    def publish(self, store: FileStore, contents: Contents) -> Tensor:
        """Makes a filled store the cache, in place of what was there."""
        old = self._index()
        content = hashlib.blake2b("".join(contents.samples.digests).encode(), digest_size=8).hexdigest()
        names = {"pixels": f"{content}.u8", "samples": f"{content}.parquet"}
        shape = store.close_as(self.path / names["pixels"])
        draft = store.path.with_suffix(".parquet.part")
        contents.samples.to_parquet(draft)
        os.replace(draft, self.path / names["samples"])
        index = {**names, "shape": shape, "unread": contents.unread, "refused": contents.refused}
        draft = store.path.with_suffix(".json.part")
        draft.write_text(json.dumps(index), encoding="utf-8")
        os.replace(draft, self.path / "index.json")
        for name in {old[kind] for kind in names} - set(names.values()) if old is not None else ():
            (self.path / name).unlink(missing_ok=True)
        return map_pixels(self.path / names["pixels"], *shape)

    def _index(self) -> dict[str, Any] | None:
        return _index_of(self.path)


def map_cache(folder: Path) -> Tensor | None:
    """The pixels (R, H, W, 3) of a complete cache, memory-mapped; None where there is none."""
    index = _index_of(folder)
    return None if index is None else map_pixels(folder / index["pixels"], *index["shape"])


def _index_of(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) and index.keys() >= {"pixels", "samples", "shape", "unread", "refused"} else None
