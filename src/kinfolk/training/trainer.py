"""The Lightning trainer of a run with its loggers and callbacks, and the progress bar. Without a
terminal, the bar is replaced by one line per epoch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from kinfolk.training.checkpoint import AtomicCheckpointIO, CheckpointSaver
from kinfolk.training.config import TrainConfig, TrainerConfig
from kinfolk.training.launch import in_notebook
from kinfolk.training.metrics_log import FILE_ONLY, Measurement, MetricsLog
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run

LOG = logging.getLogger("kinfolk.training")
SECONDS_PER_UPDATE = 0.5
ESTIMATE_AFTER, ESTIMATE_STEPS, SHORTEST_ESTIMATE = 3.0, 20, 10.0
"""The time of the whole training is estimated after this many seconds or steps, and shown if it is
at least this many seconds."""


def build_trainer(
    config: TrainConfig,
    run: Run,
    state: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    measurements: Sequence[Measurement],
    export: Callable[[int, int], None],
    console: Console | None,
) -> pl.Trainer:
    """A trainer that writes into `run` and starts after the checkpoint with the `kinfolk` entry
    `state`, or at the beginning. Of the measurements, callbacks see the training first."""
    settings, step = config.trainer, 0 if state is None else int(state["step"])
    metrics_log = MetricsLog(run, measurements, settings.log_every)

    def accuracy() -> float | None:
        return metrics_log.row.get("knn")

    saver = CheckpointSaver(run.checkpoint, config, identity, export, accuracy, state)
    callbacks: list[Any] = [each for each in measurements if isinstance(each, pl.Callback)]
    callbacks += [metrics_log, ProgressBar(console, metrics_log, config.epochs), saver]
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=_strategy(settings),
        benchmark=settings.cudnn_benchmark if settings.accelerator == "cuda" else None,
        precision=settings.precision,  # type: ignore[arg-type]
        max_epochs=config.epochs,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.gradient_clip,
        sync_batchnorm=settings.sync_batchnorm is True,
        logger=[_logger(name, config, run, step) for name in settings.loggers],
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run.path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=settings.log_every,
        use_distributed_sampler=False,
    )


def _strategy(settings: TrainerConfig) -> str | Strategy:
    """`auto` with several processes is DDP."""
    several = settings.num_nodes > 1 or (isinstance(settings.devices, int) and settings.devices > 1)
    if settings.strategy == "ddp" or (
        several and settings.strategy == "auto" and not in_notebook()
    ):
        return DDPStrategy(timeout=timedelta(minutes=settings.timeout_minutes))
    return settings.strategy


def _logger(name: str, config: TrainConfig, run: Run, step: int) -> Logger:
    """Events that a killed process logged after its last checkpoint are purged if the logger
    supports it."""
    if name == "tensorboard":
        return TensorBoardLogger(
            run.path,
            name="tensorboard",
            version="",
            default_hp_metric=False,
            purge_step=step + 1 if step else None,
        )
    logger: Logger
    if name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        project = os.environ.get("WANDB_PROJECT", "kinfolk")
        logger = WandbLogger(name=run.path.name, save_dir=run.path, project=project)
    else:
        from lightning.pytorch.loggers import MLFlowLogger

        logger = MLFlowLogger(
            experiment_name="kinfolk", run_name=run.path.name, save_dir=str(run.path / "mlflow")
        )
    logger.log_hyperparams(config.model_dump(mode="json"))
    return logger


class ProgressBar(pl.Callback):
    """Shows the progress of all epochs as one bar on `console`. Must come after `MetricsLog` in the
    list of callbacks: it shows its last line."""

    def __init__(self, console: Console | None, metrics_log: MetricsLog, epochs: int) -> None:
        self.console, self.metrics_log, self.epochs = console, metrics_log, epochs
        self._bar: Progress | None = None
        self._steps, self._first, self._is_estimated = 0, 0.0, False
        self._shown = 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.console is None or not self.console.is_terminal or not trainer.is_global_zero:
            return
        names = ("description", "fields[figures]", "fields[left]")
        texts = [
            TextColumn(f"{{task.{name}}}", table_column=Column(no_wrap=True)) for name in names
        ]
        self._bar = Progress(texts[0], BarColumn(8), *texts[1:], console=self.console)
        done, total = self._progress(trainer)
        self._task = self._bar.add_task(
            "training", total=total, completed=done, figures="", left=""
        )
        self._bar.start()

    def _progress(self, trainer: pl.Trainer) -> tuple[int, int]:
        """Steps of the whole training that are done, and their number."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        return done, self.epochs * int(trainer.num_training_batches)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(module, TrainingModule)
        now, log = time.perf_counter(), self.metrics_log
        self._estimate(trainer, module, now)
        if self._bar is None:
            return
        self._bar.advance(self._task)
        # reading the loss makes the host wait for the device
        if now - self._shown < SECONDS_PER_UPDATE:
            return
        self._shown = now
        per_step = log.seconds / max(log.steps, 1)
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
        batches = int(trainer.num_training_batches)
        left = (self.epochs - trainer.current_epoch) * batches - batch_idx - 1
        self._bar.update(
            self._task,
            description=f"epoch {trainer.current_epoch + 1}/{self.epochs}",
            figures=describe({**log.row, "loss": loss}, speed=False),
            left=f"{duration(per_step * left)} left",
        )

    def _estimate(self, trainer: pl.Trainer, module: TrainingModule, now: float) -> None:
        """Logs once how long the whole training will take, without its first, slow step."""
        if self._is_estimated or not trainer.is_global_zero:
            return
        self._steps += 1
        if self._steps == 1:
            self._first = now
        elif now - self._first >= ESTIMATE_AFTER or self._steps > ESTIMATE_STEPS:
            self._is_estimated = True
            per_step = (now - self._first) / (self._steps - 1)
            done, total = self._progress(trainer)
            if (left := per_step * (total - done)) >= SHORTEST_ESTIMATE:
                LOG.info(
                    "about %s left at %.0f samples/s, without measurements",
                    duration(left),
                    module.batch_size / per_step,
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
    """The metrics of an epoch in one short line."""
    parts = [f"loss {row['loss']:.3f}"]
    parts += [f"kNN {100 * row['knn']:.1f} %"] if "knn" in row else []
    parts += [f"flagged {100 * row['flagged']:.2f} %"] if "flagged" in row else []
    by_anchor = f" ({row['anchor_f1']:.2f} per anchor)" if speed and "anchor_f1" in row else ""
    parts += [f"F1 {row['f1']:.2f}{by_anchor}"] if speed and "f1" in row else []
    parts += [f"{row['images_per_second']:.0f} samples/s"] if speed else []
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """3725 → "1 h 02 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {int(seconds):02d} s" if minutes else f"{int(seconds)} s"
