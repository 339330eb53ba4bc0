"""One training at a time in a run folder: two that write into it would mix their checkpoints and metrics.

The folder of a run: what it holds, who may write into it, and what `overwrite` may remove.

Before the first step: the data opened and read, the last checkpoint looked at, the run folder made ready.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kinfolk.data.change_detection import check_unchanged
from kinfolk.data.class_hierarchy import at_depth
from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare, read_quarantine, summary, write_quarantine
from kinfolk.data.sample_table import Samples, samples_digest
from kinfolk.data.source import Source
from kinfolk.data.stream import StreamSource
from kinfolk.data.text import StreamedText, TextData
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, shown
from kinfolk.files import UNFINISHED, DamagedFileError, write_text
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.config import TrainConfig
from kinfolk.training.documents import about_torn, read_rows
from kinfolk.training.settings import require_identity

LOCK = ".lock"


@contextmanager
def held(folder: Path, rank: int = 0) -> Iterator[None]:
    """Holds `folder` for this training, by a lock of the system's that ends with the process, however it ends; for rank zero alone.

    A folder that this made, and in which nothing came to be, is removed again. One that cannot be written to fails where it is written to.

    Raises:
        UsageError: another training holds it.

    Example:
        >>> import tempfile
        >>> with held(Path(tempfile.mkdtemp())):
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
        raise UsageError(f"another training is writing into `out` (={folder}); wait for its end, or give another folder") from None
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
"""Everything kinfolk writes into a run folder, and therefore all that `overwrite` removes."""

BEFORE_CONFIG = ("cache", ".launch", "samples.parquet", "quarantine.csv", "tokenizer.json")
"""What of that is there before config.yaml, the last thing that a start writes."""

LEFTOVERS = (UNFINISHED, ".partial", ".part")


@dataclass(frozen=True)
class Run:
    """A run on disk; what `train` returns.

    Args:
        path: the folder.
        rank: of this process among those that train; only rank zero writes.

    Example:
        >>> Run(Path("runs/photos")).checkpoint.as_posix()
        'runs/photos/checkpoints/last.ckpt'
    """

    path: Path
    rank: int = 0

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
        """Those before `checkpoint`, the newest first."""
        numbered = {path: path.stem.removeprefix("last-") for path in self.checkpoint.parent.glob("last-*.ckpt")}
        return sorted((path for path, number in numbered.items() if number.isdecimal()), key=lambda path: int(numbered[path]))

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
    def launch(self) -> Path:
        """Where rank zero tells the others that everything is prepared."""
        return self.path / ".launch"

    @property
    def handover(self) -> Path:
        """Where rank zero notes which data the others are to map."""
        return self.path / "cache" / "handover.json"

    @property
    def exists(self) -> bool:
        """Whether anything of a run is there."""
        return any((self.path / name).exists() for name in WRITTEN)

    def epochs(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each finished epoch; warns of those that are torn."""
        rows, torn = read_rows(self.metrics)
        if torn:
            warnings.warn(about_torn(self.metrics, torn), KinfolkWarning, stacklevel=2)
        return rows

    def require_own(self) -> None:
        """Refuses a folder that holds something else than a run, or the beginning of one."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a folder")
        if not self.path.is_dir() or self.config.exists() or self.samples.exists():
            return
        foreign = sorted(entry.name for entry in self.path.iterdir() if not self._of_a_start(entry))
        if foreign:
            raise UsageError(f"`out` (={self.path}) is not a run folder (it contains {shown(foreign[0])}); give another folder")

    def require_unused(self) -> None:
        """Refuses a folder that is in use. What a start that failed or was killed has left is not in the way."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a new folder")
        if self.path.is_dir() and not all(self._of_a_start(entry) for entry in self.path.iterdir()):
            what = "already holds a run" if self.exists else "is not empty"
            raise UsageError(f"`out` (={self.path}) {what}; resume it, overwrite it, or give another folder")

    def _of_a_start(self, entry: Path) -> bool:
        """Whether a file is one that is written before config.yaml, so that it says nothing of a run that has begun."""
        return entry.name in (*BEFORE_CONFIG, LOCK) or (entry.name.endswith(LEFTOVERS) and self._is_own(entry))

    @staticmethod
    def _is_own(entry: Path) -> bool:
        return any(entry.name.startswith(name.partition(".")[0] + ".") for name in WRITTEN)

    def clear(self, keep: tuple[str, ...] = ()) -> None:
        """Removes what a run wrote, and nothing else; of that not what `keep` names."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"`out` (={self.path}) is a file; give the name of a folder")
        for name in [name for name in WRITTEN if name not in keep]:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()

    def sweep(self) -> None:
        """Removes files that a killed process left half written: of the names a run writes, and no others."""
        folders = (self.path, self.path / "checkpoints", self.path / "eval", self.snapshots)
        for entry in [entry for folder in folders for suffix in LEFTOVERS for entry in folder.glob(f"*{suffix}")]:
            inside = entry.parent != self.path
            if entry.is_file() and (inside or self._is_own(entry)):
                entry.unlink()

    def cut_metrics(self, step: int, epochs: int = 0) -> None:
        """Drops the lines after `step`, and torn ones: what the resumed training will write again. Lines of the `epochs` that are done are
        not written again, so if one is torn or missing, which no killed process leaves, a warning says so."""
        rows, torn = read_rows(self.metrics)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if torn and torn[0] <= len(rows):
            warnings.warn(about_torn(self.metrics, torn), KinfolkWarning, stacklevel=2)
        elif len(kept) < epochs:
            told = f"{shown(str(self.metrics))} has readable lines of {len(kept)} of the {epochs} epochs that are done"
            warnings.warn(f"{told}; the others are lost", KinfolkWarning, stacklevel=2)
        if self.metrics.exists():
            write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))


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


def cut_snapshots(folder: Path, epoch: int) -> None:
    """Removes those after `epoch`, which a resumed training will write again."""
    for path in folder.glob("epoch-*.safetensors"):
        if epoch_of(path) > epoch:
            path.unlink()


def snapshot_file(folder: Path, epoch: int) -> Path:
    """Where the one after `epoch` is written."""
    return folder / f"epoch-{epoch:04d}.safetensors"


def epoch_of(path: Path) -> int:
    """The number in its name; −1 for another file."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
