"""Patterns for many files, as webdataset writes them: `shards/{000..331}.tar`, `shards/*.tar`."""

from __future__ import annotations

import glob
import re
from pathlib import Path

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(pattern: str) -> list[Path]:
    """The `.tar` files a pattern names, in order; none where it is no pattern. A file of a range need not exist: it is missed later, by
    name."""
    if not pattern.lower().endswith(".tar"):
        return []
    if (found := _RANGE.search(pattern)) is not None:
        first, last = found.groups()
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        names = [pattern[: found.start()] + number + pattern[found.end() :] for number in numbers]
        return [path for name in names for path in (expand(name) if _RANGE.search(name) else [Path(name)])]
    return [Path(name) for name in sorted(glob.glob(pattern))] if "*" in pattern or "?" in pattern else []
