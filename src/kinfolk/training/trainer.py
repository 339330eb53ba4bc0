"""The Lightning trainer of a run: strategy, loggers, and callbacks in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console

from kinfolk.training.checkpoint import AtomicCheckpointIO, CheckpointSaver
from kinfolk.training.config import TrainConfig, TrainerConfig
from kinfolk.training.launch import in_notebook
from kinfolk.training.metrics_log import Measurement, MetricsLog
from kinfolk.training.progress import ProgressBar
from kinfolk.training.refresh import Refresh
from kinfolk.training.run_folder import Run


def build_trainer(
    config: TrainConfig,
    run: Run,
    state: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    measurements: Sequence[Measurement],
    refresh: Refresh,
    export: Callable[[int, int], None],
    console: Console | None,
) -> pl.Trainer:
    """A trainer that writes into `run`. It starts after the checkpoint with the `kinfolk` entry `state`, or at the beginning if None."""
    settings, step = config.trainer, 0 if state is None else int(state["step"])
    metrics_log = MetricsLog(run, measurements, settings.log_every)
    bar = ProgressBar(console, metrics_log, config.epochs)
    refresh.progress = bar.track
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
        callbacks=[
            refresh,
            metrics_log,
            bar,
            CheckpointSaver(run.checkpoint, config.epochs, config.checkpoint, identity, export, lambda: metrics_log.row.get("knn"), state),
        ],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run.path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=settings.log_every,
        use_distributed_sampler=False,
    )


def _strategy(settings: TrainerConfig) -> str | Strategy:
    """`auto` with several processes is DDP, in which parts without gradient (momentum encoders) must have `requires_grad` False."""
    several = settings.num_nodes > 1 or (isinstance(settings.devices, int) and settings.devices > 1)
    ddp = settings.strategy == "ddp" or (settings.strategy == "auto" and several and not in_notebook())
    return DDPStrategy(timeout=timedelta(minutes=settings.timeout_minutes)) if ddp else settings.strategy


def _logger(name: str, config: TrainConfig, run: Run, step: int) -> Logger:
    """Events that a killed process logged after its last checkpoint are purged if the logger supports it."""
    if name == "tensorboard":
        return TensorBoardLogger(run.path, name="tensorboard", version="", default_hp_metric=False, purge_step=step + 1 if step else None)
    logger: Logger
    if name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        logger = WandbLogger(name=run.path.name, save_dir=run.path, project="kinfolk")
    else:
        from lightning.pytorch.loggers import MLFlowLogger

        logger = MLFlowLogger(experiment_name="kinfolk", run_name=run.path.name, save_dir=str(run.path / "mlflow"))
    logger.log_hyperparams(config.model_dump(mode="json"))
    return logger
