"""The measurements of `benchmarks/gpu_hour.sh`, each as Markdown on standard output.

    python benchmarks/gpu_hour.py machine
    torchrun --nproc-per-node 2 benchmarks/gpu_hour.py ranks     # two ranks against one process
    python benchmarks/gpu_hour.py compile                        # compiled against eager
    python benchmarks/gpu_hour.py table --batches 1024,4096      # time and peak memory of losses
    python benchmarks/gpu_hour.py resume FOLDER --epochs 4       # a training killed and resumed

On a CPU `ranks` uses gloo, and memory is not measured. The exit code is 1 if a comparison fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kinfolk as kf
from kinfolk import distributed

N, D = 20_000, 128
EQUAL, FLIPPED = 2e-5, 1e-2
"""Differences that are rounding: without a candidate that only one of two flags, and with one."""
Make = Callable[[bool], nn.Module]


def glofnd() -> kf.GloFND:
    """Flags from the first visit of a sample on: a few batches visit most samples once."""
    return kf.GloFND(num_samples=N, alpha=0.01, init="quantile")


LOSSES: dict[str, Make] = {
    "NTXentLoss": lambda compiles: kf.NTXentLoss(temperature=0.1, compile=compiles),
    "NTXentLoss + GloFND": lambda compiles: kf.NTXentLoss(
        temperature=0.1, detector=glofnd(), compile=compiles
    ),
    "SogCLRLoss + GloFND": lambda compiles: kf.SogCLRLoss(
        num_samples=N, temperature=0.1, detector=glofnd(), compile=compiles
    ),
    "CLIPLoss + GloFND": lambda compiles: kf.CLIPLoss(detector=glofnd(), compile=compiles),
}


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def batch(number: int, seed: int, where: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    one = torch.randn(number, D, generator=g)
    other = one + torch.randn(number, D, generator=g)
    return one.to(where), other.to(where), torch.randperm(N, generator=g)[:number].to(where)


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(*cells: str) -> None:
    row(*cells)
    row(*("---" for _ in cells))


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest value; infinite if they differ in what is
    finite."""
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    if not bool((one.isfinite() == other.isfinite()).all()):
        return float("inf")
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))


def machine() -> bool:
    header("what", "value")
    row("kinfolk", kf.__version__)
    row("torch", torch.__version__)
    has_triton = importlib.util.find_spec("triton") is not None
    row("Triton", importlib.import_module("triton").__version__ if has_triton else "not installed")
    row("Python", platform.python_version())
    row("system", f"{platform.platform()}, {os.cpu_count()} cores")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        row(
            f"GPU {index}",
            f"{about.name}, {about.total_memory / 2**30:.0f} GB, sm_{about.major}{about.minor}",
        )
    if torch.cuda.device_count():
        nccl = torch.cuda.nccl.version() if torch.version.cuda else ()  # type: ignore[no-untyped-call]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        row("CUDA", torch.version.cuda or f"ROCm {torch.version.hip}")
        row("cuDNN, NCCL", f"{cudnn}, {'.'.join(map(str, nccl)) or 'none'}")
    else:
        row("GPU", "none")
    return True


class Step(NamedTuple):
    loss: Tensor
    gradient: Tensor
    flagged: Tensor


def run_steps(
    loss_fn: Any, where: torch.device, number: int, part: slice, steps: int = 4
) -> list[Step]:
    """Some steps for the rows `part` of each batch."""
    found = list[Step]()
    for seed in range(steps):
        one, other, ids = (x[part] for x in batch(number, seed, where))
        one.requires_grad_()
        loss = loss_fn(one, other, ids)
        flagged = torch.as_tensor(loss_fn.stats.flagged, device=where)
        found.append(Step(loss.detach(), torch.autograd.grad(loss, one)[0], flagged))
    return found


def explain(what: str) -> None:
    """What the table of a comparison shows, and its header."""
    print(
        f"{what}, dimension {D}, four steps. Differences are relative to the largest value; below"
        f" {EQUAL:.0e} they are rounding. Rounding may also flag a candidate at a threshold or not,"
        f" which changes its row by up to {FLIPPED:.0e}.\n"
    )
    header("loss", "value", "gradient", "state", "flagged", "flagged differently", "result")


def compare(
    name: str, got: list[Step], expected: list[Step], states: tuple[nn.Module, nn.Module]
) -> bool:
    pairs = list(zip(got, expected, strict=True))
    loss = max(difference(a.loss, b.loss) for a, b in pairs)
    gradient = max(difference(a.gradient, b.gradient) for a, b in pairs)
    mine, other = (module.state_dict() for module in states)
    state = max([difference(mine[key], other[key]) for key in other], default=0.0)
    flagged = sum(int(b.flagged) for _, b in pairs)
    flips = sum(abs(int(a.flagged) - int(b.flagged)) for a, b in pairs)
    limit = FLIPPED if 0 < flips <= 1e-4 * flagged else EQUAL
    right = max(loss, gradient, state) < limit
    differences = (f"{x:.1e}" if x else "0" for x in (loss, gradient, state))
    row(name, *differences, flagged, flips, "equal" if right else "**DIFFERENT**")
    return right


