"""What a training reports: metrics.jsonl and the loggers, train.log, and the progress bar."""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from torch import Tensor

from kinfolk import distributed
from kinfolk.errors import KinfolkWarning, duration, printable
from kinfolk.files import append_line, explain_write_errors
from kinfolk.stats import Stats
from kinfolk.training.documents import row_warnings
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run

LOG = logging.getLogger("kinfolk.training")
SECONDS_PER_UPDATE = 0.5
Measurement = Callable[[TrainingModule, int], dict[str, float]]
"""(module, number of finished epochs) → metrics of the epoch; called on rank zero."""


class MetricsLog(pl.Callback):
    state_key = "Journal"  # in checkpoints, also those of older versions

    def __init__(self, run: Run, measurements: Sequence[Measurement], log_every: int) -> None:
        self.run, self.measurements, self.log_every = run, measurements, log_every
        self.row: dict[str, float] = {}
        self._warned: set[str] = set()
        self._clear()

    def _clear(self, device: torch.device | None = None) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.counts = Stats.empty().counts.to(device)
        self.shares: dict[str, Tensor] = {}
        self.steps, self.seconds, self._since = 0, 0.0, time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.loss, self.counts = self.loss.to(module.device), self.counts.to(module.device)
        self.shares = {name: share.to(module.device) for name, share in self.shares.items()}
        self._since = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._clear(module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *batch: Any
    ) -> None:
        assert isinstance(module, TrainingModule)
        loss = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning divided it
        self.loss += loss.double()
        self.counts += module.framework.stats.counts.to(self.counts.device)
        for name, share in module.framework.step_shares.items():
            self.shares[name] = share.to(self.counts.device) + self.shares.get(name, 0)
        self.steps += 1
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
        if trainer.global_step % self.log_every == 0:
            self._to_loggers(trainer, {"loss": float(loss), "lr": _rate(trainer)}, "step")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        finished = trainer.current_epoch + 1
        stats = Stats(_sum_over_ranks(self.counts).cpu())
        row = {
            "epoch": finished,
            "step": trainer.global_step,
            "loss": float(self.loss) / max(self.steps, 1),
            "lr": _rate(trainer),
        }
        if trainer.is_global_zero:
            for measure in self.measurements:
                row |= measure(module, finished)
        self._share_knn(module, row.get("steering_knn", math.nan))
        row |= {"tp_similarity": stats.tp_similarity, "fn_similarity": stats.fn_similarity}
        if module.framework.detectors:
            row |= stats.detection()
        for name, counts in self._sum_shares().items():
            part, whole = counts.tolist()
            row[name] = part / whole if whole else math.nan
        row["images_per_second"] = self.steps * module.batch_size / max(self.seconds, 1e-9)
        row["seconds"] = self.seconds
        self.row = {name: value for name, value in row.items() if math.isfinite(value)}
        if trainer.is_global_zero:
            self._warn_if_nothing_flagged(module)
            for name, message in row_warnings(self.row).items():
                if name not in self._warned:
                    LOG.warning("%s", message)
                self._warned.add(name)
            append_line(self.run.metrics, json.dumps(self.row))
        logged = {name: value for name, value in self.row.items() if name not in ("epoch", "step")}
        self._to_loggers(trainer, logged, "epoch")

    def _warn_if_nothing_flagged(self, module: TrainingModule) -> None:
        if "flagged" in self._warned or self.row.get("flagged") != 0:
            return
        names, epoch = ("start", "start_epoch", "warmup_epochs"), self.row["epoch"]
        starts = [getattr(part, each, 0) for part in module.framework.modules() for each in names]
        if epoch > 1 + max(start for start in starts if isinstance(start, int)):
            self._warned.add("flagged")
            what = f"the detector of {module.method} flagged nothing in epoch {epoch:.0f}"
            LOG.warning("%s; check its settings", what)

    def _share_knn(self, module: TrainingModule, knn: float) -> None:
        value = torch.tensor(knn, dtype=torch.float64, device=module.device)
        if distributed.world_size() > 1:
            dist.broadcast(value, 0)
        if value.isfinite():
            module.framework.on_metric("knn", float(value))

    def _sum_shares(self) -> dict[str, Tensor]:
        if not self.shares:
            return {}
        total = _sum_over_ranks(torch.stack(list(self.shares.values()))).cpu()
        return dict(zip(self.shares, total, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The counts are summed over all ranks and restored on rank zero only."""
        sums = {"counts": _sum_over_ranks(self.counts).cpu(), "shares": self._sum_shares()}
        return {"loss": self.loss.cpu(), **sums, "steps": self.steps, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.steps, self.seconds = state["loss"], state["steps"], state["seconds"]
        first = not dist.is_initialized() or dist.get_rank() == 0
        self.counts = state["counts"] * first
        self.shares = {name: share * first for name, share in state["shares"].items()}

    def _to_loggers(self, trainer: pl.Trainer, metrics: dict[str, float], kind: str) -> None:
        named = {f"{kind}/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)


def _rate(trainer: pl.Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def _sum_over_ranks(counts: Tensor) -> Tensor:
    if distributed.world_size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total)
    return total


FILE_ONLY = "file_only"
"""Key of a log record's `extra`: True keeps it off the screen."""


class _Screen(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, FILE_ONLY, False):
            text = printable(record.getMessage())
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _File(logging.FileHandler):
    """An unwritable log does not end the training."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 — logging's name
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path | None, console: Console | None) -> Iterator[None]:
    logger = logging.getLogger("kinfolk")
    handlers: list[logging.Handler] = [] if console is None else [_Screen(console)]
    if file is not None:
        with explain_write_errors(file):
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    collected: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KinfolkWarning)
        yield collected
    for warning in caught:
        if not issubclass(warning.category, KinfolkWarning):
            where = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, warning.category, *where)
        elif str(warning.message) not in collected:  # a framework may have several detectors
            collected.append(str(warning.message))


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silences hints about loaders that do not apply here."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    # says that a process of the training has ended, before it kills the others
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel("INFO")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class ProgressBar(pl.Callback):
    """Must come after `MetricsLog` in the list of callbacks: it shows its last line."""

    def __init__(self, console: Console | None, metrics_log: MetricsLog, epochs: int) -> None:
        self.console, self.metrics_log, self.epochs = console, metrics_log, epochs
        self._bar: Progress | None = None
        self._task, self._shown = TaskID(0), 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.console is None or not self.console.is_terminal or not trainer.is_global_zero:
            return
        name, figures, left = (
            TextColumn(f"{{task.{part}}}", table_column=Column(no_wrap=True))
            for part in ("description", "fields[figures]", "fields[left]")
        )
        self._bar = Progress(name, BarColumn(8), figures, left, console=self.console)
        total = self.epochs * int(trainer.num_training_batches)
        done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self._bar.add_task("training", total=total, completed=done, figures="", left="")
        self._bar.start()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._bar is None:
            return
        self._bar.advance(self._task)
        # reading the loss makes the host wait for the device
        now, log = time.perf_counter(), self.metrics_log
        if now - self._shown < SECONDS_PER_UPDATE:
            return
        self._shown = now
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
        batches = int(trainer.num_training_batches)
        left = (self.epochs - trainer.current_epoch) * batches - batch_idx - 1
        self._bar.update(
            self._task,
            description=f"epoch {trainer.current_epoch + 1}/{self.epochs}",
            figures=describe({**log.row, "loss": loss}, speed=False),
            left=f"{duration(log.seconds / max(log.steps, 1) * left)} left",
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        row = self.metrics_log.row
        left = (row["seconds"] + row.get("refresh_seconds", 0.0)) * (self.epochs - row["epoch"])
        name = f"epoch {int(row['epoch'])}/{self.epochs}"
        time_left = f"{duration(left)} left" if left else ""
        line = f"{name}  {describe(row)}  {time_left}".rstrip()
        LOG.info("%s", line, extra={FILE_ONLY: self._bar is not None})
        if self._bar is not None:  # otherwise it shows the kNN accuracy of the epoch before
            figures = describe(row, speed=False)
            self._bar.update(self._task, description=name, figures=figures, left=time_left)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(
        self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, module)


def describe(row: dict[str, float], speed: bool = True) -> str:
    parts = [f"loss {row['loss']:.3f}"]
    if "knn" in row:
        parts.append(f"kNN {100 * row['knn']:.1f} %")
    if "flagged" in row:
        parts.append(f"flagged {100 * row['flagged']:.2f} %")
    if speed and "f1" in row:
        parts.append(f"F1 {row['f1']:.2f}")
    if speed:
        parts.append(f"{row['images_per_second']:.0f} samples/s")
    return "  ".join(parts)
