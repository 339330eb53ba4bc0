"""What a ring costs over a queue: its selection, the loss, a training step, memory.

    .venv/bin/python benchmarks/queues.py
    .venv/bin/python benchmarks/queues.py --only loss --repetitions 5

selection   a ring of 256 anchors over a queue of 65,536 against a full `torch.sort` of the same
            similarities
loss        NT-Xent over that queue, forward and backward, with a ring against the plain loss; for
            comparison the plain loss as it is usually written, in autograd
step        views, encoders, loss, backward, optimiser, momentum: `moco+ring` against `moco`;
            resnet10, 32×32, batch 256, queue 4,096
memory      what one call of the loss adds at its peak, in a process of its own, in row blocks ×
            queue

Interleaved repetitions, medians; for the steps the median of the difference, so that slow phases of
the machine fall on both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, median, verdict
from timing import memory as process_memory
from torch import Tensor

import kinfolk as kf
from kinfolk.data.views import Views
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.models import build_encoder, projection_head
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Block, Pairs

D, TEMPERATURE, LOWER, UPPER = 128, 0.2, 0.9, 0.99
BATCH, QUEUE = 256, 65_536
ROWS = 64  # of a block, as many as the engine takes for such a queue on a CPU


def features(number: int, clusters: int = 30, seed: int = 0) -> Tensor:
    """(number, D) unit vectors around random centres: a cluster has 3 % of them, so that neither
    bound lies in the gap between the own cluster and the others."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, D, generator=g)
    return F.normalize(
        centres[torch.randint(clusters, (number,), generator=g)]
        + torch.randn(number, D, generator=g),
        dim=1,
    )


def detectors() -> dict[str, kf.Ring | None]:
    return {"plain": None, "ring": kf.Ring(lower=LOWER, upper=UPPER)}


def table(times: dict[str, list[float]], base: str, wanted: dict[str, float]) -> None:
    for name, values in times.items():
        ratio = median(values) / median(times[base])
        spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
        said = verdict(ratio, wanted[name]) if name in wanted else ""
        print(
            f"  {name:22}{median(values) * 1e3:9.1f} ms  {spread:>18}   {ratio:6.3f} of {base} "
            f" {said}"
        )


def selection(repetitions: int) -> None:
    print(
        f"\nselection: {BATCH} anchors × {QUEUE} candidates in blocks of {ROWS} rows, lower"
        f" {LOWER}, upper {UPPER}, {repetitions} interleaved repetitions, medians (range)"
    )
    z, ids = features(BATCH + QUEUE), torch.arange(BATCH)
    rows = [slice(first, first + ROWS) for first in range(0, BATCH, ROWS)]
    blocks = [
        Block(
            z[r] @ z[BATCH:].T, ids[r], torch.arange(QUEUE) + BATCH, 1, torch.full((ROWS,), QUEUE)
        )
        for r in rows
    ]
    ring = kf.Ring(lower=LOWER, upper=UPPER)
    runs: dict[str, Callable[[], object]] = {
        "full sort": lambda: [block.sim_RC.sort(1) for block in blocks],
        "ring": lambda: [ring.find(block) for block in blocks],
    }
    table(interleaved(runs, repetitions), "full sort", {"ring": 0.2})


def queue_pairs() -> tuple[Pairs, Tensor]:
    """A batch of queries with their keys over the queue, and the queries."""
    z = features(2 * BATCH + QUEUE)
    queries, keys = z[:BATCH].clone().requires_grad_(), z[BATCH : 2 * BATCH].unsqueeze(1)
    return (
        Pairs(queries, z[2 * BATCH :], keys, torch.arange(BATCH), torch.arange(QUEUE) + BATCH),
        queries,
    )


def loss(repetitions: int) -> None:
    print(
        f"\nloss: {BATCH} × {QUEUE}, forward + backward, {repetitions} interleaved repetitions,"
        " medians (range)"
    )
    pairs, queries = queue_pairs()
    runs: dict[str, Callable[[], object]] = {}
    for compiles in (False, True):
        for name, detector in detectors().items():
            objective = NTXentLoss(temperature=TEMPERATURE, detector=detector, compile=compiles)
            objective.on(pairs)  # what is compiled is ready
            called = f"{name}, compiled" if compiles else name
            runs[called] = lambda objective=objective: objective.on(pairs).backward()  # type: ignore[misc]
    runs["plain, in autograd"] = lambda: autograd(queries, pairs).backward()  # type: ignore[no-untyped-call]
    table(interleaved(runs, repetitions, 0.2), "plain", {"ring": 1.8})


