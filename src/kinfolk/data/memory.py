"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes that this process can still take: what the system reports, or less where a control group limits it."""
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
        return int(limit) - int((folder / "memory.current").read_text()) if limit != "max" else 1 << 62
    except (OSError, ValueError):
        return 1 << 62
