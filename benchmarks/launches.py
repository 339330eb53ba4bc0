"""Kernel launches of a whole training step, and how often the host waits for the device in it, for every framework.

    .venv/bin/python benchmarks/launches.py [--before OTHER/src]
    .venv/bin/python benchmarks/launches.py --calls

Counted on the pretended device of the tests (`tests/pretended/device.py`), which needs g++ and says nothing of time. A step is what a
training does with a batch that is on the device: views, encoder, loss, check of the loss, backward pass, optimiser (SGD), queue or momentum
encoder, and metrics with labels. Encoder and heads have one linear layer each, so that what is counted is kinfolk's own work; nothing is
compiled. With `--before`, the source folder of an older version is counted too, and a cell shows both: before → after.

With `--calls` it is one call of a loss, forward and backward, eager and compiled (the default of a training on a GPU). What is compiled
counts as the groups of operations that the compiler fuses on a CPU, each of which would be one kernel; Triton was not asked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.pretended.device import CUDA, LOG, on_device, pretended  # noqa: E402

N, B, SIZE, D, STEPS = 256, 32, 32, 16, 5
QUEUE: dict[str, Any] = {"queue_size": 128}
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "simclr": {},
    "sogclr": {},
    "moco": QUEUE,
    "mocov3": {},
    "ir": {"num_negatives": 64},
    "pcl": {**QUEUE, "num_clusters": [8, 16], "warmup_epochs": 0},
    "cmc": {"num_negatives": 64},
    "la": {"num_clusters": 16, "num_clusterings": 2, "num_background": 64, "warmup_epochs": 0},
    "nnclr": QUEUE,
    "rcl": {**QUEUE, "warmup_epochs": 0, "radii": [0.3, 0.6]},
    "spcl": {"num_clusters": [8, 16]},
    "clip": {},
    "sogclr-clip": {},
    "fastclip": {},
    "siglip": {},
}
DETECTORS = ("", "+glofnd")
OLD_NAMES = {
    "frameworks.registry": "frameworks.method",
    "training.metrics_log": "training.journal",
    "training.run_folder": "training.run",
    "data.augmentation.views": "data.views",
}
"""Modules that had other names in older versions."""


class Data:
    """Only the number of samples matters: batches are given."""

    num_train = N
    stream = None


def imported(name: str) -> Any:
    try:
        return importlib.import_module(f"kinfolk.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"kinfolk.{OLD_NAMES[name]}")


def count(method: str, arguments: dict[str, Any]) -> tuple[int, int]:
    """Launches and waits of a step: medians over a few steps, after the first."""
    registry, module = imported("frameworks.registry"), imported("training.module")
    torch.manual_seed(0)
    labels, plain = torch.arange(N) % 8, torch.Generator
    image, text = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, D)), nn.Sequential(nn.Embedding(50, D), nn.Flatten())
    context = registry.Context(N, labels, (text, nn.Linear(8 * D, D)))
    detector = {"alpha": 0.05} if "+" in method else {}
    framework = registry.build(registry.parse(method), image, nn.Linear(D, D), context, arguments, detector)
    (framework.set_eval_labels if hasattr(framework, "set_eval_labels") else framework.watch)(labels)
    of_text = "lip" in method
    views = imported("data.augmentation.views").Views("clip" if of_text else "simclr", SIZE)
    trained = module.TrainingModule(framework, Data(), views, lambda *_: None, method=method, batch_size=B, epochs=4, seed=0)
    logs = imported("training.metrics_log")
    kind = logs.MetricsLog if hasattr(logs, "MetricsLog") else logs.Journal
    log = kind(imported("training.run_folder").Run(Path(tempfile.gettempdir())), [], log_every=50)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=1, global_step=1, loggers=[])
    on_cuda = patch.object(module.TrainingModule, "device", property(lambda self: CUDA))
    with on_cuda, patch.object(torch, "Generator", lambda device="cpu": plain()), pretended():  # there is no generator of the device
        trained.to(CUDA)
        if framework.due(0):
            framework.refresh(None if framework.collects else nn.functional.normalize(torch.randn(N, D), dim=1), 0.5)
        optimizer = torch.optim.SGD([p for p in framework.parameters() if p.requires_grad], lr=0.01, momentum=0.9, foreach=False)
        log.on_train_start(trainer, trained)
        found = [step(trained, optimizer, log, trainer, number, of_text) for number in range(STEPS + 1)]
    launches, waits = (int(statistics.median(values)) for values in zip(*found[1:], strict=True))
    return launches, waits


def step(trained: Any, optimizer: torch.optim.Optimizer, log: Any, trainer: Any, number: int, of_text: bool) -> tuple[int, int]:
    draw = torch.Generator()
    draw.manual_seed(number)
    batch = {
        "pixels": on_device(torch.randint(0, 256, (B, SIZE, SIZE, 3), dtype=torch.uint8, generator=draw)),
        "aspect": on_device(torch.ones(B)),
        "ids": on_device(torch.randperm(N, generator=draw)[:B]),
        "epoch": 0,
        "step": number,
    }
    if of_text:
        batch |= {"tokens": on_device(torch.randint(50, (B, 8), generator=draw)), "groups": on_device(torch.arange(B))}
    LOG.reset()
    loss = trained.training_step(batch, number)
    loss.backward()
    optimizer.step()
    trained.framework.after_step()
    optimizer.zero_grad(set_to_none=True)
    log.on_train_batch_end(trainer, trained, {"loss": loss.detach()}, batch, number)
    return LOG.launches, sum(LOG.waits.values())


def count_all() -> dict[str, tuple[int, int]]:
    known = imported("frameworks.registry").FRAMEWORKS
    return {name + also: count(name + also, given) for name, given in FRAMEWORKS.items() if name in known for also in DETECTORS}


def loss_calls() -> dict[str, tuple[Any, bool]]:
    """Losses whose calls are counted, and whether labels are watched."""
    import kinfolk as kf

    def glofnd() -> Any:
        return kf.GloFND(N, alpha=0.05)

    return {
        "NTXent": (lambda compiles: kf.NTXent(0.1, compile=compiles), False),
        "NTXent + GloFND": (lambda compiles: kf.NTXent(0.1, detector=glofnd(), compile=compiles), False),
        "SogCLR + GloFND": (lambda compiles: kf.SogCLR(N, 0.1, detector=glofnd(), compile=compiles), False),
        "SogCLR + GloFND, labels watched": (lambda compiles: kf.SogCLR(N, 0.1, detector=glofnd(), compile=compiles), True),
    }


def call(make: Any, labelled: bool, compiles: bool, device: bool) -> tuple[int, int]:
    """Launches and waits of the second call of a loss."""
    loss_fn = make(compiles)
    if labelled:
        loss_fn.set_eval_labels(torch.arange(N) % 8)
    place = on_device if device else torch.Tensor.clone
    with pretended() if device else nullcontext():
        loss_fn = loss_fn.to("cuda") if device else loss_fn
        for number in range(2):
            draw = torch.Generator().manual_seed(number)
            views = [place(x).requires_grad_() for x in torch.randn(2, B, D, generator=draw)]
            ids = place(torch.randperm(N, generator=draw)[:B])
            LOG.reset()
            loss_fn(*views, ids).backward()
            assert not labelled or loss_fn.stats
    return LOG.launches, sum(LOG.waits.values())


def groups_of(make: Any, labelled: bool) -> dict[str, int]:
    """How many groups of operations the compiler makes of each function of a loss, on a CPU, with the softmax of an accelerator."""
    from torch._inductor import config, scheduler

    from kinfolk import compiling, kinship

    groups, fused, generate = dict[str, int](), list[int](), scheduler.Scheduler.codegen

    def counting(self: Any, *given: Any, **named: Any) -> Any:
        fused.append(len(self.nodes))
        return generate(self, *given, **named)

    def compiled(function: Any) -> Any:
        made = torch.compile(function, dynamic=True)

        def run(*given: Any) -> Any:
            fused.clear()
            out = made(*given)  # type: ignore[no-untyped-call]
            groups.setdefault(function.__name__, sum(fused))
            return out

        return run

    weights = kinship._weights

    def weighed(*given: Any) -> Any:
        logits, of_rows = weights(*given)
        softmax = kinship.hardened(logits, given[4], of_rows.weight_R, given[3].hardness)
        return kinship.Logits(softmax.share_RC, softmax.lse_R), of_rows

    weighed.__name__ = "_weighed"
    with (
        patch.object(scheduler.Scheduler, "codegen", counting),
        patch.object(kinship, "_weights", weighed),
        patch.object(kinship, "exponentials", lambda share_RC, _: kinship.Softmax(share_RC, None, share_RC[:, 0])),
        patch.object(compiling, "_compiled", compiled),
        config.patch(force_disable_caches=True),
    ):
        call(make, labelled, compiles=True, device=False)
    return groups


def compiled_call(make: Any, labelled: bool) -> tuple[int, int]:
    """Launches and waits of a call, where each function that is compiled counts as the groups that the compiler makes of it."""
    from kinfolk import compiling

    groups = groups_of(make, labelled)

    def counted(function: Any) -> Any:
        def run(*given: Any) -> Any:
            before = LOG.launches
            out = function(*given)
            LOG.launches = before + groups[function.__name__]
            return out

        return run

    with patch.object(compiling, "_compiled", counted):
        return call(make, labelled, compiles=True, device=True)


def print_calls() -> None:
    print("| a call of | launches / waits, eager | compiled |\n|---|---|---|")
    for name, (make, labelled) in loss_calls().items():
        eager, compiled = call(make, labelled, compiles=False, device=True), compiled_call(make, labelled)
        print(f"| {name} | {eager[0]} / {eager[1]} | {compiled[0]} / {compiled[1]} |")


def of_version(source: Path) -> dict[str, list[int]]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Launches and waits of a training step on a pretended device.")
    parser.add_argument("--before", type=Path, help="source folder of an older version")
    parser.add_argument("--calls", action="store_true", help="count calls of losses instead, eager and compiled")
    parser.add_argument("--json", action="store_true", help="print the counts of the version that is installed, and nothing else")
    options = parser.parse_args()
    if options.calls:
        print_calls()
        return
    if options.json:
        print(json.dumps(count_all()))
        return
    versions = [of_version(source) for source in (options.before, ROOT / "src") if source is not None]
    print("| framework | launches | waits | launches with `glofnd` | waits |\n|---|---|---|---|---|")
    for name in FRAMEWORKS:
        cells = [shown([found.get(name + also) for found in versions], which) for also in DETECTORS for which in (0, 1)]
        print(f"| `{name}` | {' | '.join(cells)} |")


def shown(counts: list[list[int] | None], which: int) -> str:
    return " → ".join("–" if count is None else f"{count[which]:,}" for count in counts)


if __name__ == "__main__":
    main()
