"""Training from start to end; `kinfolk.api.train` adds the report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from torch import nn

from kinfolk.data.images import ImageData
from kinfolk.data.prepare import hand_over, take_over
from kinfolk.data.sample_table import Samples, samples_digest
from kinfolk.data.source import Source
from kinfolk.data.text import NumberedTexts
from kinfolk.detectors.base import Detector
from kinfolk.errors import KinfolkError, UsageError, plural, short, warn
from kinfolk.files import explain_file_errors
from kinfolk.models.text import SentenceEncoder
from kinfolk.models.weights import save_encoder, save_towers
from kinfolk.seeding import preserve_random_state
from kinfolk.training.build import Parts, build_framework, build_optimizers, build_views, read_text
from kinfolk.training.checkpoint import (
    AtomicCheckpointIO,
    CheckpointSaver,
    read_checkpoint,
    restore_error,
)
from kinfolk.training.config import TrainConfig, TrainerConfig
from kinfolk.training.defaults import (
    assemble,
    fit_batch,
    fit_text,
    fit_to_data,
    names_batch_size,
    with_absolute_paths,
)
from kinfolk.training.epoch_end import ClusterQuality, Knn, Refresh, require_knn
from kinfolk.training.launch import (
    Rendezvous,
    explain_lost_ranks,
    float32_products,
    global_rank,
)
from kinfolk.training.loader import check_batch_size
from kinfolk.training.metrics_log import (
    FILE_ONLY,
    Measurement,
    MetricsLog,
    ProgressBar,
    collect_warnings,
    describe,
    logging_to,
    quiet_lightning,
)
from kinfolk.training.module import TrainingModule, one_pixel_in_float32
from kinfolk.training.run_folder import (
    Run,
    explain_missing_config,
    last_checkpoint_state,
    lock_run_folder,
    log_start,
    num_processes,
    open_data,
    read_data,
    require_same_samples,
    write_start,
)
from kinfolk.training.settings import identity, refuse_changes

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.utils.data import Dataset

    Array = npt.NDArray[Any] | torch.Tensor
    Data = (
        str
        | os.PathLike[str]
        | Array
        | tuple[Array, Any]
        | Dataset[Any]
        | Mapping[str, Dataset[Any]]
    )

LOG = logging.getLogger("kinfolk.training")
NAMED = {"lr": "optimizer.lr", "image_size": "views.size"}
"""Arguments of `kf.train` whose setting has another name."""


def train(
    data: Data | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | None = None,
    model: str | nn.Module | None = None,
    detector: Detector | None = None,
    action: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    **named: Any,
) -> Run:
    """Trains without a report. `kinfolk.api.train` documents the arguments; `named` are
    settings."""
    if out is None:
        raise UsageError("`out` is required: the folder to write the run into")
    if resume and overwrite:
        raise UsageError("`resume` and `overwrite` exclude each other; give one of them")
    run = Run(Path(out))
    stored = TrainConfig.load(run.config) if resume and run.config.exists() else None
    if resume and stored is None and data is None and recipe is None:
        raise UsageError(explain_missing_config(run))
    if detector is not None and not isinstance(detector, Detector):
        raise UsageError(
            f"`detector` (={detector!r}) must be a kf.Detector; name one of the library in `method`"
        )
    if action is not None and detector is None:
        raise UsageError(
            f"`action` (={action}) belongs to a `detector` object; without one write it in"
            f" `method`, as in simclr+fnc:{action}"
        )
    parts = Parts(None if isinstance(model, str) else model, detector)
    arguments = {
        "data.source": os.fspath(data) if isinstance(data, str | os.PathLike) else None,
        "model.name": model if isinstance(model, str) else None,
        **{NAMED.get(name, name): value for name, value in named.items()},
        **parts.settings(action),
    }
    with collect_warnings() as notes:
        config = with_absolute_paths(assemble(stored, recipe, arguments, settings))
    chosen = names_batch_size(recipe, arguments, settings)
    chosen = chosen or (recipe is None and stored is not None)
    run = replace(run, rank=global_rank(num_processes(config) // config.trainer.num_nodes))
    console = Console(stderr=True) if progress and run.rank == 0 else None
    number = num_processes(config)
    ranks = Rendezvous(run.rank, number) if number > 1 else None
    start = _Start(run, config, parts, overwrite, console, chosen, tuple(notes), ranks)
    with ExitStack() as stack:
        if ranks is not None:
            stack.enter_context(ranks)
        if run.rank == 0 and (resume or overwrite):
            run.require_run_folder()
        elif run.rank == 0:
            run.require_unused()
        stack.enter_context(lock_run_folder(run.path, run.rank))
        stack.enter_context(preserve_random_state())
        stack.enter_context(explain_file_errors(run.path))
        if run.rank > 0:
            return _fit_as_helper(start, data, resume)
        source = open_data(data, config, run)
        config = fit_to_data(config, source)
        if stored is not None:
            if run.samples.exists():  # the run may have reduced the batch that is given again
                samples = Samples.read(run.samples)
                config = fit_text(config, samples)
                with collect_warnings():
                    config = fit_batch(config, samples.num_train, chosen)
            refuse_changes(stored, config)
        return _run(replace(start, config=config), source, resume)


@dataclass(frozen=True)
class _Start:
    run: Run
    config: TrainConfig
    parts: Parts
    overwrite: bool
    console: Console | None
    chosen_batch: bool
    notes: tuple[str, ...]
    ranks: Rendezvous | None
    """None with one process."""


def _require_negatives(images: ImageData, config: TrainConfig, name: str) -> None:
    texts = images.texts
    if images.num_train < 2:
        what = "image" if texts is None else "pair"
        others = sorted({short(split) for split in images.samples.splits} - {"train"})
        rest = f"; the splits of the rest are {', '.join(others)}" if others else ""
        raise UsageError(
            f"{name} has {plural(images.num_train, f'training {what}')}; a training contrasts"
            f" {what}s with each other and needs at least 2{rest}"
        )
    if texts is None or texts.negative_ids is not None:
        return
    groups = texts.groups[: images.num_train]
    if config.framework.get("known_groups", True) and not bool((groups != groups[0]).any()):
        raise UsageError(
            f"the {images.num_train:,} training pairs of {name} are one group, so that no pair has"
            " a negative; --set framework.known_groups=false uses equal texts as negatives"
        )


def _fit_as_helper(start: _Start, data: Data | None, resume: bool) -> Run:
    """Trains on a rank above zero, with the data of rank zero or, on another machine, its own."""
    run = start.run
    assert start.ranks is not None
    start.ranks.wait()
    config = TrainConfig.load(run.config)
    has_state = resume and run.checkpoint.exists()
    state = read_checkpoint(run.checkpoint)["kinfolk"] if has_state else None
    if state is not None and state["epoch"] >= start.config.epochs:  # rank zero logs it
        return run
    images = take_over(run.handover)
    if images is None:
        images = read_data(open_data(data, config, run), config, run, several=True, progress=False)
    return _fit(replace(start, config=config), images, state)


def _run(start: _Start, source: Source, resume: bool) -> Run:
    """Trains on rank zero. Nothing is written or removed before data and method are checked."""
    run, config, console = start.run, start.config, start.console
    with collect_warnings() as refused:
        state = last_checkpoint_state(run, config) if resume else None
    if state is not None and state["epoch"] > config.epochs:
        raise UsageError(
            f"`epochs` (={config.epochs}) is less than the {state['epoch']} epochs that {run.path}"
            " has done; leave `epochs` (--epochs) out, or give a larger number to train further"
        )
    if state is not None and state["epoch"] == config.epochs:
        if start.ranks is not None:
            start.ranks.mark_ready()
        with logging_to(None, console):
            done = f"{run.path} is finished after {plural(config.epochs, 'epoch')}"
            LOG.info("%s; give a larger `epochs` (--epochs) to train further", done)
        return replace(run, unchanged=True)
    several = start.ranks is not None
    images = read_data(source, config, run, several, progress=console is not None)
    if state is not None:
        require_same_samples(run, images)
    _require_negatives(images, config, short(source.name))
    source.release()
    config = fit_text(config, images.samples)
    with collect_warnings() as reduced:
        if state is None:
            config = fit_batch(config, images.num_train, start.chosen_batch)
    notes = (*start.notes, *refused, *reduced)
    return _fit(replace(start, config=config, notes=notes), images, state)


def _fit(start: _Start, images: ImageData, state: dict[str, Any] | None) -> Run:
    run, config, console = start.run, start.config, start.console
    if images.stream is not None:
        images.stream.note = run.quarantine
    check_batch_size(config.batch_size, images.num_train, num_processes(config))
    resumed = state is not None
    text = read_text(images, config, run, resumed=resumed or run.rank > 0)
    tokenizer = None if text is None else text.tokenizer
    with collect_warnings() as build_warnings:
        framework = build_framework(config, images, tokenizer, resumed, start.parts, run.cache)
        framework.set_progress(0, config.epochs)  # raises warnings about the length of the training
        if (why := framework.silent_reason()) is not None:
            warn(f"the detector of {config.method} will flag nothing in this training: {why}")
    framework.set_groups(None if images.groups is None else images.of_ids(images.groups))
    knn = Knn(images, config)
    require_knn(framework, knn, config.method)
    if run.rank == 0:
        write_start(run, config, images, state, start.overwrite, text)
        if start.ranks is not None:
            hand_over(images, run.handover)
            start.ranks.mark_ready()
    with logging_to(run.log if run.rank == 0 else None, console), quiet_lightning():
        log_start(run, config, images, state)
        for warning in (*start.notes, *build_warnings) if run.rank == 0 else ():
            LOG.warning("%s", warning)
        views, optimizers = build_views(config), partial(build_optimizers, config)
        module = TrainingModule(framework, images, views, config, optimizers, text)
        measurements: list[Measurement] = [
            knn,
            ClusterQuality(images, config.knn.nmi_normaliser),
            Refresh(images if images.texts is None else NumberedTexts(images.texts)),
            lambda module, epoch: module.framework.metrics,
        ]
        this_run = identity(config, samples_digest(images.samples), images.num_train)
        meta = {
            "method": config.method,
            "seed": config.seed,
            "views": views.config(),
            "num_samples": images.num_train,
            "samples": this_run["samples"],
            "settings": this_run["settings_digest"],
            "epochs": config.epochs,
        }

        def export(epoch: int, step: int) -> None:
            about = {**meta, "epoch": epoch, "step": step}
            save_encoder(framework.encoder, run.path, about)
            if text is not None:
                save_towers(framework, run.path, about)
            if isinstance(framework.encoder, SentenceEncoder):
                framework.encoder.save(run.sentence_transformer)

        trainer = build_trainer(config, run, state, this_run, measurements, export, console)
        try:
            # `describe_saved` is set when the training starts
            lost = (
                explain_lost_ranks(lambda: module.describe_saved())
                if start.ranks
                else nullcontext()
            )
            products = float32_products(config.trainer.matmul_precision)
            checkpoint = None if state is None else run.checkpoint
            with lost, one_pixel_in_float32(framework), products:
                trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            if trainer.interrupted:  # Lightning's answer to Ctrl-C before the first step
                raise KeyboardInterrupt from None
            raise
        except KinfolkError as error:
            LOG.error("%s", error, extra={FILE_ONLY: True})
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            if state is None or module.started:
                raise
            raise restore_error(error, run.checkpoint) from error
        rows = run.epochs()
        metrics = f": {describe(rows[-1])}" if rows else ""
        LOG.info("%s", f"finished{metrics}; the run is in {run.path}")
    return replace(run, images=images, features=knn.last_features())


def build_trainer(
    config: TrainConfig,
    run: Run,
    state: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    measurements: Sequence[Measurement],
    export: Callable[[int, int], None],
    console: Console | None,
) -> pl.Trainer:
    """Of the measurements, callbacks see the training first. `state`: of the checkpoint."""
    settings, step = config.trainer, 0 if state is None else int(state["step"])
    metrics_log = MetricsLog(run, measurements, settings.log_every)
    saver = CheckpointSaver(run.checkpoint, config, identity, export, state)
    callbacks: list[Any] = [each for each in measurements if isinstance(each, pl.Callback)]
    callbacks += [metrics_log, ProgressBar(console, metrics_log, config.epochs), saver]
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=_strategy(settings),
        benchmark=settings.accelerator == "cuda",
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
    if settings.num_nodes == settings.devices == 1:
        return "auto"
    return DDPStrategy(timeout=timedelta(minutes=settings.timeout_minutes))


def _logger(name: str, config: TrainConfig, run: Run, step: int) -> Logger:
    if name == "tensorboard":
        purged = step + 1 if step else None  # what a killed process logged later
        tensorboard: dict[str, Any] = {"default_hp_metric": False, "purge_step": purged}
        return TensorBoardLogger(run.path, name="tensorboard", version="", **tensorboard)
    logger: Logger
    if name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        project = os.environ.get("WANDB_PROJECT", "kinfolk")
        logger = WandbLogger(name=run.path.name, save_dir=run.path, project=project)
    else:
        from lightning.pytorch.loggers import MLFlowLogger

        folder = str(run.path / "mlflow")
        logger = MLFlowLogger(experiment_name="kinfolk", run_name=run.path.name, save_dir=folder)
    logger.log_hyperparams(config.model_dump(mode="json"))
    return logger
