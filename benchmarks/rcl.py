"""What online hierarchical clustering costs: its growth with the data set, and its share of a
training step.

    .venv/bin/python benchmarks/rcl.py

Growth: updates of batch 256, dimension 128, three levels, on data sets whose clusters have one size
(10 samples, then 10 clusters); taken in turn. Share: `simclr` against `simclr+hierarchy` on
resnet10, 32×32, batch 256, 15,000 samples; the update alone, timed inside the step, in percent of
the plain step.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from timing import interleaved, median, verdict
from torch import Tensor

from kinfolk.clustering import OnlineHierarchy
from kinfolk.data.views import Views
from kinfolk.detectors import Hierarchy as Detector
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.models import build_encoder, projection_head

DIM, BATCH = 128, 256
SIZES = (10_000, 100_000, 1_000_000)
SIMILARITY = (0.8, 0.6)
GROWTH, SHARE = 2.0, 5.0


def planted(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(3, N) labels, 10 samples a cluster and 10 clusters a higher one, and (N, D) unit-norm
    features around their centres."""
    g = torch.Generator().manual_seed(seed)
    fine, top = torch.arange(number) // 10, torch.arange(number) // 100
    z = (
        torch.randn(int(top[-1]) + 1, DIM, generator=g)[top]
        + 0.7 * torch.randn(int(fine[-1]) + 1, DIM, generator=g)[fine]
    )
    z += 0.5 * torch.randn(number, DIM, generator=g)
    return torch.stack((torch.arange(number), fine, top)), F.normalize(z, dim=1, out=z)


class Updates:
    """A hierarchy over planted clusters and a stream of batches whose features wander a little."""

    def __init__(self, number: int) -> None:
        labels, self.z = planted(number)
        self.hierarchy = OnlineHierarchy(number, 3, merge_similarity=SIMILARITY)
        self.hierarchy.start(labels, self.z)
        self.g = torch.Generator().manual_seed(1)

    def __call__(self) -> None:
        ids = torch.randint(0, len(self.z), (BATCH,), generator=self.g)
        self.hierarchy.update(ids, self.z[ids] + 0.02 * torch.randn(BATCH, DIM, generator=self.g))


def growth(repetitions: int) -> None:
    runs = {f"{number:,}": Updates(number) for number in SIZES}
    times = {name: median(values) for name, values in interleaved(runs, repetitions).items()}
    for name, seconds in times.items():
        print(f"{name:>10} samples {seconds * 1e3:7.1f} ms an update")
    ratio = times[f"{SIZES[-1]:,}"] / times[f"{SIZES[0]:,}"]
    print(f"{SIZES[-1]:,} against {SIZES[0]:,}: {ratio:.2f}×   {verdict(ratio, GROWTH)}")
    print(
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB with all"
        " three"
    )


class Steps:
    """Training steps of a method, the seconds of which a hierarchy's updates are kept apart."""

    def __init__(self, method: str, pixels: Tensor) -> None:
        torch.manual_seed(0)
        encoder = build_encoder("resnet10", stem="cifar", width=16)
        head = projection_head(encoder.output_size, encoder.output_size, DIM)
        settings = {"merge_similarity": SIMILARITY} if "+" in method else {}
        self.framework = build(parse(method), encoder, head, Context(len(pixels)), {}, settings)
        self.optimizer = torch.optim.SGD(self.framework.parameters(), lr=0.03, momentum=0.9)
        self.views, self.pixels, self.number, self.updating = (
            Views("simclr", 32),
            pixels,
            0,
            list[float](),
        )
        detector = self.framework.objective.detector
        if isinstance(detector, Detector):
            labels, z = planted(len(pixels))
            detector.clusters.start(labels, z)
            detector.started.fill_(True)
            update = detector.clusters.update

            def timed(ids: Tensor, features: Tensor, is_finite: Tensor | None = None) -> None:
                start = time.perf_counter()
                # the encoder is untrained: planted features stand for its own
                update(ids, z[ids] + 0.02 * torch.randn(len(ids), DIM))
                self.updating.append(time.perf_counter() - start)

            detector.clusters.update = timed  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.number += 1
        g = torch.Generator().manual_seed(self.number)
        ids = torch.randperm(len(self.pixels), generator=g)[:BATCH]
        self.optimizer.zero_grad(set_to_none=True)
        self.framework(self.views(self.pixels[ids], g), ids).backward()
        self.optimizer.step()


def share(repetitions: int) -> None:
    pixels = torch.randint(0, 256, (15_000, 32, 32, 3), dtype=torch.uint8)
    runs = {name: Steps(name, pixels) for name in ("simclr", "simclr+hierarchy")}
    times = interleaved(runs, repetitions)
    base, update = median(times["simclr"]), median(runs["simclr+hierarchy"].updating[1:])
    whole = statistics.median(
        b - a for a, b in zip(times["simclr"], times["simclr+hierarchy"], strict=True)
    )
    print(
        f"simclr {base * 1e3:.0f} ms a step, the update {update * 1e3:.1f} ms, all that"
        f" `+hierarchy` adds {whole * 1e3:.1f} ms"
    )
    print(
        f"the update's share of a step: {100 * update / base:.1f} %  "
        f" {verdict(100 * update / base, SHARE)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What online hierarchical clustering costs.")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {BATCH}, dimension"
        f" {DIM}, 3 levels"
    )
    growth(options.updates)
    share(options.steps)


if __name__ == "__main__":
    main()
