"""Kernel launches of a whole training step, and how often the host waits for the device in it, for every framework.

    .venv/bin/python benchmarks/launches.py [--before OTHER/src]

Counted on the pretended device of the tests (`tests/pretended/device.py`), which needs g++ and says nothing of time. A step is what a
training does with a batch that is on the device: views, encoder, loss, check of the loss, backward pass, optimiser (SGD), queue or momentum
encoder, and metrics with labels. Encoder and heads have one linear layer each, so that what is counted is kinfolk's own work; nothing is
compiled. With `--before`, the source folder of an older version is counted too.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
OLD_NAMES = {"frameworks.registry": "frameworks.method", "training.metrics_log": "training.journal", "training.run_folder": "training.run"}
OLD_NAMES |= {"data.augmentation.views": "data.views"}
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
    type(trained).device = property(lambda self: CUDA)
    log_module = imported("training.metrics_log")
    log = getattr(log_module, "MetricsLog", None) or log_module.Journal
    log = log(imported("training.run_folder").Run(Path(tempfile.gettempdir())), [], log_every=50)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=1, global_step=1, loggers=[])
    torch.Generator = lambda device="cpu": plain()  # type: ignore[misc,assignment]
    try:
        with pretended():
            trained.to(CUDA)
            if framework.due(0):
                framework.refresh(None if framework.collects else nn.functional.normalize(torch.randn(N, D), dim=1), 0.5)
            optimizer = torch.optim.SGD([p for p in framework.parameters() if p.requires_grad], lr=0.01, momentum=0.9, foreach=False)
            log.on_train_start(trainer, trained)
            found = [step(trained, optimizer, log, trainer, number, of_text) for number in range(STEPS + 1)]
    finally:
        torch.Generator = plain  # type: ignore[misc]
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


def of_version(source: Path) -> dict[str, list[int]]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Launches and waits of a training step on a pretended device.")
    parser.add_argument("--before", type=Path, help="source folder of an older version")
    parser.add_argument("--json", action="store_true", help="print the counts of the version that is installed, and nothing else")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(count_all()))
        return
    after = of_version(ROOT / "src")
    before = {} if options.before is None else of_version(options.before)
    print("| method | launches | waits |" + (" launches before | waits before |" if before else ""))
    print("|---|---|---|" + ("---|---|" if before else ""))
    for method, (launches, waits) in after.items():
        then = [str(number) for number in before.get(method, ())] or ["–", "–"]
        print(f"| `{method}` | {launches} | {waits} |" + (f" {then[0]} | {then[1]} |" if before else ""))


if __name__ == "__main__":
    main()