def autograd(queries: Tensor, pairs: Pairs) -> Tensor:
    """MoCo's loss as it is usually written."""
    q = F.normalize(queries, dim=1)
    logits = (
        torch.cat([(q * pairs.positives[:, 0]).sum(1, keepdim=True), q @ pairs.candidates.T], 1)
        / TEMPERATURE
    )
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def stepper(method: str, arguments: dict[str, Any], pixels: Tensor) -> Callable[[int], None]:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", stem="cifar", width=16)
    head = projection_head(encoder.output_size, encoder.output_size, D, norm=False)
    framework = build(
        parse(method),
        encoder,
        head,
        Context(len(pixels)),
        {"queue_size": 4096, "momentum": 0.99},
        arguments,
    )
    framework.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        [p for p in framework.parameters() if p.requires_grad], lr=0.03, momentum=0.9
    )
    views = Views("moco", 32)

    def step(number: int) -> None:
        g = torch.Generator().manual_seed(number)
        ids = torch.randperm(len(pixels), generator=g)[:BATCH]
        made = views(pixels[ids], g)
        made = made.flatten(0, 1).contiguous(memory_format=torch.channels_last).view_as(made)
        optimizer.zero_grad(set_to_none=True)
        framework(made, ids).backward()
        optimizer.step()
        framework.after_step()

    return step


def step(steps: int, filling: int = 18) -> None:
    pixels = torch.randint(0, 256, (8192, 32, 32, 3), dtype=torch.uint8)
    print(
        f"\nstep: batch {BATCH}, queue 4,096, {steps} interleaved steps each after {filling} that"
        " fill the queue, median difference"
    )
    arguments = {"lower": LOWER, "upper": UPPER, "anneal": "none"}
    runs = {"moco": stepper("moco", {}, pixels), "ring": stepper("moco+ring", arguments, pixels)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(filling + steps):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.perf_counter()
            runs[name](number)
            if number >= filling:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["moco"])
    differences = (b - a for a, b in zip(times["moco"], times["ring"], strict=True))
    overhead = 100 * statistics.median(differences) / base
    said = verdict(overhead, 3.0)
    print(f"  moco {base * 1e3:7.1f} ms   moco+ring {overhead:+5.1f} %   {said}")


def peak(rows: int, detector: str) -> float:
    """MB that one call adds at its peak."""
    pairs, _ = queue_pairs()
    z = features(64).requires_grad_()
    first = NTXentLoss(temperature=TEMPERATURE, detector=kf.Ring(lower=LOWER, upper=UPPER))(
        z, z, torch.arange(64)
    )
    first.backward()  # loads what torch loads at the first call
    objective = NTXentLoss(temperature=TEMPERATURE, detector=detectors()[detector], block_rows=rows)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = process_memory("VmRSS")
    objective.on(pairs).backward()  # type: ignore[no-untyped-call]
    return (process_memory("VmHWM") - before) / 1024


def memory() -> None:
    copy = 4 * QUEUE * D / 2**20
    print(
        "\nmemory: what one call adds at its peak, forward + backward; a normalised copy of the"
        f" queue, {copy:.0f} MB, is part of it"
    )
    for detector in detectors():
        for rows in (16, 64, 256):
            command = [sys.executable, __file__, "--peak", str(rows), detector]
            megabytes = float(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            block = 4 * rows * QUEUE / 2**20
            beside = f"{(megabytes - copy) / block:5.2f} blocks beside the copy"
            print(
                f"  {detector:14} {rows:4} rows a block of {block:5.0f} MB   {megabytes:7.1f} MB  "
                f" {beside}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a ring costs over a queue.")
    parser.add_argument("--only", nargs="*", choices=["selection", "loss", "step", "memory"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peak",
        nargs=2,
        metavar=("ROWS", "DETECTOR"),
        help="print the peak memory in MB of one call, and end",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(int(options.peak[0]), options.peak[1]))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, D"
        f" = {D}, float32"
    )
    parts: dict[str, Callable[[], None]] = {
        "selection": lambda: selection(options.repetitions),
        "loss": lambda: loss(options.repetitions),
        "step": lambda: step(options.steps),
        "memory": memory,
    }
    for name, part in parts.items():
        if options.only is None or name in options.only:
            part()


if __name__ == "__main__":
    main()
