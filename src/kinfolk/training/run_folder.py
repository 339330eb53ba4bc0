"""The folder of a run: its files, its lock, and the preparation before the first step."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import describe_refused, prepare, write_quarantine
from kinfolk.data.sample_table import Samples, samples_digest
from kinfolk.data.source import Source, exclude
from kinfolk.data.stream import open_stream, stream_images
from kinfolk.data.text import PairTexts, TextData, read_pairs
from kinfolk.errors import KinfolkError, UsageError, plural, short, warn
from kinfolk.files import DamagedFileError, is_unfinished, write_text
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.documents import describe_torn_lines, read_rows
from kinfolk.training.settings import describe_settings, require_identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOG = logging.getLogger("kinfolk.training")
LOCK = ".lock"

BEFORE_CONFIG = ("cache", "samples.parquet", "quarantine.csv", "tokenizer.json")
"""Written before config.yaml, which is the last file of a start."""
WRITTEN = (
    *BEFORE_CONFIG,
    *("config.yaml", "metrics.jsonl", "train.log", "report.html"),
    *("model.safetensors", "model.json", "towers.safetensors", "sentence-transformer"),
    *("checkpoints", "snapshots", "eval", "export", "tensorboard", "wandb", "mlflow"),
)
"""Everything that kinfolk writes into a run folder: all that `overwrite` removes."""


class _Inside:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: Run, kind: type[Run]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class Run:
    """A run on disk; the return value of `train`.

    Args:
        path: the folder.
        rank: of this process in the training; only rank zero writes.
        unchanged: whether the run was finished already, so that `train` had nothing to do.
        images, features: the images, and ids and features after the last epoch, for the report.

    Example:
        >>> Run(Path("runs/photos")).checkpoint.as_posix()
        'runs/photos/checkpoints/last.ckpt'
    """

    path: Path
    rank: int = 0
    unchanged: bool = False
    images: ImageData | None = field(default=None, repr=False, compare=False)
    features: tuple[NDArray[np.int64], NDArray[np.float32]] | None = field(
        default=None, repr=False, compare=False
    )

    config = _Inside("config.yaml")
    samples = _Inside("samples.parquet")
    quarantine = _Inside("quarantine.csv")
    metrics = _Inside("metrics.jsonl")
    log = _Inside("train.log")
    checkpoint = _Inside("checkpoints/last.ckpt")
    model = _Inside("model.safetensors")
    tokenizer = _Inside("tokenizer.json")
    sentence_transformer = _Inside("sentence-transformer")
    cache = _Inside("cache")  # decoded pixels, and features of a guide
    handover = _Inside("cache/handover.json")  # which data the other ranks map

    def older_checkpoints(self) -> list[Path]:
        found = {epoch_of(path): path for path in self.checkpoint.parent.glob("last-*.ckpt")}
        return [found[number] for number in sorted(found) if number >= 0]

    def epochs(self) -> list[dict[str, Any]]:
        rows, torn = read_rows(self.metrics)
        if torn:
            warn(describe_torn_lines(self.metrics, torn))
        return rows

    def require_run_folder(self) -> None:
        foreign = self._foreign()
        if foreign and not self.config.exists() and not self.samples.exists():
            raise UsageError(
                f"`out` (={self.path}) is not a run folder (it contains {short(foreign[0])}); give"
                " another folder"
            )

    def require_unused(self) -> None:
        """Files of a failed start are allowed."""
        if self._foreign():
            is_run = any((self.path / name).exists() for name in WRITTEN)
            what = "already holds a run" if is_run else "is not empty"
            raise UsageError(
                f"`out` (={self.path}) {what}; resume it (--resume), overwrite it (--overwrite), or"
                " give another folder"
            )

    def _foreign(self) -> list[str]:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a folder")
        names = {entry.name for entry in self.path.glob("*")} - {*BEFORE_CONFIG, LOCK}
        return sorted(name for name in names if not _is_half_written(name))

    def clear(self, keep: tuple[str, ...] = ()) -> None:
        for entry in (self.path / name for name in WRITTEN if name not in keep):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished_files()

    def remove_unfinished_files(self) -> None:
        entries = [entry for entry in self.path.glob("*") if _is_half_written(entry.name)]
        for name in ("checkpoints", "eval"):
            inside = (self.path / name).glob("*")
            entries += [entry for entry in inside if is_unfinished(entry.name)]
        for entry in filter(Path.is_file, entries):
            entry.unlink()

    def truncate_metrics(self, step: int, epochs: int = 0) -> None:
        """Drops torn lines and those after `step`; warns if that loses any of the finished
        `epochs`."""
        rows, torn = read_rows(self.metrics)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if len(kept) < epochs:
            warn(
                f"{short(str(self.metrics))} has readable lines of {len(kept)} of the {epochs}"
                " epochs that are done; the others are lost"
            )
        elif torn and torn[0] <= len(rows):
            warn(describe_torn_lines(self.metrics, torn))
        if self.metrics.exists():
            write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))


def _is_half_written(name: str) -> bool:
    stems = [written.partition(".")[0] + "." for written in WRITTEN]
    return is_unfinished(name) and name.startswith(tuple(stems))


@contextmanager
def lock_run_folder(folder: Path, rank: int = 0) -> Iterator[None]:
    """Rank zero locks; empty folders that it made are removed."""
    if rank > 0:
        yield
        return
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"another training is writing into `out` (={folder}); wait for its end, or give another"
            " folder"
        ) from None
    except OSError:  # an unwritable folder is reported where it is written to
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


COLUMNS = ("image", "label", "caption", "anchor", "positive")


def open_data(data: object | None, config: TrainConfig, run: Run | None = None) -> Source:
    named = config.data
    spec = named.source if data is None else data
    if spec is None:
        raise UsageError(
            "`data` is required: a folder, an array file, a table, an archive, or digits"
        )
    cache = named.cache_dir or (None if run is None else run.cache)
    if not named.streaming:
        options = {f"{name}_column": getattr(named, f"{name}_column") for name in COLUMNS}
        options["labels_from_folders"] = named.labels_from_folders
        return exclude(open_source(spec, index_dir=cache, **options), named.exclude)
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(
            f"`data.streaming` needs the path of shards or of a folder, not {type(spec).__name__}"
        )
    if named.exclude is not None:
        raise UsageError(
            "`data.exclude` is not available with `data.streaming`; change the shards instead"
        )
    if cache is None:
        raise UsageError("`data.streaming` needs `data.cache_dir`, for the table of samples")
    return open_stream(spec, Path(cache), labels_from_folders=named.labels_from_folders)


def read_data(
    source: Source, config: TrainConfig, run: Run | None, several: bool, progress: bool
) -> ImageData:
    if source.has_texts:
        return read_pairs(source)
    data = config.data
    assert data.image_size is not None, "resolved"
    options: dict[str, Any] = data.model_dump(include={"image_size", "workers", "pixel_cap"})
    if source.samples is not None:
        return stream_images(source, window=data.shuffle_buffer, **options)
    is_kept = several or source.native_size is None
    cache = None if run is None else data.cache_dir or (run.cache if is_kept else None)
    return prepare(source, cache_dir=cache, progress=progress, shared=several, **options)


def last_checkpoint_state(run: Run, config: TrainConfig) -> dict[str, Any] | None:
    """The `kinfolk` entry of the last checkpoint. A damaged or missing one is replaced by the
    newest good one before it, with a warning; one of another run is refused."""
    saved = [path for path in (run.checkpoint, *run.older_checkpoints()) if path.exists()]
    if saved and saved[0] != run.checkpoint:
        warn(f"{run.checkpoint} is missing; the one before it is used instead")
    for path in saved:
        try:
            state: dict[str, Any] = read_checkpoint(path)["kinfolk"]
        except DamagedFileError as error:
            if path == saved[-1]:
                raise DamagedFileError(
                    f"{error}; there is no other checkpoint, so put a copy of it back or start a"
                    " new run"
                ) from error
            warn(f"{error}; the one before it is used instead")
            continue
        samples = Samples.read(run.samples)
        require_identity(state, config, samples_digest(samples), samples.num_train, path)
        if path != run.checkpoint:
            os.replace(path, run.checkpoint)
        return state
    if done := len(run.epochs()):
        warn(
            f"there is no checkpoint in {run.checkpoint.parent}, although {plural(done, 'epoch')}"
            " of the run ended; the training starts again from the beginning"
        )
    return None


def explain_missing_config(run: Run) -> str:
    if run.checkpoint.exists():
        return f"{run.config} is missing, and the run cannot be resumed without it; restore it"
    return f"no training has started in {run.path}: repeat the whole command that started it"


def require_same_samples(run: Run, images: ImageData) -> None:
    stored, refused = Samples.read(run.samples), dict(images.quarantine)
    found = stored.first_difference(images.samples)
    unread = [(row, key) for row, key in enumerate(stored.keys) if key in refused] if found else []
    if unread:
        row, key = unread[0]
        found = f"sample {row} ({short(key)}) can't be read any more: {refused[key]}"
    if found is not None:
        raise KinfolkError(
            f"the data has changed since the run began: {found}; restore it, or start a new run"
        )


def write_start(
    run: Run,
    config: TrainConfig,
    images: ImageData,
    state: dict[str, Any] | None,
    overwrite: bool,
    text: TextData | PairTexts | None = None,
) -> None:
    """Writes the folder as it is before the first step or at the checkpoint; config.yaml last."""
    if state is None and overwrite:
        run.clear(keep=("cache",))
    run.path.mkdir(parents=True, exist_ok=True)
    run.remove_unfinished_files()
    step, epoch = (0, 0) if state is None else (state["step"], state["epoch"])
    run.truncate_metrics(step, epoch)
    if state is None:
        images.samples.to_parquet(run.samples)
        write_quarantine(images.quarantine, run.quarantine)
        if text is not None and text.tokenizer is not None:
            text.tokenizer.save(run.tokenizer)
    write_text(run.config, config.to_yaml())


def log_start(
    run: Run, config: TrainConfig, images: ImageData, state: dict[str, Any] | None
) -> None:
    if run.rank > 0:
        return
    number, what = len(images) + len(images.quarantine), "text pairs" if images.texts else "images"
    refused = describe_refused(images.quarantine, number, run.quarantine, what)
    if refused is not None:
        LOG.warning("%s", refused)
    epochs, accumulated = config.epochs, config.trainer.accumulate
    if accumulated > 1:
        LOG.info(
            "%s",
            f"gradients of {accumulated} batches are accumulated for each step; this adds no"
            " negatives (`trainer.chunk_size` with a larger batch does)",
        )
    if state is not None:
        where = f"after step {state['step']}, {state['epoch']} of {epochs} epochs done"
        LOG.info("%s", f"resuming {where}")
    if state is not None and state["epochs"] != epochs:
        LOG.warning(
            "%s",
            f"`epochs` was {state['epochs']} until now: the schedules of learning rate and method"
            f" use {epochs} from here on",
        )
    size = f"{plural(images.num_train, 'sample')} for {plural(epochs, 'epoch')}"
    LOG.info("%s", f"{config.method} on {size}, {config.model.name}; settings:")
    for line in describe_settings(config):
        LOG.info("%s", line)


def num_processes(config: TrainConfig) -> int:
    assert isinstance(config.trainer.devices, int)
    return config.trainer.devices * config.trainer.num_nodes


def epoch_of(path: Path) -> int:
    """The number in the name of an older checkpoint; −1 for another file."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
