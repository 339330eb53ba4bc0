"""k-means in torch, which an accelerator runs, against faiss on the same CPU: time and inertia, in
one run.

    .venv/bin/python benchmarks/kmeans.py [--samples 2000,20000] [--features 128] [--threads 1]

Both start from the same k-means++ centroids, and both end when nothing changes any more. Times are
CPU time of the process, the least of several runs in turn, which other processes disturb the least;
with several threads it is the sum over threads.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument(
        "--samples", default="2000,20000", help="numbers of samples, with commas between"
    )
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads; {options.features} features, at"
        f" most {options.iterations} iterations"
    )
    for samples in map(int, options.samples.split(",")):
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(200, options.features, generator=generator)
        chosen = torch.randint(200, (samples,), generator=generator)
        x = F.normalize(
            centres[chosen] + 1.5 * torch.randn(samples, options.features, generator=generator),
            dim=1,
        )
        for number in CLUSTERS:
            compare(x, number, options.iterations, options.repetitions)


def compare(x: Tensor, number: int, iterations: int, repetitions: int) -> None:
    start = first_centroids(x, number, torch.Generator().manual_seed(1))
    runs: dict[str, Callable[[], Clusters]] = {
        "faiss": lambda: kmeans(x, number, seed=0, init=start, iterations=iterations),
        "torch": lambda: torch_kmeans(
            x, number, 0, start, iterations, False, 256, torch.device("cpu"), False
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    found = {name: run() for name, run in runs.items()}
    for _ in range(repetitions):
        for name, run in runs.items():
            before = time.process_time()
            run()
            seconds[name].append(time.process_time() - before)
    faiss_seconds, torch_seconds = (min(seconds[name]) for name in runs)
    ratio, worse = (
        torch_seconds / faiss_seconds,
        inertia(x, found["torch"]) / inertia(x, found["faiss"]) - 1,
    )
    times = (
        f"faiss {1000 * faiss_seconds:6.1f} ms, torch {1000 * torch_seconds:6.1f} ms, ratio"
        f" {ratio:.2f} ({verdict(ratio, WANTED)})"
    )
    reached = "reached" if worse <= WANTED_INERTIA else "MISSED"
    print(
        f"{len(x):6,} samples, k = {number:5}: {times}; inertia {100 * worse:+.2f} % ({reached})",
        flush=True,
    )


if __name__ == "__main__":
    main()
