"""k-means in torch, which an accelerator runs, against faiss on the same CPU: time and inertia, in one run.

    .venv/bin/python benchmarks/kmeans.py [--samples 20000] [--features 128] [--threads 1]

Both start from the same k-means++ centroids, and both end when nothing changes any more. Seconds are CPU time of the process, which other
processes disturb less than the clock; with several threads it is the sum over threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import verdict
from torch import Tensor

from kinfolk.clustering.kmeans import Clusters, first_centroids, kmeans, torch_kmeans

CLUSTERS, WANTED, WANTED_INERTIA = (100, 300, 1000), 1.3, 0.01


def inertia(features: Tensor, found: Clusters) -> float:
    return float((features - found.centroids[found.labels]).double().square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="k-means in torch against faiss on a CPU.")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(200, options.features, generator=generator)
    chosen = torch.randint(200, (options.samples,), generator=generator)
    x = F.normalize(centres[chosen] + 1.5 * torch.randn(options.samples, options.features, generator=generator), dim=1)
    size = f"{options.samples:,} × {options.features}"
    print(f"torch {torch.__version__}, {options.threads} threads; {size}, at most {options.iterations} iterations")
    for number in CLUSTERS:
        start = first_centroids(x, number, torch.Generator().manual_seed(1))

        def by_faiss(number: int = number, start: Tensor = start) -> Clusters:
            return kmeans(x, number, seed=0, init=start, iterations=options.iterations)

        def in_torch(number: int = number, start: Tensor = start) -> Clusters:
            return torch_kmeans(x, number, 0, start, options.iterations, False, 256, torch.device("cpu"), False)

        runs: dict[str, Callable[[], Clusters]] = {"faiss": by_faiss, "torch": in_torch}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        found = {name: run() for name, run in runs.items()}
        for _ in range(options.repetitions):
            for name, run in runs.items():
                before = time.process_time()
                run()
                seconds[name].append(time.process_time() - before)
        faiss_seconds, torch_seconds = (statistics.median(seconds[name]) for name in runs)
        ratio, worse = torch_seconds / faiss_seconds, inertia(x, found["torch"]) / inertia(x, found["faiss"]) - 1
        print(
            f"k = {number:5}: faiss {faiss_seconds:.2f} s, torch {torch_seconds:.2f} s, ratio {ratio:.2f} ({verdict(ratio, WANTED)}); ",
            end="",
        )
        print(f"inertia {100 * worse:+.2f} % ({'reached' if worse <= WANTED_INERTIA else 'MISSED'})")


if __name__ == "__main__":
    main()
