"""Interleaved timing, so that a noisy machine is noisy for all that is compared; and the memory of
the process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def interleaved(
    runs: Mapping[str, Callable[[], object]], repetitions: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn; the first round warms up and is not counted. A run is
    repeated within a turn until `seconds` have passed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            calls, start = 0, time.perf_counter()
            while calls == 0 or time.perf_counter() - start < seconds:
                run()
                calls += 1
            if repetition:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def verdict(ratio: float, wanted: float) -> str:
    return f"{'within' if ratio <= wanted else 'ABOVE'} the limit {wanted:g}"


def memory(name: str) -> int:
    """kB of the process, from Linux: VmRSS now, VmHWM at most so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])
