"""What an epoch came to: loss, rate, false negatives, speed, and measurements such as kNN; a line of metrics.jsonl, and for the loggers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.files import append_line
from kinfolk.stats import Stats
from kinfolk.training.module import TrainingModule
from kinfolk.training.run import Run

Measurement = Callable[[TrainingModule, int], dict[str, float]]
"""(module, number of finished epochs) → figures for the epoch's line; called on rank zero."""


class Journal(pl.Callback):
    """Sums over the steps of an epoch and writes its line; the sums are part of the checkpoint, so a resumed epoch's line is whole.

    Args:
        run: where the line goes.
        measurements: called at the end of each epoch.
        log_every: steps between two entries in the loggers.
    """

    def __init__(self, run: Run, measurements: Sequence[Measurement], log_every: int) -> None:
        self.run, self.measurements, self.log_every = run, measurements, log_every
        self.row: dict[str, float] = {}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.counts = Stats.empty().counts()
        self.steps, self.seconds = 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.loss, self.counts = self.loss.to(module.device), self.counts.to(module.device)
        self._since = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.loss, self.counts = torch.zeros_like(self.loss), torch.zeros_like(self.counts)
        self.steps, self.seconds = 0, 0.0
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, TrainingModule)
        loss = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning has divided it
        self.loss += loss.double()
        self.counts += module.framework.stats.counts().to(self.counts.device)
        self.steps += 1
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
        if trainer.global_step % self.log_every == 0:
            self._to_loggers(trainer, {"loss": float(loss), "lr": _rate(trainer)}, "step")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        finished = trainer.current_epoch + 1
        stats = Stats.from_counts(_summed(self.counts).cpu())
        row = {"epoch": finished, "step": trainer.global_step, "loss": float(self.loss) / max(self.steps, 1), "lr": _rate(trainer)}
        if trainer.is_global_zero:
            for measure in self.measurements:
                row |= measure(module, finished)
        self._tell(module, row.get("steering_knn"))
        row |= {"tp_similarity": stats.tp_similarity, "fn_similarity": stats.fn_similarity}
        if module.framework.detectors:
            row |= stats.detection()
        row |= {"images_per_second": self.steps * module.batch_size / max(self.seconds, 1e-9), "seconds": self.seconds}
        self.row = {name: value for name, value in row.items() if math.isfinite(value)}
        if trainer.is_global_zero:
            append_line(self.run.metrics, json.dumps(self.row))
        self._to_loggers(trainer, {name: value for name, value in self.row.items() if name not in ("epoch", "step")}, "epoch")

    def _tell(self, module: TrainingModule, knn: float | None) -> None:
        """Passes what rank zero has measured to the framework of all ranks, before the epoch's checkpoint."""
        value = torch.tensor(math.nan if knn is None else knn, dtype=torch.float64, device=module.device)
        if distributed.world_size() > 1:
            dist.broadcast(value, 0)
        if value.isfinite():
            module.framework.on_metric("knn", float(value))

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks; the counts are those of all of them, to be taken up by rank zero."""
        return {"loss": self.loss.cpu(), "counts": _summed(self.counts).cpu(), "steps": self.steps, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.steps, self.seconds = state["loss"], state["steps"], state["seconds"]
        first = not dist.is_initialized() or dist.get_rank() == 0
        kept = first and state["counts"].shape == self.counts.shape  # an earlier version counted less: the epoch is counted from here on
        self.counts = state["counts"] if kept else Stats.empty().counts()

    def _to_loggers(self, trainer: pl.Trainer, figures: dict[str, float], kind: str) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({f"{kind}/{name}": value for name, value in figures.items()}, step=trainer.global_step)


def _rate(trainer: pl.Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def _summed(counts: Tensor) -> Tensor:
    if distributed.world_size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total)
    return total
