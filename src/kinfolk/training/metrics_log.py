"""The line of metrics per epoch in metrics.jsonl and the loggers, and the messages in train.log and
on the screen."""

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
from torch import Tensor

from kinfolk import distributed
from kinfolk.detectors import StartAt
from kinfolk.errors import KinfolkWarning, printable
from kinfolk.files import append_line, explain_write_errors
from kinfolk.stats import Stats
from kinfolk.training.documents import row_warnings
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run

LOG = logging.getLogger("kinfolk.training")
Measurement = Callable[[TrainingModule, int], dict[str, float]]
"""(module, number of finished epochs) → metrics for the line of the epoch; called on rank zero."""


class MetricsLog(pl.Callback):
    """Sums loss and counts over the steps of an epoch and writes its line of metrics. The sums are
    part of the checkpoint, so the line of a resumed epoch covers the whole epoch."""

    state_key = "Journal"  # in checkpoints, also those of older versions

    def __init__(self, run: Run, measurements: Sequence[Measurement], log_every: int) -> None:
        self.run, self.measurements, self.log_every = run, measurements, log_every
        self.row: dict[str, float] = {}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.counts = Stats.empty().counts
        self.shares: dict[str, Tensor] = {}
        self.steps, self.seconds = 0, 0.0
        self._warned: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.loss, self.counts = self.loss.to(module.device), self.counts.to(module.device)
        self.shares = {name: share.to(module.device) for name, share in self.shares.items()}
        self._since = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.loss, self.counts = torch.zeros_like(self.loss), torch.zeros_like(self.counts)
        self.shares = {}
        self.steps, self.seconds = 0, 0.0
        self._since = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(module, TrainingModule)
        loss = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning divided it
        self.loss += loss.double()
        self.counts += module.framework.stats.counts.to(self.counts.device)
        for name, share in module.framework.step_shares.items():
            share = share.to(self.counts.device)
            self.shares[name] = self.shares[name] + share if name in self.shares else share
        self.steps += 1
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
        if trainer.global_step % self.log_every == 0:
            self._to_loggers(trainer, {"loss": float(loss), "lr": _rate(trainer)}, "step")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        finished = trainer.current_epoch + 1
        stats = Stats(_summed(self.counts).cpu())
        row = {
            "epoch": finished,
            "step": trainer.global_step,
            "loss": float(self.loss) / max(self.steps, 1),
            "lr": _rate(trainer),
        }
        if trainer.is_global_zero:
            for measure in self.measurements:
                row |= measure(module, finished)
        self._share_knn(module, row.get("steering_knn"))
        row |= {"tp_similarity": stats.tp_similarity, "fn_similarity": stats.fn_similarity}
        if module.framework.detectors:
            row |= stats.detection()
        for name, counts in self._summed_shares().items():
            part, whole = counts.tolist()
            row[name] = part / whole if whole else math.nan
        row |= {
            "images_per_second": self.steps * module.batch_size / max(self.seconds, 1e-9),
            "seconds": self.seconds,
        }
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
        """Warns once if a detector that has started flags nothing in a whole epoch."""
        if "flagged" in self._warned or self.row.get("flagged") != 0:
            return
        parts = list(module.framework.modules())
        starts: list[Any] = [part.start for part in parts if isinstance(part, StartAt)]
        for name in ("start_epoch", "warmup_epochs"):
            starts += [getattr(part, name, 0) for part in parts]
        numbers = [start for start in starts if isinstance(start, int)]
        if self.row["epoch"] > 1 + max(numbers, default=0):
            self._warned.add("flagged")
            LOG.warning(
                "%s",
                f"the detector of {module.method} flagged nothing in epoch"
                f" {int(self.row['epoch'])}; check its settings",
            )

    def _share_knn(self, module: TrainingModule, knn: float | None) -> None:
        """Passes the accuracy that rank zero has measured to the framework of all ranks."""
        number = math.nan if knn is None else knn
        value = torch.tensor(number, dtype=torch.float64, device=module.device)
        if distributed.world_size() > 1:
            dist.broadcast(value, 0)
        if value.isfinite():
            module.framework.on_metric("knn", float(value))

    def _summed_shares(self) -> dict[str, Tensor]:
        if not self.shares:
            return {}
        total = _summed(torch.stack(list(self.shares.values()))).cpu()
        return dict(zip(self.shares, total, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The counts are summed over all ranks and restored on rank zero only."""
        sums = {"counts": _summed(self.counts).cpu(), "shares": self._summed_shares()}
        return {"loss": self.loss.cpu(), **sums, "steps": self.steps, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.steps, self.seconds = state["loss"], state["steps"], state["seconds"]
        first = not dist.is_initialized() or dist.get_rank() == 0
        # an earlier version had fewer counts
        kept = first and state["counts"].shape == self.counts.shape
        self.counts = state["counts"] if kept else Stats.empty().counts
        shares: dict[str, Tensor] = state.get("shares", {})
        self.shares = {name: share * first for name, share in shares.items()}

    def _to_loggers(self, trainer: pl.Trainer, metrics: dict[str, float], kind: str) -> None:
        named = {f"{kind}/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)


def _rate(trainer: pl.Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def _summed(counts: Tensor) -> Tensor:
    if distributed.world_size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total)
    return total


FILE_ONLY = "file_only"
"""Key of a log record's `extra`: True keeps it off the screen."""


class _Screen(logging.Handler):
    """Prints through the console, which may be drawing a progress bar at the same time."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, FILE_ONLY, False):
            self.console.print(
                printable(record.getMessage()), markup=False, highlight=False, soft_wrap=True
            )


class _File(logging.FileHandler):
    """Writes lines of printable text. An unwritable log, for example on a full disk, does not end
    the training."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 — logging's name
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path | None, console: Console | None) -> Iterator[None]:
    """Sends the messages of the logger "kinfolk" to a file (appended) and a console."""
    logger = logging.getLogger("kinfolk")
    handlers: list[logging.Handler] = []
    if file is not None:
        with explain_write_errors(file):
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if console is not None:
        handlers.append(_Screen(console))
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collects the warnings of this library in a list, each text once, to be logged once there is a
    log."""
    collected: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KinfolkWarning)
        yield collected
    for warning in caught:
        if issubclass(warning.category, KinfolkWarning):
            if str(warning.message) not in collected:  # a framework may have several detectors
                collected.append(str(warning.message))
        else:
            where = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, warning.category, *where)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silences Lightning's tips and hints about loaders, which do not apply here."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
