"""Trainings in processes of their own, which end themselves at a chosen moment as a power cut or a
scheduler would."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.ranks import exit_codes
from tests.training.small import SMALL

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "method": "sogclr+glofnd",
    "epochs": 3,
    "batch_size": 256,
    "settings": {
        **SMALL,
        "model.width": 8,
        "head.out_size": 16,
        "detector.alpha": 0.05,
        "detector.init": "quantile",
        "knn.every": 1,
    },
    "progress": False,
}
"""Five steps an epoch, fifteen in all; state per sample in the objective and in the detector."""


OTHERS: dict[str, dict[str, Any]] = {
    "moco": {
        "method": "moco+glofnd",
        "settings": {"framework.queue_size": 75, "framework.momentum": 0.9},
    },
    "ir": {"method": "ir+glofnd", "settings": {"framework.num_negatives": 80}},
    "pcl": {
        "method": "pcl+glofnd",
        "settings": {
            "framework.queue_size": 75,
            "framework.warmup_epochs": 1,
            "framework.num_prototypes": 8,
            "framework.num_clusters": [5, 20],
        },
    },
    "rcl": {
        "method": "rcl+glofnd",
        "settings": {
            "framework.queue_size": 75,
            "framework.momentum": 0.9,
            "framework.warmup_epochs": 1,
            "framework.predictor_size": 32,
            "framework.radii": [0.2, 0.4],
        },
    },
    "spcl": {
        "method": "spcl+glofnd",
        "settings": {"framework.num_clusters": [12, 5], "framework.warmup_epochs": 1},
    },
}
"""What else keeps state, for 170 samples: a momentum copy and a queue that the batch does not
divide; a bank and draws from it; prototypes and draws from them; clusters that every step refines
and keys are drawn from; prototypes that the order of the samples goes by."""


def few_images(folder: Path) -> dict[str, Any]:
    """Arguments of a training that has five steps an epoch too, but of 32 images each: three
    classes of colours, 170 images for training and 30 for testing."""
    rng, y = np.random.default_rng(0), np.arange(200) % 3
    x = np.eye(3)[y][:, None, None] * 120 + rng.integers(0, 120, (200, 8, 8, 3))
    x = x.astype(np.uint8)
    path = folder / "images.npz"
    np.savez(path, x_train=x[:170], y_train=y[:170], x_test=x[170:], y_test=y[170:])
    return {"data": str(path), "batch_size": 32}


def run_child(
    out: Path, moment: str, *, each_step: bool = False, resume: bool = False, **more: Any
) -> int:
    """Trains in a process that ends itself at `moment`, such as "kill step 7"; returns its exit
    code (negative: the signal)."""
    return _run([(moment, {})], out, each_step, resume, more)[0]


def run_ranks(out: Path, *moments: str, resume: bool = False, **more: Any) -> list[int]:
    """Trains in as many processes as there are moments ("" for none), launched as torchrun does it;
    returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(moments)),
        "TORCHELASTIC_RUN_ID": str(port),
    }
    shared |= {"LOCAL_WORLD_SIZE": str(len(moments)), "GROUP_RANK": "0"}
    ranks = [
        (moment, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, moment in enumerate(moments)
    ]
    return _run(ranks, out, False, resume, more)


def _run(
    children: list[tuple[str, dict[str, str]]],
    out: Path,
    each_step: bool,
    resume: bool,
    more: dict[str, Any],
) -> list[int]:
    return exit_codes(
        _child,
        [
            (str(out), moment, each_step, resume, environment, more)
            for moment, environment in children
        ],
    )


def training(out: Path, *, each_step: bool = False, **more: Any) -> dict[str, Any]:
    """The arguments of `train`; `each_step`: a checkpoint after every step; another `method` has
    none of the detector's settings."""
    usual = {
        key: value
        for key, value in SETTINGS["settings"].items()
        if "method" not in more or not key.startswith("detector.")
    }
    settings = {**usual, **more.pop("settings", {})}
    if each_step:
        settings["checkpoint.every_minutes"] = 1e-9
    return {**SETTINGS, "out": out, "settings": settings, **more}


def _child(
    out: str,
    moment: str,
    each_step: bool,
    resume: bool,
    environment: dict[str, str],
    more: dict[str, Any],
) -> None:
    from kinfolk.training.train import train

    os.environ.update(environment)
    torch.set_num_threads(1)
    if moment:
        how, what, number = moment.split()
        _arm(
            {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}[how],
            what,
            int(number),
        )
    settings = {
        **more.pop("settings", {}),
        **({"trainer.devices": int(environment["WORLD_SIZE"])} if environment else {}),
    }
    train(**training(Path(out), each_step=each_step, resume=resume, settings=settings, **more))


def _arm(number: signal.Signals, what: str, count: int) -> None:
    """The signal comes at the `count`-th step, checkpoint, line of metrics or prepared folder,
    half-way through it."""
    from kinfolk.training import checkpoint, metrics_log, module, run_folder

    calls = {what: 0}

    def strike() -> bool:
        calls[what] += 1
        return calls[what] == count

    if what == "step":
        step = module.TrainingModule.training_step

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = step(self, batch, batch_idx)
            if strike():
                os.kill(os.getpid(), number)
            return loss

        module.TrainingModule.training_step = training_step  # type: ignore[method-assign]
    elif what == "writing":
        save = torch.save

        def half(value: Any, file: Any) -> None:
            save(value, file)
            if strike():
                file.file.truncate(file.file.tell() // 2)
                os.kill(os.getpid(), number)

        checkpoint.torch.save = half  # type: ignore[attr-defined]
    elif what == "line":
        end = metrics_log.MetricsLog.on_train_epoch_end

        def on_train_epoch_end(self: Any, trainer: Any, module: Any) -> None:
            end(self, trainer, module)
            if strike():
                with open(self.run.metrics, "a", encoding="utf-8") as file:
                    file.write('{"epoch": 99, "st')
                os.kill(os.getpid(), number)

        metrics_log.MetricsLog.on_train_epoch_end = on_train_epoch_end  # type: ignore[method-assign]
    else:
        assert what == "folder"

        def write_quarantine(*args: Any) -> None:
            os.kill(os.getpid(), number)

        setattr(run_folder, "write_quarantine", write_quarantine)  # noqa: B010
