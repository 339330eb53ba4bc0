"""What a run folder records, without the model and the images, and its text for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfolk.data.prepare import read_quarantine
from kinfolk.data.sample_table import Samples
from kinfolk.errors import UsageError, duration, plural, warn
from kinfolk.files import read_json_objects
from kinfolk.report.results import is_number
from kinfolk.training.documents import (
    describe_torn_lines,
    first_warnings,
    read_rows,
    read_yaml,
)

# ---- reading


@dataclass(frozen=True)
class Record:
    """`epochs`: one entry of `metrics.jsonl` for each. `num_train` is 0 if it is not known."""

    path: Path
    config: dict[str, Any]
    epochs: list[dict[str, float]]
    results: dict[str, dict[str, Any]]
    num_train: int = 0
    num_refused: int = 0

    @property
    def method(self) -> str:
        return str(self.config.get("method", ""))

    def values(self, metric: str) -> list[float]:
        values = (row.get(metric, math.nan) for row in self.epochs)
        return [value for value in values if math.isfinite(value)]

    def last(self, metric: str) -> float | None:
        values = self.values(metric)
        return values[-1] if values else None


def read_record(run: Path) -> Record:
    """Every file but `config.yaml` may be missing."""
    if not (run / "config.yaml").is_file():
        raise UsageError(
            f"{run} is no run folder (no config.yaml); give one that `kinfolk train --out` wrote"
        )
    refused, table = run / "quarantine.csv", run / "samples.parquet"
    return Record(
        path=run.resolve(),
        config=read_yaml(run / "config.yaml"),
        epochs=_read_epochs(run / "metrics.jsonl"),
        results=read_json_objects(run / "eval"),
        num_train=Samples.read(table).num_train if table.is_file() else 0,
        num_refused=len(read_quarantine(refused)) if refused.is_file() else 0,
    )


def _read_epochs(path: Path) -> list[dict[str, float]]:
    """A line that was cut off, as by a killed run, is skipped with a warning."""
    rows, torn = read_rows(path)
    if torn:
        warn(describe_torn_lines(path, torn))
    by_epoch = {
        row["epoch"]: {name: float(value) for name, value in row.items() if is_number(value)}
        for row in rows
    }
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


# ---- numbers in words


def number(value: Any) -> str:
    """A setting or a result in readable form."""
    if value is None or value in ("", [], {}, ()):
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "—" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(number, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(entry)}" for key, entry in value.items())
    return str(value)


def percent(value: Any) -> str:
    if not is_number(value) or math.isnan(value):
        return "—"
    return f"{value:.3%}" if 0 < abs(value) < 0.001 else f"{value:.1%}"


# ---- the head of the page


LEARNS_FROM = {("image",): "images", ("image", "text"): "captions", ("text",): "text pairs"}


def describe_training(record: Record) -> str:
    from kinfolk.frameworks import FRAMEWORKS

    epochs, planned = len(record.epochs), record.config.get("epochs")
    unfinished = isinstance(planned, int) and planned != epochs
    trained = f"{epochs} of {planned} epochs" if unfinished else plural(epochs, "epoch")
    framework = FRAMEWORKS.get(record.method.partition("+")[0].strip().lower())
    what = "images" if framework is None else LEARNS_FROM[framework.modalities]
    samples = f" on {record.num_train:,} {what}" if record.num_train else ""
    return f"trained for {trained}{samples}"


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Label and value of the main settings, as far as the run records them."""

    from kinfolk.training.settings import flat

    settings = flat(record.config)
    speed, refused = record.last("images_per_second"), plural(record.num_refused, "file")
    facts = [
        ("Data", settings.get("data.source")),
        ("Encoder", settings.get("model.name")),
        ("Batch size", settings.get("batch_size")),
        ("Seed", settings.get("seed")),
        ("Speed", None if speed is None else f"{speed:,.0f} samples/s"),
        ("Refused", f"{refused}, see quarantine.csv" if record.num_refused else None),
        *(("Warning", message) for message in first_warnings(record.epochs).values()),
    ]
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


def tiles(record: Record) -> list[tuple[str, str, str]]:
    """Name, value and note of the tiles, for the metrics that the run has."""
    found, epochs = [], len(record.epochs)
    if knn := record.values("knn"):
        found.append(("kNN accuracy", percent(knn[-1]), f"best {percent(max(knn))}"))
    if is_number(accuracy := record.results.get("linear", {}).get("accuracy")):
        found.append(("Linear probe", percent(accuracy), "on frozen features"))
    if is_number(recall := record.results.get("retrieval", {}).get("mean")):
        found.append(("Mean recall", percent(recall), "at 1, 5 and 10, both ways"))
    if (f1 := record.last("f1")) is not None:
        precision, recall = (percent(record.last(name)) for name in ("precision", "recall"))
        found.append(("Detection F1", percent(f1), f"precision {precision}, recall {recall}"))
    if (flagged := record.last("flagged")) is not None:
        found.append(("Pairs flagged", percent(flagged), "of the negatives"))
    if (loss := record.last("loss")) is not None:
        found.append(("Loss", f"{loss:.3f}", f"epoch {epochs}"))
    if seconds := sum(row.get("seconds", 0.0) for row in record.epochs):
        found.append(("Training time", duration(seconds), f"{seconds / epochs:.3g} s per epoch"))
    return found


# ---- configuration


def configuration(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """General settings come first; empty sections are left out."""
    sections: dict[str, list[tuple[str, str]]] = {"run": []}
    for key, value in config.items():
        if not isinstance(value, Mapping):
            sections["run"].append((key, number(value)))
        elif any(entry not in (None, [], {}) for entry in value.values()):
            sections[key] = [(name, number(entry)) for name, entry in value.items()]
    return list(sections.items())
