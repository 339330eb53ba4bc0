"""The losses of image and text alone, side by side: kinfolk with GloFND, open_clip's plain
ClipLoss, dense autograd, four matrix products.

    make bench                                       # makes the environment with the peers and runs
                                                     every benchmark
    .venv-peers/bin/python benchmarks/bimodal.py     # this one alone

Forward and backward, D = 512, float32, two threads, interleaved repetitions, medians. Then the peak
memory of one call in a process of its own, over the batch size. Where open_clip is missing it is
named and left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F
from timing import interleaved, median, memory, verdict
from torch import Tensor, nn

import kinfolk as kf

D, ALPHA, LIMIT = 512, 1e-3, 0.9
OURS, COMPILED, PEER = (
    "kinfolk CLIPLoss + GloFND",
    "CLIPLoss + GloFND, compiled",
    "open_clip ClipLoss",
)


def features(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unit-norm images and texts of 50 themes, and their ids."""
    g = torch.Generator().manual_seed(0)
    themes = F.normalize(torch.randn(50, D, generator=g), dim=1)[torch.arange(batch) % 50]
    images, texts = (
        F.normalize(themes + 0.1 * torch.randn(batch, D, generator=g), dim=1) for _ in range(2)
    )
    return images.requires_grad_(), texts.requires_grad_(), torch.arange(batch)


def detecting(batch: int) -> kf.GloFND:
    return kf.GloFND(num_samples=batch, alpha=ALPHA, init="quantile")


def dense(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """One matrix, gradient by autograd."""
    logits, own = scale * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def products(images: Tensor, texts: Tensor, block: int = 1024) -> None:
    """Similarities once for each direction, and the two products of the gradient of both, in row
    blocks."""
    grad, sim = torch.zeros_like(texts), images.new_empty(min(block, len(images)), len(texts))
    for rows in texts.split(block):  # type: ignore[no-untyped-call]
        torch.mm(rows, images.T, out=sim[: len(rows)])
    for rows in images.split(block):  # type: ignore[no-untyped-call]
        torch.mm(rows, texts.T, out=sim[: len(rows)])
        torch.mm(sim[: len(rows)], texts)
        grad.addmm_(sim[: len(rows)].T, rows)


def peer(images: Tensor, texts: Tensor, scale: Tensor) -> Callable[[], object] | None:
    try:
        import_module("torchvision_stub")
        loss_fn = import_module("open_clip.loss").ClipLoss()
        return lambda: loss_fn(images, texts, scale.exp()).backward()
    except ImportError as error:
        print(f"open_clip skipped: {error}; benchmarks/peers.sh makes an environment that has it")
        return None


def contenders(batch: int) -> dict[str, Callable[[], object]]:
    images, texts, ids = features(batch)
    scale = nn.Parameter(torch.tensor(1 / 0.07).log())
    losses: dict[str, nn.Module] = {
        OURS: kf.CLIPLoss(detector=detecting(batch)),
        COMPILED: kf.CLIPLoss(detector=detecting(batch), compile=True),
        "kinfolk BimodalSogCLR + GloFND": kf.BimodalSogCLRLoss(
            num_samples=batch, temperature=0.03, detector=detecting(batch)
        ),
        "kinfolk FastCLIP + GloFND": kf.FastCLIPLoss(num_samples=batch, detector=detecting(batch)),
        "kinfolk CLIPLoss": kf.CLIPLoss(),
    }
    # so that thresholds have left their start and flag what they will
    for loss_fn in losses.values():
        for _ in range(2):
            loss_fn(images, texts, ids)
    runs: dict[str, Callable[[], object] | None] = {
        name: lambda loss_fn=loss_fn: loss_fn(images, texts, ids).backward()  # type: ignore[misc]
        for name, loss_fn in losses.items()
    }
    runs[PEER] = peer(images, texts, scale)
    runs["dense autograd"] = lambda: dense(images, texts, scale.exp()).backward()  # type: ignore[no-untyped-call]
    runs["the floor: four matrix products"] = lambda: products(images.detach(), texts.detach())
    return {name: run for name, run in runs.items() if run is not None}


def compare(batch: int, repetitions: int) -> None:
    times = interleaved(contenders(batch), repetitions, 0.2)
    print(f"\nbatch {batch}, {repetitions} interleaved repetitions, medians (range)")
    print(f"{'':70}CLIPLoss + GloFND takes, eager and compiled")
    for name, values in times.items():
        eager, compiled = (median(times[ours]) / median(values) for ours in (OURS, COMPILED))
        said = f"compiled {verdict(compiled, LIMIT)}" if name == PEER and batch == 4096 else ""
        spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
        print(
            f"{name:34}{median(values) * 1e3:10.1f} ms  {spread:>20}   {eager:5.2f}× "
            f" {compiled:5.2f}×  {said}"
        )


def peak_memory(batch: int) -> float:
    """MB that one call adds at its peak; run in a process of its own."""
    images, texts, ids = features(batch)
    loss_fn = kf.CLIPLoss(detector=detecting(batch))
    # loads what torch loads at the first call
    kf.CLIPLoss(detector=detecting(64))(*features(64)).backward()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak so far
    before = memory("VmRSS")
    loss_fn(images, texts, ids).backward()
    return (memory("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The losses of image and text alone, side by side."
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument(
        "--memory",
        type=int,
        nargs="*",
        default=[2048, 4096, 8192, 16384],
        help="batch sizes whose peak memory is measured",
    )
    parser.add_argument(
        "--peak",
        type=int,
        help="print the peak memory in MB of one call at this batch size, and end",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    if options.peak:
        print(peak_memory(options.peak))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, D = {D}, float32, forward +"
        f" backward, GloFND at α = {ALPHA}"
    )
    for batch in options.batches:
        compare(batch, options.repetitions)
    print(
        "\npeak memory that CLIPLoss + GloFND adds, forward + backward; linear in the batch: a"
        " constant share per sample at last"
    )
    for batch in options.memory:
        answer = subprocess.run(
            [sys.executable, __file__, "--peak", str(batch)],
            capture_output=True,
            text=True,
            check=True,
        )
        megabytes = float(answer.stdout)
        dense_megabytes = 4 * batch**2 / 2**20
        share = f"{megabytes / batch * 1024:6.1f} kB a sample"
        print(
            f"batch {batch:5}  {megabytes:7.1f} MB  {share}   one matrix of similarities would be"
            f" {dense_megabytes:7.0f} MB"
        )


if __name__ == "__main__":
    main()
