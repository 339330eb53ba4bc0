"""The one door to training, for Python and for the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from kinfolk.data.images import ImageData
from kinfolk.data.prepare import prepare
from kinfolk.data.quarantine import read_quarantine, summary, write_quarantine
from kinfolk.data.samples import Samples
from kinfolk.data.sources import Source, open_source
from kinfolk.data.unchanged import check_unchanged
from kinfolk.errors import UsageError
from kinfolk.models.weights import save_encoder
from kinfolk.training.assemble import assemble, build_framework, build_optimizers, build_views
from kinfolk.training.changes import refuse_changes
from kinfolk.training.checkpoint import read_checkpoint, write_text
from kinfolk.training.config import TrainConfig
from kinfolk.training.devices import global_rank
from kinfolk.training.knn import Knn
from kinfolk.training.loader import BatchLoader
from kinfolk.training.log import logging_to, quiet_lightning
from kinfolk.training.module import TrainingModule
from kinfolk.training.progress import describe
from kinfolk.training.ranks import announce, wait_for
from kinfolk.training.run import Run
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
    """Learns an encoder from pictures, and leaves everything about it in the folder `out`.

    Args:
        data: a folder, array file, table, archive, "digits", an array of pictures (N, H, W, 3), or a map-style `Dataset`.
        out: the run folder; must be new or empty unless `resume` or `overwrite`.
        method: `framework[+detector[:action]]`, e.g. "sogclr+glofnd"; by default "simclr".
        epochs, batch_size, seed: of the training; `batch_size` is over all devices together.
        recipe: a ready configuration to start from, by name or path.
        settings: any other key of the configuration: `{"optimizer.lr": 0.1}` or `["optimizer.lr=0.1"]`.
        resume: goes on with the run in `out`, exactly where its last checkpoint is; begins it where there is none. What is not given is
            taken from the run; what is given must agree with it.
        overwrite: replaces the run in `out`, and removes nothing there that no run wrote.
        progress: shows a bar, or lines where there is no terminal.

    Returns:
        The run; its `rank` is above 0 in the processes that helped rank zero.

    Example:
        run = kf.train(data="digits", out="runs/digits", method="sogclr+glofnd", epochs=20, settings={"detector.alpha": 0.05})
    """
    if out is None:
        raise UsageError("`out` is required: the folder to write the run into")
    if resume and overwrite:
        raise UsageError("`resume` and `overwrite` exclude each other; give one of them")
    run = Run(Path(out))
    stored = TrainConfig.load(run.config) if resume and run.config.exists() else None
    source_name = os.fspath(data) if isinstance(data, str | os.PathLike) else None
    named = {"data.source": source_name, "method": method, "epochs": epochs, "batch_size": batch_size, "seed": seed}
    config = assemble(stored, recipe, named, settings)
    run = replace(run, rank=global_rank(_devices(config)))
    if stored is not None:
        refuse_changes(stored, config)
    elif run.rank == 0 and not resume and not overwrite:
        run.require_unused()
    console = Console(stderr=True) if progress and run.rank == 0 else None
    with torch.random.fork_rng():
        return _run(run, config, _opened(data, config), resume, overwrite, console)


def _run(run: Run, config: TrainConfig, source: Source, resume: bool, overwrite: bool, console: Console | None) -> Run:
    """Nothing is written, and with `overwrite` nothing removed, before data and method are known to be good."""
    several = _devices(config) > 1 or config.trainer.num_nodes > 1
    if run.rank > 0:
        wait_for(run.launch)
    state = _state(run) if resume else None
    if state is not None and run.rank == 0:
        check_unchanged(Samples.read(run.samples), source, read_quarantine(run.quarantine))
    if state is not None and state["finished"]:
        with logging_to(None, console):
            LOG.info("%s", f"{run.path} is finished: {state['epoch']} of {config.epochs} epochs are done, there is nothing to resume")
        return run
    images = _prepared(source, config, run, several, console)
    BatchLoader(images, config.batch_size, config.seed, 0, _devices(config) * config.trainer.num_nodes)
    framework = build_framework(config, images)
    if run.rank == 0:
        _write_start(run, config, images, state, overwrite)
        if several:
            announce(run.launch)
    with logging_to(run.log if run.rank == 0 else None, console), quiet_lightning():
        _tell_start(run, config, images, state)
        views = build_views(config)
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
        )
        autocast = torch.bfloat16 if "bf16" in config.trainer.precision else None
        knn = Knn(images, views, config.knn, epochs=config.epochs, seed=config.seed, autocast=autocast)
        meta = {"method": config.method, "seed": config.seed, "views": views.config(), "num_samples": images.num_train}
        trainer = build_trainer(
            config, run, 0 if state is None else state["step"], [knn], lambda epoch: _export(module, run, {**meta, "epoch": epoch}), console
        )
        trainer.fit(module, ckpt_path=None if state is None else run.checkpoint, weights_only=True)
        rows = run.epochs()
        LOG.info("%s", f"finished: {describe(rows[-1])}; the run is in {run.path}" if rows else f"finished; the run is in {run.path}")
    return run


def _devices(config: TrainConfig) -> int:
    assert isinstance(config.trainer.devices, int), "resolved"
    return config.trainer.devices


def _opened(data: Data | None, config: TrainConfig) -> Source:
    named = config.data
    spec = named.source if data is None else data
    if spec is None:
        raise UsageError("`data` is required: a folder, an array file, a table, an archive, or digits")
    return open_source(
        spec,
        labels_from_folders=named.labels_from_folders,
        image_column=named.image_column,
        label_column=named.label_column,
        caption_column=named.caption_column,
        group_column=named.group_column,
        split_column=named.split_column,
    )


def _prepared(source: Source, config: TrainConfig, run: Run, several: bool, console: Console | None) -> ImageData:
    """Pixels that had to be decoded, or that several processes read, are kept in the run folder unless another place is named."""
    cache = config.data.cache_dir or (run.path / "cache" if several or source.native_size is None else None)
    assert config.data.image_size is not None, "resolved"
    return prepare(
        source,
        image_size=config.data.image_size,
        workers=config.data.workers,
        pixel_cap=config.data.pixel_cap,
        cache_dir=cache,
        progress=console is not None,
        shared=several,
    )


def _state(run: Run) -> dict[str, Any] | None:
    """What the last checkpoint says of itself; None where there is none yet."""
    if not run.checkpoint.exists():
        return None
    state: dict[str, Any] = read_checkpoint(run.checkpoint)["kinfolk"]
    return state


def _write_start(run: Run, config: TrainConfig, images: ImageData, state: dict[str, Any] | None, overwrite: bool) -> None:
    """The folder as it is before the first step, or at the checkpoint; config.yaml comes last and says that the rest is there."""
    if state is None and overwrite:
        run.clear(keep=("cache",))
    run.path.mkdir(parents=True, exist_ok=True)
    run.sweep()
    run.cut_metrics(0 if state is None else state["step"])
    if state is None:
        images.samples.to_parquet(run.samples)
        write_quarantine(images.quarantine, run.quarantine)
    write_text(run.config, config.to_yaml())


def _tell_start(run: Run, config: TrainConfig, images: ImageData, state: dict[str, Any] | None) -> None:
    if run.rank > 0:
        return
    refused = summary(images.quarantine, len(images) + len(images.quarantine), run.quarantine)
    if refused is not None:
        LOG.warning("%s", refused)
    if config.trainer.accumulate > 1:
        LOG.info("gradients of %d batches are accumulated for each step; this adds no negatives", config.trainer.accumulate)
    if state is not None:
        LOG.info("resuming after step %d, %d of %d epochs done", state["step"], state["epoch"], config.epochs)
    where = f"{config.trainer.accelerator} × {_devices(config) * config.trainer.num_nodes}, {config.trainer.precision}"
    LOG.info("%s", f"{config.method} on {images.num_train:,} samples for {config.epochs} epochs, {config.model.name}, {where}")


def _export(module: TrainingModule, run: Run, meta: dict[str, Any]) -> None:
    save_encoder(module.framework.encoder, run.path, meta)
