"""The loss alone, side by side: kinfolk with GloFND eliminating, lightly, pytorch-metric-learning,
dense autograd, three matrix products.

    make bench                                      # makes the environment with the peers and runs
                                                    every benchmark
    .venv-peers/bin/python benchmarks/losses.py     # this one alone

Forward and backward, D = 128, float32, two threads, interleaved repetitions, medians. Then the peak
memory of one call in a process of its own, over the batch size. A peer that is missing, or asks for
more memory than the machine has, is skipped and named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, median, memory, verdict
from torch import Tensor

import kinfolk as kf

D, TEMPERATURE = 128, 0.1
LIMITS = {"lightly NTXentLoss": {256: 1.0, 1024: 0.8, 4096: 0.55}}
"""Of the eager loss with GloFND, in units of this plain loss."""
MEMORY_LIMIT = 250


def embeddings(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(10, D, generator=g), dim=1)
    z1, z2 = (
        centres[torch.arange(batch) % 10] + 0.1 * torch.randn(batch, D, generator=g)
        for _ in range(2)
    )
    return z1.requires_grad_(), z2.requires_grad_(), torch.arange(batch)


def trained(loss_fn: Any, z1: Tensor, z2: Tensor, ids: Tensor) -> Any:
    """The loss after a few visits, so that thresholds have left their start and flag what they
    will."""
    for _ in range(3):
        loss_fn(z1, z2, ids)
    return loss_fn


def dense(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent as one matrix, gradient by autograd."""
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, (torch.arange(len(z)) + len(z1)) % len(z))


def products(z: Tensor, block: int = 128) -> Tensor:
    """The floor: similarities, and the two products of the gradient, in row blocks."""
    grad_c = torch.zeros_like(z)
    for rows in z.split(block):  # type: ignore[no-untyped-call]
        sim = rows @ z.T
        grad_c += (sim @ z).sum()
        grad_c.addmm_(sim.T, rows)
    return grad_c


def peer(module: str, name: str, *inputs: Tensor) -> Callable[[], object] | None:
    """Forward and backward of another library's loss."""
    try:
        if module.startswith("lightly"):
            import_module("torchvision_stub")
        loss_fn = getattr(import_module(module), name)(temperature=TEMPERATURE)
        return lambda: loss_fn(*inputs).backward()
    except ImportError as error:
        print(f"{module} skipped: {error}; benchmarks/peers.sh makes an environment that has it")
        return None


def contenders(batch: int) -> dict[str, Callable[[], object]]:
    z1, z2, ids = embeddings(batch)
    glofnd = kf.GloFND(num_samples=batch, alpha=0.01, init="quantile")
    ours = trained(kf.NTXentLoss(temperature=TEMPERATURE, detector=glofnd), z1, z2, ids)
    sogclr = trained(
        kf.SogCLRLoss(
            num_samples=batch,
            temperature=TEMPERATURE,
            detector=kf.GloFND(num_samples=batch, alpha=0.01, init="quantile"),
        ),
        z1,
        z2,
        ids,
    )
    faster = trained(
        kf.NTXentLoss(
            temperature=TEMPERATURE, detector=kf.GloFND(num_samples=batch, alpha=0.01), compile=True
        ),
        z1,
        z2,
        ids,
    )
    plain, z = kf.NTXentLoss(temperature=TEMPERATURE), torch.cat([z1, z2]).detach()
    runs: dict[str, Callable[[], object] | None] = {
        "kinfolk NTXent + GloFND": lambda: ours(z1, z2, ids).backward(),
        "NTXent + GloFND, compiled": lambda: faster(z1, z2, ids).backward(),
        "kinfolk SogCLR + GloFND": lambda: sogclr(z1, z2, ids).backward(),
        "kinfolk NTXent": lambda: plain(z1, z2, ids).backward(),
        "three matrix products": lambda: products(z),
        "dense autograd": lambda: dense(z1, z2).backward(),  # type: ignore[no-untyped-call]
        "lightly NTXentLoss": peer("lightly.loss", "NTXentLoss", z1, z2),
    }
    if batch <= 1024:  # beyond, they ask for tens of gigabytes
        runs["pml SupConLoss"] = peer(
            "pytorch_metric_learning.losses", "SupConLoss", torch.cat([z1, z2]), ids.repeat(2)
        )
    if batch <= 256:
        runs["pml NTXentLoss"] = peer(
            "pytorch_metric_learning.losses", "NTXentLoss", torch.cat([z1, z2]), ids.repeat(2)
        )
    return {key: run for key, run in runs.items() if run is not None}


def compare(batch: int, repetitions: int) -> None:
    times = interleaved(contenders(batch), repetitions, 0.2)
    ours = {
        "eager": median(times["kinfolk NTXent + GloFND"]),
        "compiled": median(times["NTXent + GloFND, compiled"]),
    }
    print(
        f"\nbatch {batch} ({2 * batch} anchors × {2 * batch} candidates), {repetitions} interleaved"
        " repetitions, medians (range)"
    )
    print(f"{'':60}NTXent + GloFND takes, eager and compiled")
    for name, values in times.items():
        ratios = {mode: seconds / median(values) for mode, seconds in ours.items()}
        limit = LIMITS.get(name, {}).get(batch)
        said = "" if limit is None else f"eager {verdict(ratios['eager'], limit)}"
        spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
        print(
            f"{name:26}{median(values) * 1e3:10.1f} ms  {spread:>20} {ratios['eager']:6.2f}×"
            f" {ratios['compiled']:6.2f}×  {said}"
        )


def peak_memory(batch: int) -> float:
    """MB that one call adds at its peak; run in a process of its own."""
    z1, z2, ids = embeddings(batch)
    loss_fn = kf.NTXentLoss(
        temperature=TEMPERATURE, detector=kf.GloFND(num_samples=batch, alpha=0.01, init="quantile")
    )
    kf.NTXentLoss(temperature=TEMPERATURE, detector=kf.GloFND(num_samples=64, alpha=0.01))(
        *embeddings(64)
    ).backward()  # loads what torch loads at the first call
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    loss_fn(z1, z2, ids).backward()
    return (memory("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="The loss alone, side by side.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peak",
        type=int,
        help="print the peak memory in MB of one call at this batch size, and end",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_memory(options.peak))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, D = {D}, float32, forward +"
        " backward"
    )
    for batch in options.batches:
        compare(batch, options.repetitions)
    print("\npeak memory that NTXent + GloFND adds, forward + backward")
    for batch in (1024, 2048, 4096, 8192):
        answer = subprocess.run(
            [sys.executable, __file__, "--peak", str(batch)],
            capture_output=True,
            text=True,
            check=True,
        )
        megabytes = float(answer.stdout)
        said = verdict(megabytes, MEMORY_LIMIT) if batch == 8192 else ""
        print(
            f"batch {batch:5}  {megabytes:7.1f} MB   the similarities alone would be"
            f" {4 * (2 * batch) ** 2 / 2**20:7.0f} MB  {said}"
        )


if __name__ == "__main__":
    main()
