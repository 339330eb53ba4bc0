"""The one door to training, for Python and for the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from kinfolk.data.images import ImageData
from kinfolk.data.prepare import hand_over, take_over
from kinfolk.data.sample_table import samples_digest
from kinfolk.data.source import Source
from kinfolk.errors import KinfolkError, UsageError, warn_if_silent
from kinfolk.files import plain_errors
from kinfolk.models.towers import save_towers
from kinfolk.models.weights import save_encoder
from kinfolk.training.build import assemble, build_framework, build_optimizers, build_views, fit_to_data, placed, read_text
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.epoch_metrics import ClusterQuality, Knn, require_measured
from kinfolk.training.launch import announce, global_rank, naming_lost_ranks, sign_in, telling_others, together, wait_for
from kinfolk.training.loader import BatchLoader
from kinfolk.training.metrics_log import FILE_ONLY, held_warnings, logging_to, quiet_lightning
from kinfolk.training.module import TrainingModule
from kinfolk.training.progress import describe
from kinfolk.training.refresh import Refresh
from kinfolk.training.run_folder import (
    Run,
    held,
    last_state,
    nothing_begun,
    num_processes,
    open_data,
    read_data,
    require_same,
    tell_start,
    write_start,
)
from kinfolk.training.settings import identity, refuse_changes
from kinfolk.training.snapshots import Snapshots
from kinfolk.training.trainer import build_trainer

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.utils.data import Dataset

    Data = str | os.PathLike[str] | npt.NDArray[Any] | torch.Tensor | Dataset[Any] | Mapping[str, Dataset[Any]]

LOG = logging.getLogger("kinfolk.training")


def train(
    data: Data | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    method: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    recipe: str | os.PathLike[str] | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Run:
    """Learns an encoder from pictures, and leaves everything about it in the folder `out`, but for the page: `kinfolk.api.train` writes
    that too, and says what the arguments are.

    Returns:
        The run; its `rank` is above 0 in the processes that helped rank zero.
    """
    if out is None:
        raise UsageError("`out` is required: the folder to write the run into")
    if resume and overwrite:
        raise UsageError("`resume` and `overwrite` exclude each other; give one of them")
    run = Run(Path(out))
    stored = TrainConfig.load(run.config) if resume and run.config.exists() else None
    if resume and stored is None and data is None and recipe is None:
        raise UsageError(nothing_begun(run))
    source_name = os.fspath(data) if isinstance(data, str | os.PathLike) else None
    named = {"data.source": source_name, "method": method, "epochs": epochs, "batch_size": batch_size, "seed": seed}
    with held_warnings() as notes:
        config = placed(assemble(stored, recipe, named, settings))
    run = replace(run, rank=global_rank(num_processes(config) // config.trainer.num_nodes))
    several = num_processes(config) > 1
    console = Console(stderr=True) if progress and run.rank == 0 else None
    sign_in(run.rank, several)
    with ExitStack() as stack:
        with telling_others(run.launch, run.rank, several):
            if run.rank == 0 and (resume or overwrite):
                run.require_own()
            elif run.rank == 0:
                run.require_unused()
            stack.enter_context(held(run.path, run.rank))
        stack.enter_context(together(run.launch, run.rank, several))
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(plain_errors(run.path))
        if run.rank > 0:
            return _help(run, data, config.epochs, resume)
        source = open_data(data, config, run)  # the others hear by now that rank zero is at work
        config = fit_to_data(config, source)
        if stored is not None:
            refuse_changes(stored, config)
        return _run(run, config, source, resume, overwrite, console, notes)


def _help(run: Run, data: Data | None, epochs: int, resume: bool) -> Run:
    """Another rank: waits until rank zero has prepared everything and maps its data; lists and reads the source only where the cache is
    not there, as on another machine with a cache folder of its own."""
    wait_for(run.launch)
    config = TrainConfig.load(run.config)
    state: dict[str, Any] | None = read_checkpoint(run.checkpoint)["kinfolk"] if resume and run.checkpoint.exists() else None
    if state is not None and state["epoch"] >= epochs:  # there is nothing to resume, as rank zero says
        return run
    images = take_over(run.handover)
    if images is None:
        images = read_data(open_data(data, config, run), config, run, several=True, progress=False)
    return _fit(run, config, images, state, overwrite=False, console=None)


def _run(
    run: Run, config: TrainConfig, source: Source, resume: bool, overwrite: bool, console: Console | None, notes: Sequence[str]
) -> Run:
    """Nothing is written, and with `overwrite` nothing removed, before data and method are known to be good."""
    several = num_processes(config) > 1
    with held_warnings() as passed_over:
        state = last_state(run, source, config) if resume else None
    if state is not None and state["epoch"] >= config.epochs:
        if several:
            announce(run.launch)
        with logging_to(None, console):
            LOG.info("%s", f"{run.path} is finished: {state['epoch']} of {config.epochs} epochs are done, there is nothing to resume")
        return run
    images = read_data(source, config, run, several, progress=console is not None)
    if state is not None:
        require_same(run, images)
    source.release()
    return _fit(run, config, images, state, overwrite, console, (*notes, *passed_over))


def _fit(
    run: Run,
    config: TrainConfig,
    images: ImageData,
    state: dict[str, Any] | None,
    overwrite: bool,
    console: Console | None,
    notes: Sequence[str] = (),
) -> Run:
    """The training itself, on any rank."""
    several = num_processes(config) > 1
    if images.stream is not None:
        images.stream.note = run.quarantine
    BatchLoader(images, config.batch_size, config.seed, 0, num_processes(config))
    text = read_text(images, config, run, known=state is not None or run.rank > 0)
    with held_warnings() as doubts:
        framework = build_framework(config, images, None if text is None else text.tokenizer, resumed=state is not None)
        framework.set_progress(0, config.epochs)  # what it has to say of the length of the training
        warn_if_silent(config.method, framework.silent_reason())
    framework.set_groups(None if images.groups is None else images.groups[: images.num_train])
    views, autocast = build_views(config), torch.bfloat16 if "bf16" in config.trainer.precision else None
    knn = Knn(images, views, config.knn, epochs=config.epochs, seed=config.seed, autocast=autocast)
    require_measured(framework, knn, config.method)
    if run.rank == 0:
        write_start(run, config, images, state, overwrite, text)
        if several:
            hand_over(images, run.handover)
            announce(run.launch)
    with logging_to(run.log if run.rank == 0 else None, console), quiet_lightning():
        tell_start(run, config, images, state)
        for doubt in (*notes, *doubts) if run.rank == 0 else ():
            LOG.warning("%s", doubt)
        module = TrainingModule(
            framework,
            images,
            views,
            partial(build_optimizers, config),
            method=config.method,
            batch_size=config.batch_size,
            epochs=config.epochs,
            seed=config.seed,
            channels_last=config.trainer.channels_last,
            text=text,
            chunk_size=config.trainer.chunk_size,
        )
        refresh = Refresh(images, views, epochs=config.epochs, autocast=autocast)
        snapshots = Snapshots(run, images, views, config.snapshots, epochs=config.epochs, seed=config.seed, autocast=autocast)
        own = identity(config, samples_digest(images.samples), images.num_train)
        meta = {"method": config.method, "seed": config.seed, "views": views.config(), "num_samples": images.num_train}
        meta |= {"samples": own["samples"], "settings": own["settings_digest"]}
        trainer = build_trainer(
            config,
            run,
            state,
            own,
            [knn, ClusterQuality(images, config.knn.nmi_normaliser), refresh, _figures, snapshots],
            refresh,
            lambda epoch: _export(module, run, {**meta, "epoch": epoch}),
            console,
        )
        try:
            with naming_lost_ranks(lambda: module.kept()) if several else nullcontext():
                trainer.fit(module, ckpt_path=None if state is None else run.checkpoint, weights_only=True)
        except KinfolkError as error:
            LOG.error("%s", error, extra={FILE_ONLY: True})
            raise
        rows = run.epochs()
        LOG.info("%s", f"finished: {describe(rows[-1])}; the run is in {run.path}" if rows else f"finished; the run is in {run.path}")
    return run


def _figures(module: TrainingModule, epoch: int) -> dict[str, float]:
    return module.framework.metrics


def _export(module: TrainingModule, run: Run, meta: dict[str, Any]) -> None:
    save_encoder(module.framework.encoder, run.path, meta)
    if module.text is not None:
        save_towers(module.framework, run.path, meta)
