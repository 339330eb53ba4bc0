"""Finds and reads the runs to compare, and checks that they are comparable: the same training
samples, measured in the same way."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.errors import UsageError, short
from kinfolk.report.record import read_record
from kinfolk.report.results import (
    CLUSTERS,
    DETECTION_NAMES,
    SIMILARITIES,
    figures_of_result,
    parts_of,
)
from kinfolk.training.config import TrainConfig
from kinfolk.training.load_run import FOREIGN, exported_meta
from kinfolk.training.settings import WITHOUT_EFFECT, current_names, digests_of_stored, flat

if TYPE_CHECKING:
    from kinfolk.report.record import Record

# ---- the figures of a run

TRAINING_METRICS = {
    **DETECTION_NAMES,
    "flagged": "flagged",
    **CLUSTERS,
    "nmi": "NMI",
    "features_nmi": "NMI of features",
    **SIMILARITIES,
}
SECONDS = "seconds"


def figures_of(record: Record) -> dict[str, float]:
    """Shares are in percent. `seconds` is the median of the epochs."""
    last = record.epochs[-1] if record.epochs else {}
    found = {name: 100 * last[name] for name in TRAINING_METRICS if name in last}
    for protocol, result in record.results.items():
        found |= figures_of_result(protocol, result)
    seconds = [epoch[SECONDS] for epoch in record.epochs if SECONDS in epoch]
    return found | ({SECONDS: statistics.median(seconds)} if seconds else {})


# ---- reading

NOT_IN_ROWS = ("method", "seed", "trainer", *WITHOUT_EFFECT)
OF_DATA = ("data.image_size",)
"""Settings of the data that distinguish rows; whether the data are the same is checked by the
samples."""
DEPTH = 3


@dataclass(frozen=True)
class ComparedRun:
    path: Path
    method: str
    seed: int
    settings: Mapping[str, Any]
    source: str | None
    figures: Mapping[str, float]
    measured_on: Mapping[str, str]
    epochs: int


def read_runs(paths: Iterable[Path | str]) -> tuple[list[ComparedRun], list[str]]:
    """The runs at or below `paths`, and notes on what was left out."""
    runs: dict[Path, ComparedRun] = {}
    left_out = []
    for given in map(Path, paths):
        for folder in _find_runs(given):
            run = _read(folder)
            if run.measured_on:
                runs.setdefault(folder.resolve(), run)
            elif folder == given:
                raise UsageError(
                    f"{folder} has no results to compare; measure it with `kinfolk eval {folder}`"
                )
            else:
                left_out.append(str(folder))
    if not runs:
        raise UsageError(
            "none of the runs has results to compare; measure them with `kinfolk eval`"
        )
    found, notes = list(runs.values()), []
    require_same_data(found)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        notes = [f"Left out because nothing was measured: {', '.join(left_out[:3])}{more}."]
    return found, notes


def _find_runs(path: Path) -> list[Path]:
    hint = "give the folder that `kinfolk train --out` wrote, or one that holds several"
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}; {hint}")
    found = []
    for place, names, files in os.walk(path):
        names[:] = sorted(names) if len(Path(place).relative_to(path).parts) < DEPTH else []
        if "config.yaml" in files:
            found.append(Path(place))
            names.clear()
    if not found:
        raise UsageError(f"{path} contains no run folder (no config.yaml); {hint}")
    return found


def _read(folder: Path) -> ComparedRun:
    record = read_record(folder)
    config = TrainConfig.of_stored(record.config, str(folder / "config.yaml"))
    require_unedited(folder, config)
    framework, _, detector = config.method.partition("+")
    renamed = {  # as a run of today has them, so that it shares a row with an earlier one
        "framework": current_names(config.framework, framework),
        "detector": current_names(config.detector, detector.partition(":")[0]),
    }
    settings = flat(config.model_dump(mode="json") | renamed)
    settings = {key: value for key, value in settings.items() if _distinguishes_rows(key)}
    if (folder / FOREIGN).is_file():  # the settings of its training are unknown
        settings = {key: value for key, value in settings.items() if key in OF_DATA}
    measured: dict[str, Mapping[str, Any]] = {}
    for name, result in record.results.items():
        if figures_of_result(name, result):
            measured |= parts_of(name, result) if "sets" in result else {name: result}
    return ComparedRun(
        path=folder,
        method=config.method,
        seed=config.seed,
        settings=settings,
        source=config.data.source,
        figures=figures_of(record),
        measured_on={
            name: where_measured(result, config.data.source) for name, result in measured.items()
        },
        epochs=len(record.epochs),
    )


def _distinguishes_rows(key: str) -> bool:
    if key.startswith("data."):
        return key in OF_DATA
    return not any(key == name or key.startswith(f"{name}.") for name in NOT_IN_ROWS)


# ---- checks


def require_unedited(folder: Path, config: TrainConfig) -> None:
    """A copy of a run with another seed in config.yaml is not a second seed."""
    meta = exported_meta(folder)
    if meta.get("settings") in {None, *digests_of_stored(config)}:
        return
    changed = [
        f"`{key}` is {now} and was {meta.get(key)}"
        for key, now in (("seed", config.seed), ("method", config.method))
        if meta.get(key) != now
    ]
    what = "; ".join(changed) or "the digest of the settings differs"
    raise UsageError(
        f"{folder / 'config.yaml'} was changed after the training ({short(what)}), so the run"
        " cannot be compared; restore the file, or train a run with these settings"
    )


HOW = ("probe", "k", "temperature", "normaliser", "finetuning", "features", "normalised_by")
EARLIER_DEFAULTS = {"normaliser": "arithmetic", "finetuning": "ifnd"}
"""Results of earlier versions do not record these settings."""


def where_measured(result: Mapping[str, Any], source: str | None) -> str:
    """Everything that must be equal for two results to be comparable; the data of the run, from
    `source`, is identified by its samples."""
    data = "the run's own data" if result.get("data") == source else str(result.get("data"))
    counts = [
        f"{result[key]:,} to {key}" for key in ("train", "test") if isinstance(result.get(key), int)
    ]
    how = [
        f"{key.replace('_', ' ')} {result[key]}"
        for key in HOW
        if key in result and result[key] != EARLIER_DEFAULTS.get(key)
    ]
    return ", ".join(filter(None, (data, result.get("measured_on"), *counts, *how)))


def require_same_data(runs: Sequence[ComparedRun]) -> None:
    import pyarrow.parquet as pq

    def samples(run: ComparedRun) -> Any:
        path = run.path / "samples.parquet"
        return pq.read_table(path, columns=["key", "split", "digest"]) if path.is_file() else None

    first, expected = runs[0], samples(runs[0])
    for run in runs[1:]:
        found = samples(run)
        unknown = expected is None or found is None
        if not (run.source == first.source if unknown else found.equals(expected)):
            sizes = [
                "" if each is None else f" ({len(each):,} samples)" for each in (expected, found)
            ]
            raise UsageError(
                f"{first.path} was trained on {first.source}{sizes[0]} and {run.path} on"
                f" {run.source}{sizes[1]}, which are different data; compare runs on the same data"
            )
        for name in first.measured_on.keys() & run.measured_on.keys():
            was, now = first.measured_on[name], run.measured_on[name]
            if was != now:
                raise UsageError(
                    f"{name} was not measured in the same way: of {first.path} on {was}; of"
                    f" {run.path} on {now}; evaluate both in the same way"
                )
