"""Before the first step: the data opened and read, the last checkpoint looked at, the run folder made ready."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

from kinfolk.data.at_depth import at_depth
from kinfolk.data.identity import samples_digest
from kinfolk.data.images import ImageData
from kinfolk.data.prepare import prepare
from kinfolk.data.quarantine import read_quarantine, summary, write_quarantine
from kinfolk.data.samples import Samples
from kinfolk.data.source import Source
from kinfolk.data.sources import open_source
from kinfolk.data.stream import StreamSource
from kinfolk.data.text import StreamedText, TextData
from kinfolk.data.unchanged import check_unchanged
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError
from kinfolk.files import DamagedFileError, write_text
from kinfolk.training.changes import require_identity
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.run import Run
from kinfolk.training.snapshots import cut_snapshots

LOG = logging.getLogger("kinfolk.training")


def open_data(data: object | None, config: TrainConfig, run: Run | None = None) -> Source:
    """The source of the pictures: `data`, or else what the configuration names. `run`: whose cache may know more of it."""
    named = config.data
    spec = named.source if data is None else data
    if spec is None:
        raise UsageError("`data` is required: a folder, an array file, a table, an archive, or digits")
    if named.streaming:
        return _streamed(spec, config, run)
    source = open_source(
        spec,
        labels_from_folders=named.labels_from_folders,
        image_column=named.image_column,
        label_column=named.label_column,
        caption_column=named.caption_column,
        group_column=named.group_column,
        split_column=named.split_column,
        index_dir=named.cache_dir or (None if run is None else run.path / "cache"),
    )
    return at_depth(source, named.hierarchy, named.depth)


def _streamed(spec: object, config: TrainConfig, run: Run | None) -> StreamSource:
    named = config.data
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(f"`data.streaming` needs the path of shards or of a folder, not {type(spec).__name__}")
    if named.depth is not None or named.hierarchy is not None:
        raise UsageError("`data.depth` is not available with `data.streaming`; write the labels of that depth into the shards")
    folder = named.cache_dir or (None if run is None else run.path / "cache")
    if folder is None:
        raise UsageError("`data.streaming` needs `data.cache_dir`, a folder for the table of samples")
    return StreamSource(os.fspath(spec), Path(folder), labels_from_folders=named.labels_from_folders)


def read_data(source: Source, config: TrainConfig, run: Run, several: bool, progress: bool) -> ImageData:
    """Pixels that had to be decoded, or that several processes read, are kept in the run folder unless another place is named."""
    cache = config.data.cache_dir or (run.path / "cache" if several or source.native_size is None else None)
    assert config.data.image_size is not None, "resolved"
    if isinstance(source, StreamSource):
        return source.image_data(
            image_size=config.data.image_size,
            workers=config.data.workers,
            pixel_cap=config.data.pixel_cap,
            window=config.data.shuffle_buffer,
        )
    return prepare(
        source,
        image_size=config.data.image_size,
        workers=config.data.workers,
        pixel_cap=config.data.pixel_cap,
        cache_dir=cache,
        progress=progress,
        shared=several,
    )


def last_state(run: Run, source: Source, config: TrainConfig) -> dict[str, Any] | None:
    """What the last checkpoint says of itself, with data and settings still as they were; None where there is no checkpoint yet.

    For one that is damaged the newest good one before it takes its place, with a warning. One of another run is refused.
    """
    saved = [path for path in (run.checkpoint, *run.older_checkpoints()) if path.exists()]
    for path in saved:
        try:
            state: dict[str, Any] = read_checkpoint(path)["kinfolk"]
        except DamagedFileError as error:
            if path == saved[-1]:
                raise
            warnings.warn(f"{error}; the one before it is taken instead", KinfolkWarning, stacklevel=2)
            continue
        samples = Samples.read(run.samples)
        require_identity(state, config, samples_digest(samples), samples.num_train, path)
        if not isinstance(source, StreamSource):  # of which `require_same` compares the table
            check_unchanged(samples, source, read_quarantine(run.quarantine))
        if path != run.checkpoint:
            os.replace(path, run.checkpoint)
        return state
    return None


def nothing_begun(run: Run) -> str:
    """The sentence for a folder that is to be resumed and has no config.yaml: killed while the data was read, or a disk that was full."""
    if run.checkpoint.exists():
        return f"{run.config} is missing, and without it the run can't be resumed; restore it, or start a new run"
    there = "; the images that were read are in its cache and need not be read again" if (run.path / "cache").is_dir() else ""
    return f"nothing had begun in {run.path}: repeat the whole command that started it, with --data and its other options{there}"


def require_same(run: Run, images: ImageData) -> None:
    """Refuses to go on where reading the data has given other samples than it did when the run began, a repaired file included."""
    found = Samples.read(run.samples).first_difference(images.samples)
    if found is not None:
        raise KinfolkError(f"the data has changed since the run began: {found}; restore it, or start a new run")


def write_start(
    run: Run,
    config: TrainConfig,
    images: ImageData,
    state: dict[str, Any] | None,
    overwrite: bool,
    text: TextData | StreamedText | None = None,
) -> None:
    """The folder as it is before the first step, or at the checkpoint; config.yaml comes last and says that the rest is there."""
    if state is None and overwrite:
        run.clear(keep=("cache",))
    run.path.mkdir(parents=True, exist_ok=True)
    run.sweep()
    run.cut_metrics(*(0, 0) if state is None else (state["step"], state["epoch"]))
    cut_snapshots(run.snapshots, 0 if state is None else state["epoch"])
    if state is None:
        images.samples.to_parquet(run.samples)
        write_quarantine(images.quarantine, run.quarantine)
        if text is not None:
            text.tokenizer.save(run.tokenizer)
    write_text(run.config, config.to_yaml())


def tell_start(run: Run, config: TrainConfig, images: ImageData, state: dict[str, Any] | None) -> None:
    """What is about to happen, in a few lines."""
    if run.rank > 0:
        return
    refused = summary(images.quarantine, len(images) + len(images.quarantine), run.quarantine)
    if refused is not None:
        LOG.warning("%s", refused)
    if config.trainer.accumulate > 1:
        LOG.info(
            "gradients of %d batches are accumulated for each step; this adds no negatives (`trainer.chunk_size` with a larger batch does)",
            config.trainer.accumulate,
        )
    if state is not None:
        LOG.info("resuming after step %d, %d of %d epochs done", state["step"], state["epoch"], config.epochs)
        if state["epochs"] != config.epochs:
            LOG.warning("`epochs` was %d until now: all schedules go by %d from here on", state["epochs"], config.epochs)
    where = f"{config.trainer.accelerator} × {num_processes(config)}, {config.trainer.precision}"
    LOG.info("%s", f"{config.method} on {images.num_train:,} samples for {config.epochs} epochs, {config.model.name}, {where}")


def num_processes(config: TrainConfig) -> int:
    """Over all machines; the configuration must be resolved."""
    assert isinstance(config.trainer.devices, int)
    return config.trainer.devices * config.trainer.num_nodes
