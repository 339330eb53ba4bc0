"""The folder of a run: the files in it, the lock that keeps a second training out, and the
preparation before the first step.

Preparation opens and reads the data, finds the last checkpoint of a resumed run, and writes
samples.parquet and config.yaml.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from kinfolk.data.class_hierarchy import at_depth
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare, read_quarantine, summary, write_quarantine
from kinfolk.data.sample_table import Samples, samples_digest
from kinfolk.data.source import Source, check_unchanged, exclude
from kinfolk.data.stream import StreamSource
from kinfolk.data.text import PairTexts, StreamedText, TextData, read_pairs
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, plural, short
from kinfolk.files import DamagedFileError, is_unfinished, write_text
from kinfolk.training.checkpoint import read_complete_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.documents import describe_torn_lines, read_rows
from kinfolk.training.settings import describe_settings, require_identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOG = logging.getLogger("kinfolk.training")
LOCK = ".lock"


WRITTEN = (
    "config.yaml",
    "samples.parquet",
    "quarantine.csv",
    "metrics.jsonl",
    "train.log",
    "model.safetensors",
    "model.json",
    "tokenizer.json",
    "towers.safetensors",
    "sentence-transformer",
    "report.html",
    "checkpoints",
    "snapshots",
    "tensorboard",
    "wandb",
    "mlflow",
    "eval",
    "export",
    "cache",
    ".launch",
)
"""Everything that kinfolk writes into a run folder, and therefore all that `overwrite` removes."""

BEFORE_CONFIG = ("cache", ".launch", "samples.parquet", "quarantine.csv", "tokenizer.json")
"""The files among them that are written before config.yaml, which is the last file of a start."""


@dataclass(frozen=True)
class Run:
    """A run on disk; the return value of `train`.

    Args:
        path: the folder.
        rank: the rank of this process in the training; only rank zero writes.
        unchanged: whether the run was finished already, so that `train` had nothing to do.
        images: the images of the training, so that the report does not read them again;
            `kinfolk.train` drops them.
        features: ids, ascending, and encoder features of the samples that were measured after the
            last epoch, so that the report does not compute them again; `kinfolk.train` drops them.

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

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def samples(self) -> Path:
        return self.path / "samples.parquet"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine.csv"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"

    def older_checkpoints(self) -> list[Path]:
        """The checkpoints before `checkpoint`, newest first."""
        numbered = {
            path: path.stem.removeprefix("last-")
            for path in self.checkpoint.parent.glob("last-*.ckpt")
        }
        return sorted(
            (path for path, number in numbered.items() if number.isdecimal()),
            key=lambda path: int(numbered[path]),
        )

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def sentence_transformer(self) -> Path:
        """The trained model of a run with st/NAME, as sentence-transformers reads it."""
        return self.path / "sentence-transformer"

    @property
    def cache(self) -> Path:
        """The folder of decoded pixels and of the features of a guide."""
        return self.path / "cache"

    @property
    def launch(self) -> Path:
        """The status file of rank zero; see `launch.py`."""
        return self.path / ".launch"

    @property
    def handover(self) -> Path:
        """The file that tells the other ranks which data to map."""
        return self.cache / "handover.json"

    @property
    def exists(self) -> bool:
        """Whether the folder has any file of a run."""
        return any((self.path / name).exists() for name in WRITTEN)

    def epochs(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per finished epoch; warns about torn lines."""
        rows, torn = read_rows(self.metrics)
        if torn:
            warnings.warn(describe_torn_lines(self.metrics, torn), KinfolkWarning, stacklevel=2)
        return rows

    def require_run_folder(self) -> None:
        """Refuses a folder that is not a run folder, or the start of one."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a folder")
        if not self.path.is_dir() or self.config.exists() or self.samples.exists():
            return
        foreign = sorted(
            entry.name for entry in self.path.iterdir() if not self._is_from_failed_start(entry)
        )
        if foreign:
            raise UsageError(
                f"`out` (={self.path}) is not a run folder (it contains {short(foreign[0])}); give"
                " another folder"
            )

    def require_unused(self) -> None:
        """Refuses a folder that is in use. Files of a start that failed or was killed are
        allowed."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a new folder")
        if self.path.is_dir() and not all(
            self._is_from_failed_start(entry) for entry in self.path.iterdir()
        ):
            what = "already holds a run" if self.exists else "is not empty"
            raise UsageError(
                f"`out` (={self.path}) {what}; resume it (--resume), overwrite it (--overwrite), or"
                " give another folder"
            )

    def _is_from_failed_start(self, entry: Path) -> bool:
        """Whether a file is written before config.yaml, so that it does not mean that a run has
        started."""
        return entry.name in (*BEFORE_CONFIG, LOCK) or (
            is_unfinished(entry.name) and self._is_run_file(entry)
        )

    @staticmethod
    def _is_run_file(entry: Path) -> bool:
        return any(entry.name.startswith(name.partition(".")[0] + ".") for name in WRITTEN)

    def clear(self, keep: tuple[str, ...] = ()) -> None:
        """Removes the files of a run except those in `keep`, and nothing else."""
        for name in [name for name in WRITTEN if name not in keep]:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished_files()

    def remove_unfinished_files(self) -> None:
        """Removes temporary files that a killed process left behind, only of names that a run
        writes."""
        folders = (self.path, self.path / "checkpoints", self.path / "eval", self.snapshots)
        for entry in [
            entry for folder in folders for entry in folder.glob("*") if is_unfinished(entry.name)
        ]:
            inside = entry.parent != self.path
            if entry.is_file() and (inside or self._is_run_file(entry)):
                entry.unlink()

    def truncate_metrics(self, step: int, epochs: int = 0) -> None:
        """Drops the lines after `step` and torn lines, which the resumed training writes again.
        Lines of the `epochs` that are done are not written again, so a warning names those that are
        torn or missing. A killed process does not leave such lines."""
        rows, torn = read_rows(self.metrics)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if torn and torn[0] <= len(rows):
            warnings.warn(describe_torn_lines(self.metrics, torn), KinfolkWarning, stacklevel=2)
        elif len(kept) < epochs:
            message = (
                f"{short(str(self.metrics))} has readable lines of {len(kept)} of the {epochs}"
                " epochs that are done"
            )
            warnings.warn(f"{message}; the others are lost", KinfolkWarning, stacklevel=2)
        if self.metrics.exists():
            write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))


@contextmanager
def lock_run_folder(folder: Path, rank: int = 0) -> Iterator[None]:
    """Locks `folder` for this training, on rank zero. The lock of the operating system ends with
    the process.

    Folders that this function created and that are still empty afterwards are removed. An
    unwritable folder raises an error later, where it is written to.

    Raises:
        UsageError: another training has locked the folder.

    Example:
        >>> import tempfile
        >>> with lock_run_folder(Path(tempfile.mkdtemp())):
        ...     pass
    """
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
    except OSError:
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


def open_data(data: object | None, config: TrainConfig, run: Run | None = None) -> Source:
    """Opens the source of the images: `data`, or the source in the configuration. An index of it
    may be in the cache of `run`."""
    named = config.data
    spec = named.source if data is None else data
    if spec is None:
        raise UsageError(
            "`data` is required: a folder, an array file, a table, an archive, or digits"
        )
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
        anchor_column=named.anchor_column,
        positive_column=named.positive_column,
        index_dir=named.cache_dir or (None if run is None else run.cache),
    )
    return at_depth(exclude(source, named.exclude), named.hierarchy, named.depth)


def _streamed(spec: object, config: TrainConfig, run: Run | None) -> StreamSource:
    named = config.data
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(
            f"`data.streaming` needs the path of shards or of a folder, not {type(spec).__name__}"
        )
    if named.depth is not None or named.hierarchy is not None:
        raise UsageError(
            "`data.depth` is not available with `data.streaming`; write the labels of that depth"
            " into the shards"
        )
    if named.exclude is not None:
        raise UsageError(
            "`data.exclude` is not available with `data.streaming`; leave the samples out of the"
            " shards"
        )
    folder = named.cache_dir or (None if run is None else run.cache)
    if folder is None:
        raise UsageError(
            "`data.streaming` needs `data.cache_dir`, a folder for the table of samples"
        )
    return StreamSource(
        os.fspath(spec), Path(folder), labels_from_folders=named.labels_from_folders
    )


def read_data(
    source: Source, config: TrainConfig, run: Run, several: bool, progress: bool
) -> ImageData:
    """Reads the images. Decoded pixels, and those that several processes share, are kept in the run
    folder or the configured one."""
    if source.has_texts:
        return read_pairs(source)
    cache = config.data.cache_dir or (run.cache if several or source.native_size is None else None)
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


def last_checkpoint_state(run: Run, source: Source, config: TrainConfig) -> dict[str, Any] | None:
    """The `kinfolk` entry of the last checkpoint, after a check that data and settings have not
    changed; None without a checkpoint.

    A missing, damaged or incomplete checkpoint is replaced by the newest good one before it, with
    a warning. If there is none, the training starts again, with a warning if epochs had ended. A
    checkpoint of another run is refused.
    """
    saved = [path for path in (run.checkpoint, *run.older_checkpoints()) if path.exists()]
    for path in saved:
        try:
            state: dict[str, Any] = read_complete_checkpoint(path)["kinfolk"]
        except DamagedFileError as error:
            if path == saved[-1]:
                raise DamagedFileError(
                    f"{error}; there is no other checkpoint, so put a copy of it back or start a"
                    " new run"
                ) from error
            warnings.warn(
                f"{error}; the one before it is used instead", KinfolkWarning, stacklevel=2
            )
            continue
        samples = Samples.read(run.samples)
        require_identity(state, config, samples_digest(samples), samples.num_train, path)
        if not isinstance(source, StreamSource):  # `require_same_samples` compares its table later
            check_unchanged(samples, source, read_quarantine(run.quarantine))
        if path != run.checkpoint:
            if not run.checkpoint.exists():
                epochs = plural(state["epochs"], "epoch")
                message = (
                    f"{run.checkpoint} is missing; the training continues from the one before it, "
                    f"{path.name} (step {state['step']}, {state['epoch']} of {epochs} done)"
                )
                warnings.warn(message, KinfolkWarning, stacklevel=2)
            os.replace(path, run.checkpoint)
        return state
    if done := len(run.epochs()):
        warnings.warn(
            f"there is no checkpoint in {run.checkpoint.parent}, although {plural(done, 'epoch')}"
            " of the run ended; the training starts again from the beginning",
            KinfolkWarning,
            stacklevel=2,
        )
    return None


def explain_missing_config(run: Run) -> str:
    """The message for resuming a folder without config.yaml: the start was killed while it read the
    data, or the disk was full."""
    if run.checkpoint.exists():
        return (
            f"{run.config} is missing, and the run cannot be resumed without it; restore it, or"
            " start a new run"
        )
    there = "; images that were read already are in its cache" if run.cache.is_dir() else ""
    return (
        f"no training has started in {run.path}: repeat the whole command that started it, with"
        f" --data and its other options{there}"
    )


def require_same_samples(run: Run, images: ImageData) -> None:
    """Raises if the samples differ from those at the start of the run, for example because a broken
    file was repaired."""
    found = Samples.read(run.samples).first_difference(images.samples)
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
    text: TextData | StreamedText | PairTexts | None = None,
) -> None:
    """Writes the folder as it is before the first step or at the checkpoint. config.yaml comes last
    and marks the folder as complete."""
    if state is None and overwrite:
        run.clear(keep=("cache",))
    run.path.mkdir(parents=True, exist_ok=True)
    run.remove_unfinished_files()
    run.truncate_metrics(*(0, 0) if state is None else (state["step"], state["epoch"]))
    remove_later_snapshots(run.snapshots, 0 if state is None else state["epoch"])
    if state is None:
        images.samples.to_parquet(run.samples)
        write_quarantine(images.quarantine, run.quarantine)
        if text is not None and text.tokenizer is not None:
            text.tokenizer.save(run.tokenizer)
    write_text(run.config, config.to_yaml())


def log_start(
    run: Run,
    config: TrainConfig,
    images: ImageData,
    state: dict[str, Any] | None,
    origins: Mapping[str, str],
) -> None:
    """Logs what is about to happen in a few lines."""
    if run.rank > 0:
        return
    number, what = len(images) + len(images.quarantine), "text pairs" if images.texts else "images"
    refused = summary(images.quarantine, number, run.quarantine, what)
    if refused is not None:
        LOG.warning("%s", refused)
    if config.trainer.accumulate > 1:
        LOG.info(
            "gradients of %d batches are accumulated for each step; this adds no negatives"
            " (`trainer.chunk_size` with a larger batch does)",
            config.trainer.accumulate,
        )
    if config.trainer.sync_batchnorm is True and num_processes(config) > 1:
        LOG.info(
            "BatchNorm uses the joined batch of all %d devices (`trainer.sync_batchnorm`)",
            num_processes(config),
        )
    if state is not None:
        LOG.info(
            "resuming after step %d, %d of %d epochs done",
            state["step"],
            state["epoch"],
            config.epochs,
        )
        if state["epochs"] != config.epochs:
            LOG.warning(
                "`epochs` was %d until now: the schedules of learning rate and method use %d from"
                " here on, so the learning rate rises again to its value at this place of the"
                " longer schedule",
                state["epochs"],
                config.epochs,
            )
    samples, epochs = plural(images.num_train, "sample"), plural(config.epochs, "epoch")
    LOG.info("%s", f"{config.method} on {samples} for {epochs}, {config.model.name}; settings:")
    for line in describe_settings(config, origins, images.num_train):
        LOG.info("%s", line)


def num_processes(config: TrainConfig) -> int:
    """Number of processes over all machines; the configuration must be resolved."""
    assert isinstance(config.trainer.devices, int)
    return config.trainer.devices * config.trainer.num_nodes


def remove_later_snapshots(folder: Path, epoch: int) -> None:
    """Removes the snapshots after `epoch`, which a resumed training writes again."""
    for path in folder.glob("epoch-*.safetensors"):
        if epoch_of(path) > epoch:
            path.unlink()


def snapshot_file(folder: Path, epoch: int) -> Path:
    """The file of the snapshot after `epoch`."""
    return folder / f"epoch-{epoch:04d}.safetensors"


def epoch_of(path: Path) -> int:
    """The epoch in the name of a snapshot; −1 for another file."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
