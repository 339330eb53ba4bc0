"""`kf.sweep` and `kinfolk sweep`: one training per combination of method, settings and seed, and
the table that compares them. Repeated with the same arguments, a sweep continues."""

from __future__ import annotations

import itertools
import logging
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

from kinfolk.api import evaluate, train
from kinfolk.comparing import Comparison, compare
from kinfolk.data.sample_table import Samples
from kinfolk.errors import UsageError, printable
from kinfolk.evaluation.protocols import read_results, write_result
from kinfolk.training.config import parse_settings
from kinfolk.training.launch import global_rank
from kinfolk.training.load_run import open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.trainer import duration

if TYPE_CHECKING:
    import os

    from kinfolk.training.train import Data

LOG = logging.getLogger("kinfolk.sweep")


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in order, and the table over them; None if the data has no labels to
    measure with."""

    runs: tuple[Run, ...]
    table: Comparison | None


def sweep(
    data: Data,
    out: str | os.PathLike[str],
    *,
    methods: Sequence[str] = ("simclr",),
    settings: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    protocols: Sequence[str] = ("knn", "linear"),
    common: Sequence[str] | Mapping[str, Any] = (),
    progress: bool = True,
    **arguments: Any,
) -> Sweep:
    """Trains every combination of `methods`, `settings` and `seeds`, and compares them.

    Args:
        data: as in `kf.train`.
        out: folder for the runs; the folder of each names method, settings and seed.
        methods: methods to train. A `detector.*` setting applies to methods with a detector only.
        settings: the values of each setting, `{"detector.alpha": [0.01, 0.05]}`.
        seeds: one training per seed.
        protocols: protocols of `kf.evaluate`, measured where the data has labels.
        common: settings with one value for all runs, as `settings` of `kf.train`.
        arguments: other arguments of `kf.train`, the same for all runs.
    """
    if {"method", "seed", "resume", "overwrite"} & arguments.keys():
        raise UsageError(
            "a sweep takes `methods` and `seeds`, and resumes by itself; leave method, seed, resume"
            " and overwrite out"
        )
    if not methods or not seeds or not all((settings or {}).values()):
        raise UsageError(
            "a sweep needs at least one method, one seed and one value for each setting"
        )
    names = combinations(methods, settings or {})
    runs: list[Run] = []
    clock = Clock(len(names) * len(seeds), progress)
    for (name, (method, chosen)), seed in itertools.product(names.items(), seeds):
        folder = Path(out) / name / f"seed-{seed}"
        clock.start(folder)
        given: dict[str, Any] = {
            "method": method,
            "seed": seed,
            "settings": {**parse_settings(common), **chosen},
            **arguments,
        }
        resume = (folder / "config.yaml").exists()
        run = train(data, folder, **given, resume=resume, progress=progress)
        measure_run(run, data, protocols)
        clock.finish(run)
        runs.append(run)
    if any(run.rank > 0 for run in runs) or not is_labelled(runs[0]):
        return Sweep(tuple(runs), None)
    return Sweep(tuple(runs), compare([run.path for run in runs]))


@final
class Clock:
    """Logs, and shows on the screen, which of `total` runs begins, and how long all will take from
    there. `what`: what the runs belong to."""

    def __init__(self, total: int, shown: bool, what: str = "sweep") -> None:
        self.total, self.number, self._seconds = total, 0, list[float]()
        self._what = what
        is_visible = shown and global_rank(1) == 0
        self._console = Console(stderr=True, soft_wrap=True) if is_visible else None
        self._since = time.monotonic()

    def start(self, folder: Path) -> None:
        """Called before each run. The estimate is the mean of the runs that were trained so far."""
        self.number += 1
        self._since = time.monotonic()
        left = ""
        if self._seconds:
            seconds = statistics.fmean(self._seconds) * (self.total - self.number + 1)
            left = f"; about {duration(seconds)} left in the {self._what}"
        text = f"run {self.number} of {self.total}: {folder}{left}"
        LOG.info("%s", text)
        if self._console is not None:
            self._console.print(printable(text), markup=False, highlight=False)

    def finish(self, run: Run) -> None:
        """Called after each run; one that was finished before does not count."""
        if not run.unchanged:
            self._seconds.append(time.monotonic() - self._since)


def combinations(
    methods: Sequence[str], settings: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """(method, settings) of each combination, by the name of its folder.

    Example:
        >>> list(combinations(["simclr", "simclr+fnc"], {"detector.alpha": [0.1, 0.2]}))
        ['simclr', 'simclr+fnc,alpha=0.1', 'simclr+fnc,alpha=0.2']
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for method in methods:
        keys = [key for key in settings if "+" in method or not key.startswith("detector.")]
        for values in itertools.product(*(settings[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            words = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
            name = re.sub(r"[^\w.,=+:-]+", "_", ",".join([method, *words]))
            found[name.replace(":", "-")] = method, chosen
    return found


def split_values(text: str) -> tuple[str, list[Any]]:
    """`detector.alpha=0.01,0.05` as a key and its values. Commas within brackets belong to a value.

    Example:
        >>> split_values("detector.num_clusters=[10,30],[100]")
        ('detector.num_clusters', [[10, 30], [100]])
    """
    key, equals, values = text.partition("=")
    parts = re.split(r",(?![^\[]*\])", values)
    if not equals or not all(part.strip() for part in parts):
        raise UsageError(
            "a setting of a sweep must have the form KEY=VALUE,VALUE, as in"
            f" detector.alpha=0.01,0.05; received {text!r}"
        )
    return key.strip(), [parse_settings([f"{key}={part}"])[key.strip()] for part in parts]


def measure_run(run: Run, data: Data, protocols: Sequence[str]) -> None:
    """Measures what has not been measured since the training."""
    if run.rank > 0 or not is_labelled(run):
        return
    done = read_results(run.path) if run.unchanged else {}
    source = open_run(run.path).config.data.source
    for protocol in protocols:
        # from its source as the run reads it, so that its labels are the same
        if protocol not in done:
            found = evaluate(run, data if source is None else None, protocol)
            write_result(run.path, protocol, {**found, "data": source})


def is_labelled(run: Run) -> bool:
    """Whether any sample of the run has a label."""
    labels = Samples.read(run.samples).labels
    return labels is not None and bool((labels >= 0).any())
