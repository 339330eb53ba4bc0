"""The runs that are compared: found, read, and checked to be of the same data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinfolk.comparing.alike import require_same_data, where_measured
from kinfolk.comparing.figures import AVERAGE, figures_of, measured, parts_of
from kinfolk.errors import UsageError
from kinfolk.report.record import read_record
from kinfolk.training.changes import WITHOUT_EFFECT, flat
from kinfolk.training.config import TrainConfig

ASIDE = ("method", "seed", "trainer", *WITHOUT_EFFECT)
"""Settings that make no row of its own."""
OF_DATA = ("data.image_size", "data.depth")
"""Of the data's settings those that do; whether the data are the same is asked of the samples themselves."""
DEPTH = 3
"""How far below a folder runs are looked for."""


@dataclass(frozen=True)
class One:
    """A run with its figures: what it is called, its settings flattened, on what each protocol was measured, and which parts each average
    is over."""

    path: Path
    method: str
    seed: int
    settings: Mapping[str, Any]
    source: str | None
    figures: Mapping[str, float]
    measured_on: Mapping[str, tuple[str, ...]]
    averaged: Mapping[str, frozenset[str]]


def read_runs(paths: Iterable[Path | str]) -> tuple[list[One], list[str]]:
    """The runs at or below `paths`, and a note on those that were left out because nothing was measured."""
    runs, left_out = [], []
    for given in map(Path, paths):
        folders = _folders(given)
        for folder in folders:
            run = _read(folder)
            if run.measured_on:
                runs.append(run)
            elif folder == given:
                raise UsageError(f"{folder} has no results to compare; measure it with `kinfolk eval {folder}`")
            else:
                left_out.append(str(folder))
    runs = list({run.path.resolve(): run for run in runs}.values())
    if not runs:
        raise UsageError("none of the runs has results to compare; measure them with `kinfolk eval`")
    require_same_data(runs)
    notes = [f"Left out, because nothing was measured: {_few(left_out)}."] if left_out else []
    for name in dict.fromkeys(name for run in runs for name in run.averaged):
        if len({run.averaged[name] for run in runs if name in run.averaged}) > 1:
            runs = [replace(run, figures={key: value for key, value in run.figures.items() if not key.startswith(name)}) for run in runs]
            notes.append(f"{name} is left out: the runs were not measured on the same parts.")
    return runs, notes


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}; give the folder that `kinfolk train --out` wrote, or one that holds several")
    found = []
    for place, names, files in os.walk(path):
        names[:] = sorted(names) if len(Path(place).relative_to(path).parts) < DEPTH else []
        if "config.yaml" in files:
            found.append(Path(place))
            names.clear()
    if not found:
        raise UsageError(f"{path} holds no run, nor do folders in it: there is no config.yaml; give what `kinfolk train --out` wrote")
    return found


def _read(folder: Path) -> One:
    record = read_record(folder)
    config = TrainConfig.of(record.config, str(folder / "config.yaml"))
    settings = {key: value for key, value in flat(config.model_dump(mode="json")).items() if _tells_apart(key)}
    results = {str(result["protocol"]): result for result in record.results}
    results = {name: result for name, result in results.items() if measured(name, result)}
    sets = {name: part for protocol, result in results.items() if "sets" in result for name, part in parts_of(protocol, result).items()}
    whole = {name: result for name, result in results.items() if "sets" not in result}
    measured_on = {name: where_measured(result, config.data.source) for name, result in (whole | sets).items()}
    parts = {f"{name} {AVERAGE}": frozenset(parts_of(name, result)) for name, result in results.items()}
    averaged = {name: each for name, each in parts.items() if len(each) > 1}
    return One(folder, config.method, config.seed, settings, config.data.source, figures_of(record), measured_on, averaged)


def _tells_apart(key: str) -> bool:
    if key.startswith("data."):
        return key in OF_DATA
    return not any(key == aside or key.startswith(f"{aside}.") for aside in ASIDE)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
