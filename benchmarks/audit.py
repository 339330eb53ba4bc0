"""The audit against faiss's exact search, and how it grows.

    .venv/bin/python benchmarks/audit.py [--quick]

`kf.audit` of 50,000 × 128 features (a mixture of clusters; α = 0.01, 10 pairs an anchor:
thresholds, pairs, duplicates, hubs, suggested α) and `faiss.IndexFlatIP.search` with k = α · N over
the same unit features, in turn, on all cores; then memory and time up to 200,000 samples, each in
another process. Memory is the peak above what the process held with its input.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
from numpy.typing import NDArray
from timing import interleaved, median, memory, verdict

ALPHA, PAIRS, DIM = 0.01, 10, 128
TIMES, MEMORY = 1.3, 1024.0


def mixture(num: int, clusters: int = 200, seed: int = 0) -> NDArray[np.float32]:
    """(N, D) around random centres."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, DIM), dtype=np.float32)
    x = rng.standard_normal((num, DIM), dtype=np.float32)
    x += centres[rng.integers(0, clusters, num)]
    return x


class Peak:
    """The highest memory inside the block, above that at its start, in MiB."""

    def __enter__(self) -> Peak:
        self.before = self.highest = memory("VmRSS") / 1024
        self.running = True
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.highest = max(self.highest, memory("VmRSS") / 1024)
            time.sleep(0.01)

    def __exit__(self, *error: object) -> None:
        self.running = False
        self.watcher.join()
        self.above = max(0.0, self.highest - self.before)


def one(num: int) -> dict[str, float]:
    """Seconds and memory of one audit."""
    import kinfolk as kf

    kf.audit(mixture(3000), ALPHA)  # what is loaded once is loaded
    x = mixture(num)
    start = time.perf_counter()
    with Peak() as peak:
        found = kf.audit(x, ALPHA, pairs=PAIRS)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": peak.above, "pairs": len(found.pairs) / num}


def apart(num: int) -> dict[str, float]:
    """The same in a fresh process."""
    output = subprocess.run(
        [sys.executable, __file__, "--one", str(num)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def side_by_side(num: int, repetitions: int) -> float:
    import faiss

    import kinfolk as kf

    x = mixture(num)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)

    def by_faiss() -> object:
        index = faiss.IndexFlatIP(DIM)
        index.add(unit)
        return index.search(unit, int(ALPHA * num))

    times = interleaved(
        {"kinfolk": lambda: kf.audit(x, ALPHA, pairs=PAIRS), "faiss": by_faiss}, repetitions
    )
    ratio = median(times["kinfolk"]) / median(times["faiss"])
    print(
        f"{num:,} × {DIM}: kf.audit {median(times['kinfolk']):.1f} s, IndexFlatIP k ="
        f" {int(ALPHA * num)} {median(times['faiss']):.1f} s,"
    )
    print(
        f"  ratio {ratio:.2f} (rounds:"
        f" {', '.join(f'{a / b:.2f}' for a, b in zip(times['kinfolk'], times['faiss'], strict=True))})"  # noqa: E501
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the samples: to see that it runs"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", type=int, metavar="N", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one)))
        return
    part = 5 if given.quick else 1
    print(f"{multiprocessing.cpu_count()} cores")
    ratio = side_by_side(50_000 // part, given.repetitions)
    print(f"  {verdict(ratio, TIMES)}")
    before = 0.0
    for num in (50_000, 100_000, 200_000):
        result = apart(num // part)
        growth = f", {result['seconds'] / before:.1f}× the half" if before else ""
        before = result["seconds"]
        held = f"{result['pairs']:.1f} pairs an anchor, peak {result['memory']:.0f} MiB"
        print(f"{num // part:,}: {result['seconds']:.1f} s{growth}, {held}")
        print(f"  {verdict(result['memory'], MEMORY)}")


if __name__ == "__main__":
    main()
