"""Reads the small files of a run folder: configuration, metrics, results, samples. Needs neither
the model nor the images."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.data.prepare import read_quarantine
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError
from kinfolk.files import first_line
from kinfolk.training.documents import describe_torn_lines, read_rows, read_yaml


@dataclass(frozen=True)
class Record:
    """The small files of a run.

    Args:
        path: the run folder.
        config: `config.yaml`, fully resolved.
        meta: `model.json`; empty before the first epoch has ended.
        epochs: `metrics.jsonl`, one entry for each epoch, in order; an epoch repeated after a
            resume counts once, the last time.
        results: `eval/*.json`.
        quarantine: (path, reason) of each refused file.
        splits: number of samples of each split, empty where `samples.parquet` is missing.
        classes: number of samples of each label, largest first; empty without labels.
    """

    path: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    epochs: list[dict[str, float]]
    results: list[dict[str, Any]]
    quarantine: list[tuple[str, str]]
    splits: dict[str, int]
    classes: dict[str, int]

    @property
    def labelled(self) -> bool:
        """Whether the samples have labels; True if it is not known, without `samples.parquet`."""
        return bool(self.classes) or not self.splits

    def last(self, name: str) -> float | None:
        """The last finite value of a metric."""
        return next(
            (
                row[name]
                for row in reversed(self.epochs)
                if name in row and math.isfinite(row[name])
            ),
            None,
        )


def read_record(run: Path) -> Record:
    """Reads the run folder; every file but `config.yaml` may be missing."""
    if not run.is_dir():
        raise UsageError(
            f"there is no run folder at {run}; give the folder that `kinfolk train --out` wrote"
        )
    if not (run / "config.yaml").is_file():
        raise UsageError(
            f"{run} is not a run folder: it holds no config.yaml; give the folder that `kinfolk"
            " train --out` wrote"
        )
    splits, classes = _read_samples(run / "samples.parquet")
    return Record(
        path=run.resolve(),
        config=read_yaml(run / "config.yaml"),
        meta=_read_json(run / "model.json"),
        epochs=_read_epochs(run / "metrics.jsonl"),
        results=[
            {"protocol": file.stem, **_read_json(file)}
            for file in sorted((run / "eval").glob("*.json"))
        ],
        quarantine=_read_quarantine(run / "quarantine.csv"),
        splits=splits,
        classes=classes,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KinfolkError(
            f"{path} is not valid JSON ({first_line(error)}); restore it, or remove it"
        ) from error
    return value if isinstance(value, dict) else {}


def _read_epochs(path: Path) -> list[dict[str, float]]:
    """Reads the metrics. A line that was cut off, as by a killed run, is skipped with a warning."""
    by_epoch: dict[int, dict[str, float]] = {}
    rows, torn = read_rows(path)
    if torn:
        warnings.warn(describe_torn_lines(path, torn), KinfolkWarning, stacklevel=2)
    for row in rows:
        by_epoch[row["epoch"]] = {
            name: float(value) for name, value in row.items() if isinstance(value, (int, float))
        }
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _read_quarantine(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        return []
    return read_quarantine(path)


def _read_samples(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    if not path.is_file():
        return {}, {}
    from kinfolk.data.sample_table import Samples

    samples = Samples.read(path)
    splits = dict(Counter(samples.splits))
    if samples.labels is None:
        return splits, {}
    counts = Counter(int(label) for label in samples.labels if label >= 0)
    names = samples.classes
    return splits, {
        names[label] if names else str(label): count for label, count in counts.most_common()
    }
