"""The folder of a run: what it holds, who may write into it, and what `overwrite` may remove."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.files import UNFINISHED, write_text
from kinfolk.foreign import shown
from kinfolk.training.documents import about_torn, read_rows
from kinfolk.training.hold import LOCK

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