def ranks(number: int) -> bool:
    """Each rank has its part of the batch; rank zero compares with the whole batch in one
    process."""
    where, right = device(), True
    if where.type == "cuda":
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            raise SystemExit(f"{os.environ['WORLD_SIZE']} ranks need as many GPUs")
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    share = number // world
    backend, found = dist.get_backend(), dict[str, tuple[nn.Module, list[Step]]]()
    for name, make in LOSSES.items():
        loss_fn = make(False).to(where)
        with distributed.equal_batches():
            got = run_steps(loss_fn, where, share * world, slice(rank * share, (rank + 1) * share))
        joined = list[Step]()
        for step in got:
            whole = distributed.gather_rows(step.gradient, [share] * world) / world
            flagged = distributed.gather_rows(step.flagged.view(1), [1] * world).sum()
            joined.append(Step(step.loss, whole, flagged))
        found[name] = loss_fn, joined
    dist.barrier()
    dist.destroy_process_group()
    if rank > 0:
        return True
    explain(f"{world} ranks with {backend} against one process: batch {share * world}")
    for name, (loss_fn, several) in found.items():
        alone = LOSSES[name](False).to(where)
        expected = run_steps(alone, where, share * world, slice(None))
        right &= compare(name, several, expected, (loss_fn, alone))
    return right


def compiled(number: int) -> bool:
    where, right = device(), True
    explain(f"Compiled losses against eager ones: batch {number}")
    for name, make in LOSSES.items():
        eager, fast = make(False).to(where), make(True).to(where)
        got = run_steps(fast, where, number, slice(None))
        expected = run_steps(eager, where, number, slice(None))
        right &= compare(name, got, expected, (fast, eager))
    return right


def measure(loss_fn: Any, where: torch.device, number: int, repeats: int) -> tuple[str, str]:
    """Milliseconds of a forward and backward pass, and the most megabytes that it adds (on a
    GPU)."""
    on_gpu = where.type == "cuda"
    one, other, ids = batch(number, 0, where)
    one.requires_grad_()
    times = list[float]()
    for attempt in range(repeats + 3):
        if on_gpu:
            torch.cuda.synchronize()
            if attempt == 3:
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        loss_fn(one, other, ids).backward()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    memory = f"{(torch.cuda.max_memory_allocated() - held) / 1e6:.0f}" if on_gpu else "—"
    return f"{statistics.median(times[3:]):.2f}", memory


def table(batches: list[int], repeats: int) -> bool:
    where, tf32 = device(), ("—", "—")
    print(
        f"A forward and backward pass, dimension {D}, median of {repeats}. Memory is the most that"
        " it adds (not measured on a CPU). TF32: compiled, with products of that precision, as a"
        " training in bf16 has them (on a GPU only).\n"
    )
    kinds = ("eager", "compiled", "TF32")
    header("loss", "batch", *(f"{kind}, ms" for kind in kinds), *(f"{kind}, MB" for kind in kinds))
    for name, make in LOSSES.items():
        for number in batches:
            found = [
                measure(make(which).to(where), where, number, repeats) for which in (False, True)
            ]
            if where.type == "cuda":
                torch.set_float32_matmul_precision("high")
                tf32 = measure(make(True).to(where), where, number, repeats)
                torch.set_float32_matmul_precision("highest")
            row(name, number, *(cell for kind in zip(*found, tf32, strict=True) for cell in kind))
    return True


def train(folder: Path, epochs: int, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kinfolk", "train", "--out", str(folder), *more]
    if "--resume" not in more:
        command += [
            "--data",
            "digits",
            "--method",
            "sogclr+glofnd",
            "--epochs",
            str(epochs),
            "--no-report",
        ]
    log = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def count_epochs(metrics: Path) -> int:
    """Complete lines; a kill may have cut off the last one."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def resume(folder: Path, epochs: int, settings: list[str]) -> bool:
    """Kills a training after its first epoch, resumes it, and compares with one never killed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, killed = folder / "whole", folder / "killed"
    if train(whole, epochs, *settings).wait():
        raise SystemExit(f"the training failed; see {whole}.log")
    process = train(killed, epochs, *settings)
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    code, done = process.wait(), count_epochs(metrics)
    if code != -signal.SIGKILL or done >= epochs:
        print(
            f"**NOT KILLED IN TIME**: the training ended with {code} after {done} of {epochs}"
            f" epochs, so nothing was resumed; give more `--epochs`, or see {killed}.log."
        )
        return False
    if train(killed, epochs, "--resume").wait():
        raise SystemExit(f"resuming failed; see {killed}.log")
    last = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (whole, killed)
    ]
    print(f"`sogclr+glofnd` on the digits, killed by `kill -9` after {done} of {epochs} epochs.\n")
    header("training", "epoch", "loss", "kNN")
    for name, found in zip(("never killed", f"ended with {code}, resumed"), last, strict=True):
        knn = f"{found['knn']:.2%}" if "knn" in found else "—"
        row(name, found["epoch"], f"{found['loss']:.8f}", knn)
    apart = abs(float(last[0]["loss"]) / float(last[1]["loss"]) - 1)
    print(f"\nThe losses differ by {apart:.1e} (0 on a CPU; GPUs may add in another order).")
    return apart < (1e-2 if torch.cuda.is_available() else 1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("machine", "ranks", "compile", "table", "resume"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/gpu-hour"))
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batches", default="512,2048,8192")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="a setting of the training")
    given = parser.parse_args()
    settings = [part for each in given.set for part in ("--set", each)]
    steps: dict[str, Callable[[], bool]] = {
        "machine": machine,
        "ranks": lambda: ranks(given.batch),
        "compile": lambda: compiled(given.batch),
        "table": lambda: table([int(number) for number in given.batches.split(",")], given.repeats),
        "resume": lambda: resume(given.folder, given.epochs, settings),
    }
    sys.exit(0 if steps[given.what]() else 1)


if __name__ == "__main__":
    main()
