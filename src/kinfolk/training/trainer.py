"""The Lightning trainer of a run: strategy, loggers, and the callbacks in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console

from kinfolk.training.checkpoint import AtomicCheckpointIO, Keeper
from kinfolk.training.config import TrainConfig
from kinfolk.training.metrics_log import Journal, Measurement
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
    export: Callable[[int], None],
    console: Console | None,
) -> pl.Trainer:
    """A trainer that writes into `run`, from the checkpoint on that says `state` of itself, or from the start."""
    settings, step = config.trainer, 0 if state is None else int(state["step"])
    journal = Journal(run, measurements, settings.log_every)
    bar = ProgressBar(console, journal, config.epochs)
    refresh.progress = bar.track
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=_strategy(settings.strategy, settings.devices, settings.num_nodes),
        precision=settings.precision,  # type: ignore[arg-type]
        max_epochs=config.epochs,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.gradient_clip,
        sync_batchnorm=settings.sync_batchnorm,
        logger=[_logger(name, config, run, step) for name in settings.loggers],
        callbacks=[
            refresh,
            journal,
            bar,
            Keeper(run.checkpoint, config.epochs, config.checkpoint, identity, export, lambda: journal.row.get("knn"), state),
        ],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run.path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=settings.log_every,
        use_distributed_sampler=False,
    )


def _strategy(name: str, devices: int | str, num_nodes: int) -> str | Strategy:
    """`auto` with several processes is DDP that expects parts without gradient (momentum encoders) to say so by `requires_grad`."""
    several = num_nodes > 1 or (isinstance(devices, int) and devices > 1)
    return DDPStrategy() if name == "auto" and several and not _interactive() else name


def _interactive() -> bool:
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return bool(_IS_INTERACTIVE)


def _logger(name: str, config: TrainConfig, run: Run, step: int) -> Logger:
    """Events a killed process logged after its last checkpoint are purged where the logger can do that."""
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
