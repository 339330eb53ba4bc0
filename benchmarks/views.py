"""Two-view SimCLR augmentation, side by side: kinfolk, lightly, kornia. Views per second on two
cores.

    make bench                                     # makes the environment with the peers and runs
                                                   every benchmark
    .venv-peers/bin/python benchmarks/views.py     # this one alone

All start from uint8 images in memory and end with a batch of normalised float views, with the same
parameters and probabilities. kinfolk and kornia work on whole batches in two threads, lightly on
single images in two worker processes of a `DataLoader`. The repetitions are interleaved and the
medians compared, so that a noisy machine is noisy for all. A peer that is missing is skipped and
named.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader

from kinfolk.data.views import IMAGENET_MEAN, IMAGENET_STD, Views

Run = Callable[[], int]  # makes views and says how many


@dataclass(frozen=True)
class Case:
    """One row block of the table: sizes, SimCLR's settings at that size, how many images a run
    takes, the ratios to reach."""

    source: int
    size: int
    strength: float
    blur: float
    batch: int
    lightly_images: int
    wanted: dict[str, float]

    def __str__(self) -> str:
        return (
            f"{self.size}×{self.size} from {self.source}×{self.source}, colour strength"
            f" {self.strength}, blur {self.blur:.0%}"
        )


CASES = (
    Case(
        32,
        32,
        strength=0.5,
        blur=0.0,
        batch=256,
        lightly_images=1536,
        wanted={"lightly": 10, "kornia": 4},
    ),
    Case(
        256,
        224,
        strength=1.0,
        blur=0.5,
        batch=32,
        lightly_images=96,
        wanted={"lightly": 1.5, "kornia": 1.5},
    ),
)


def kinfolk(case: Case, pixels: torch.Tensor) -> Run:
    views, generator = (
        Views("simclr", case.size, strength=case.strength, blur=case.blur),
        torch.Generator().manual_seed(0),
    )

    def run() -> int:
        return views(pixels[: case.batch], generator).shape[:2].numel()

    return run


def kornia(case: Case, pixels: torch.Tensor) -> Run:
    augment = import_module("kornia.augmentation")
    jitter = [case.strength * value for value in (0.8, 0.8, 0.8, 0.2)]
    taps = int(0.1 * case.size) | 1
    blur = [augment.RandomGaussianBlur((taps, taps), (0.1, 2.0), p=case.blur)] if case.blur else []
    chain = torch.nn.Sequential(
        augment.RandomResizedCrop((case.size, case.size), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
        augment.RandomHorizontalFlip(p=0.5),
        augment.ColorJitter(*jitter, p=0.8),
        augment.RandomGrayscale(p=0.2),
        *blur,
        augment.Normalize(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)),
    )

    def run() -> int:
        images = pixels[: case.batch].permute(0, 3, 1, 2).float() / 255
        return int(torch.stack([chain(images), chain(images)]).shape[:2].numel())

    return run


def lightly(case: Case, pixels: torch.Tensor) -> Run:
    import_module("torchvision_stub")
    transforms, image = import_module("lightly.transforms"), import_module("PIL.Image")
    transform = transforms.SimCLRTransform(
        input_size=case.size, cj_strength=case.strength, gaussian_blur=case.blur
    )
    images = [
        image.fromarray(pixels[index % len(pixels)].numpy()) for index in range(case.lightly_images)
    ]
    loader = DataLoader(
        _Transformed(images, transform),
        batch_size=case.batch,
        num_workers=torch.get_num_threads(),
        persistent_workers=True,
    )

    def run() -> int:
        return sum(len(view) for batch in loader for view in batch)

    return run


class _Transformed(torch.utils.data.Dataset[Any]):
    def __init__(self, images: list[Any], transform: Callable[[Any], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


def measure(case: Case, repetitions: int, seconds: float) -> None:
    """Prints the table of one case."""
    pixels = torch.randint(0, 256, (case.batch, case.source, case.source, 3), dtype=torch.uint8)
    runs: dict[str, Run] = {}
    for name, make in (("kinfolk", kinfolk), ("lightly", lightly), ("kornia", kornia)):
        run = _ready(name, make, case, pixels)
        runs |= {} if run is None else {name: run}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            made, start = 0, time.perf_counter()
            while made == 0 or time.perf_counter() - start < seconds:
                made += run()
            speeds[name].append(made / (time.perf_counter() - start))

    print(
        f"\n{case}; batch {case.batch}, {repetitions} interleaved repetitions, median (lowest to"
        " highest)"
    )
    print(f"{'':10}{'views/s':>10}  {'range':>19}  {'kinfolk is':>12}  wanted")
    ours = statistics.median(speeds["kinfolk"])
    for name, values in speeds.items():
        speed, wanted = statistics.median(values), case.wanted.get(name)
        verdict = (
            ""
            if wanted is None
            else f"{wanted:g}× {'reached' if ours >= wanted * speed else 'MISSED'}"
        )
        ratio = "" if wanted is None else f"{ours / speed:.1f}×"
        print(
            f"{name:10}{speed:10,.0f}  {f'{min(values):,.0f} to {max(values):,.0f}':>19} "
            f" {ratio:>12}  {verdict}"
        )


def _ready(
    name: str, make: Callable[[Case, torch.Tensor], Run], case: Case, pixels: torch.Tensor
) -> Run | None:
    """The run, warmed up; none where the library is missing."""
    try:
        run = make(case, pixels)
    except ImportError as error:
        print(f"{name} skipped: {error}; benchmarks/peers.sh makes an environment that has it")
        return None
    run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Views per second, side by side.")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="least time of one repetition")
    parser.add_argument(
        "--cores",
        type=int,
        default=2,
        help="threads of kinfolk and kornia, worker processes of lightly",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.cores)
    print(
        f"torch {torch.__version__}; kinfolk and kornia in {options.cores} threads, lightly in"
        f" {options.cores} worker processes"
    )
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        print(
            f"the machine is busy (load {os.getloadavg()[0]:.1f}): threads that wait for each other"
            " suffer most, processes least"
        )
    for case in CASES:
        measure(case, options.repetitions, options.seconds)


if __name__ == "__main__":
    main()
