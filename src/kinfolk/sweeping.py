"""Several trainings and the table that compares them: `kf.sweep`, and `kinfolk advise --try`.
Repeated with the same arguments, both continue.

Dimension key: N samples, F features.
"""

from __future__ import annotations

import _thread
import itertools
import json
import logging
import re
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from kinfolk.api import evaluate, train
from kinfolk.auditing.verdict import Candidate
from kinfolk.comparing import Comparison, compare
from kinfolk.data.sample_table import Samples
from kinfolk.errors import InterruptedRunError, UsageError, duration, plural, printable
from kinfolk.evaluation.probes import knn_accuracy
from kinfolk.evaluation.protocols import Augmented, read_results, write_result
from kinfolk.files import write_text
from kinfolk.training.config import parse_settings
from kinfolk.training.launch import global_rank
from kinfolk.training.load_run import open_run
from kinfolk.training.run_folder import Run

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from kinfolk.training.train import Data

LOG = logging.getLogger("kinfolk.sweep")


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, and the table over them; None if the data has no labels."""

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
        run = train(
            data,
            folder,
            method=method,
            seed=seed,
            settings={**parse_settings(common), **chosen},
            resume=(folder / "config.yaml").exists(),
            progress=progress,
            **arguments,
        )
        measure_run(run, data, protocols)
        clock.finish(run)
        runs.append(run)
    if any(run.rank > 0 for run in runs) or not is_labelled(runs[0]):
        return Sweep(tuple(runs), None)
    return Sweep(tuple(runs), compare([run.path for run in runs]))


@final
class Clock:
    def __init__(self, total: int, shown: bool, what: str = "sweep") -> None:
        self.total, self.number, self._what = total, 0, what
        self._seconds, self._since = list[float](), time.monotonic()
        self._is_shown = shown and global_rank(1) == 0

    def start(self, folder: Path) -> None:
        self.number += 1
        self._since = time.monotonic()
        text = f"run {self.number} of {self.total}: {folder}"
        if self._seconds:
            seconds = statistics.fmean(self._seconds) * (self.total - self.number + 1)
            text += f"; about {duration(seconds)} left in the {self._what}"
        LOG.info("%s", text)
        if self._is_shown:
            Console(stderr=True, soft_wrap=True).print(printable(text), markup=False)

    def finish(self, run: Run) -> float:
        seconds = time.monotonic() - self._since
        if not run.unchanged:
            self._seconds.append(seconds)
        return seconds


def combinations(
    methods: Sequence[str], settings: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """(method, settings) by the name of the folder, as in `simclr+fnc,alpha=0.1`."""
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
    """`detector.num_clusters=[10,30],[100]` as a key and its values, [10, 30] and [100]."""
    key, equals, values = text.partition("=")
    parts = re.split(r",(?![^\[]*\])", values)
    if not equals or not all(part.strip() for part in parts):
        raise UsageError(
            "a setting of a sweep must have the form KEY=VALUE,VALUE, as in"
            f" detector.alpha=0.01,0.05; received {text!r}"
        )
    return key.strip(), [parse_settings([f"{key}={part}"])[key.strip()] for part in parts]


def measure_run(run: Run, data: Data, protocols: Sequence[str]) -> None:
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
    labels = Samples.read(run.samples).labels
    return labels is not None and bool((labels >= 0).any())


PLAN = "plan.json"
PLANNED_SEEDS, MOST_SEEDS = 3, 10
FEWEST_EPOCHS, MOST_EPOCHS = 3, 100
USED, SLOWER = 0.8, 1.15
"""Share of the time that is planned, and how much slower an epoch may be than in the pilot."""
COMPARED = 2000
"""Samples whose views are compared with each other."""
CRITERIA = {
    "knn": "kNN accuracy by the labels",
    "views": (
        "share of augmented views whose nearest neighbour is another view of the same image; a"
        " proxy: the data has neither labels nor groups. Methods that attract are left out, because"
        " it is lower where images are drawn together"
    ),
}


@dataclass(frozen=True)
class Plan:
    """What a trial trains; the first candidate is compared with. The pilot sets `epochs`,
    `seconds` of one run, and `criterion`."""

    data: str
    candidates: tuple[Candidate, ...]
    settings: Mapping[str, Any]
    recipe: str | None
    epochs: int = 0
    seconds: float = 0.0
    criterion: str = ""

    def save(self, folder: Path) -> None:
        write_text(folder / PLAN, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        values = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return cls(**{**values, "candidates": tuple(Candidate(**c) for c in values["candidates"])})


@dataclass(frozen=True)
class Trial:
    plan: Plan
    seeds: int
    table: Comparison | None

    @property
    def best(self) -> Candidate | None:
        key = self.plan.criterion
        gains = {
            record["method"].partition(" ")[0]: record[f"{key}_gain"]
            for record in (self.table.records if self.table is not None else ())
            if record[f"{key}_verdict"] == "better"
        }
        named = [each for each in self.plan.candidates if each.method in gains]
        return max(named, key=lambda each: gains[each.method], default=None)

    def verdict(self) -> str:
        base, criterion = self.plan.candidates[0].method, CRITERIA[self.plan.criterion]
        trained = f"{plural(self.plan.epochs, 'epoch')} and {plural(self.seeds, 'seed')} each"
        if self.table is None:
            return "The time ended before every method was trained; repeat the command to continue."
        if self.seeds < 2:
            return (
                f"One seed ({trained}) cannot tell methods apart; repeat the command to add seeds."
            )
        if self.best is not None:
            return f"{self.best.method} is better than {base} here, by {criterion} ({trained})."
        return (
            f"No difference: no method is better than {base} beyond the noise of the seeds, by"
            f" {criterion} ({trained}). Repeat the command to add seeds; until then train {base}."
        )


def run_trial(
    data: str,
    out: Path,
    candidates: Sequence[Candidate],
    *,
    minutes: float,
    settings: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    labels: NDArray[np.int64] | None = None,
    progress: bool = True,
) -> Trial:
    """Trains the candidates within `minutes` and compares them by one of `CRITERIA`; continues the
    plan in `out`. A pilot sets the number of epochs such that every method fits with
    `PLANNED_SEEDS` seeds; a round of seeds that is not expected to fit is not started. `labels`:
    (N,) of the training samples, below 0 where unknown, if `data` itself has none."""
    deadline = time.monotonic() + 60 * minutes
    plan = Plan(data, tuple(candidates), settings or {}, recipe)
    if (out / PLAN).exists():
        plan = Plan.read(out)
        if plan.data != data:
            raise UsageError(
                f"{out} contains a trial on {plan.data}, not on {data}; choose another --out"
            )
    if plan.epochs == 0:
        out.mkdir(parents=True, exist_ok=True)
        plan.save(out)
        plan = _fit_to_time(plan, out, deadline, labels, progress)
        plan.save(out)
    paths, seconds = list[Path](), dict[str, float]()
    clock = Clock(PLANNED_SEEDS * len(plan.candidates), progress, "trial")
    for seed in range(MOST_SEEDS):
        runs = [Run(out / each.name / f"seed-{seed}") for each in plan.candidates]
        todo = [run for run in runs if plan.criterion not in read_results(run.path)]
        expected = sum(seconds.get(run.path.parent.name, plan.seconds) for run in todo)
        if todo and time.monotonic() + expected > deadline:
            break
        clock.total = max(clock.total, (seed + 1) * len(runs))
        clock.number += len(runs) - len(todo)
        for each, run in zip(plan.candidates, runs, strict=True):
            if run not in todo:
                continue
            clock.start(run.path)
            if not _train(plan, each, seed, run, deadline, labels, progress):
                return _summarise(plan, paths)
            seconds[each.name] = clock.finish(run)
        paths += [run.path for run in runs]
    return _summarise(plan, paths)


def _summarise(plan: Plan, paths: Sequence[Path]) -> Trial:
    if not paths:
        return Trial(plan, 0, None)
    table = compare(paths, figure=plan.criterion)
    shown = (plan.criterion, "gain", "95% interval", "p", "p (Holm)")
    columns = [column for column in table.columns if column.head in shown]
    return Trial(plan, len(paths) // len(plan.candidates), replace(table, columns=columns))


def _fit_to_time(
    plan: Plan, out: Path, deadline: float, labels: NDArray[np.int64] | None, progress: bool
) -> Plan:
    pilot, began = Run(out / "pilot"), time.monotonic()
    left = deadline - began
    shutil.rmtree(pilot.path, ignore_errors=True)
    one = replace(plan, epochs=1)
    if not _train(one, plan.candidates[0], 0, pilot, began + left / 3, labels, progress):
        raise UsageError(
            f"an epoch takes more than a third of the {duration(left)} of --try; give it more"
            " minutes, or a part of the data"
        )
    criterion, taken = _criterion(pilot, labels), time.monotonic() - began
    if criterion == "views":
        compared = tuple(each for each in plan.candidates if ":attract" not in each.method)
        plan = replace(plan, candidates=compared)
    epoch = SLOWER * float(pilot.epochs()[-1]["seconds"])
    others, number = max(0.0, taken - epoch), PLANNED_SEEDS * len(plan.candidates)
    epochs = int((USED * (left - taken) / number - others) / epoch)
    if epochs < FEWEST_EPOCHS:
        needed = (number * (others + FEWEST_EPOCHS * epoch) / USED + taken) / 60
        raise UsageError(
            f"--try is too short for {plural(len(plan.candidates), 'method')} with"
            f" {PLANNED_SEEDS} seeds and {FEWEST_EPOCHS} epochs each; give it at least"
            f" {needed + 1:.0f} minutes, or a part of the data"
        )
    shutil.rmtree(pilot.path)
    epochs = min(epochs, MOST_EPOCHS)
    return replace(plan, epochs=epochs, seconds=others + epochs * epoch, criterion=criterion)


def _train(
    plan: Plan,
    candidate: Candidate,
    seed: int,
    run: Run,
    deadline: float,
    labels: NDArray[np.int64] | None,
    progress: bool,
) -> bool:
    """False if the deadline ended the run."""
    resume = run.config.exists()
    given: dict[str, Any] = {} if resume else {"recipe": plan.recipe}
    try:
        with time_limit(deadline - time.monotonic()):
            made = train(
                plan.data,
                run.path,
                method=candidate.method,
                epochs=plan.epochs,
                seed=seed,
                settings={**plan.settings, **candidate.settings},
                resume=resume,
                report=False,
                progress=progress,
                **given,
            )
    except InterruptedRunError as error:
        if error.signal == signal.SIGTERM and time.monotonic() >= deadline:
            InterruptedRunError.latest = None
            return False
        raise
    criterion = plan.criterion or _criterion(made, labels)
    if criterion == "knn" and labels is None:
        measure_run(made, plan.data, ["knn"])
    else:
        found = _measure(made, labels)
        write_result(made.path, criterion, {"accuracy": found, "data": plan.data})
    return True


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends a training that runs inside, with a checkpoint, as SIGTERM does."""
    done = threading.Event()

    def interrupt() -> None:
        wait = max(seconds, 0.0)
        while not done.wait(wait):  # the training may not have begun at the first signal
            _thread.interrupt_main(signal.SIGTERM)
            wait = 0.5

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _criterion(run: Run, labels: NDArray[np.int64] | None) -> str:
    return "views" if labels is None and not is_labelled(run) else "knn"


def _measure(run: Run, labels: NDArray[np.int64] | None) -> float:
    opened = open_run(run.path)
    images = opened.data()
    number = images.num_train
    if labels is not None:
        return knn_accuracy(opened.features(images, np.arange(number)), labels)
    ids = np.arange(min(number, COMPARED)) * number // min(number, COMPARED)
    views = (Augmented(opened.views(), 0, version) for version in (1, 2))
    first, second = (torch.from_numpy(opened.features(images, ids, views=v)) for v in views)
    return view_agreement(first, second)


def view_agreement(first_NF: Tensor, second_NF: Tensor) -> float:
    """Share of the first views whose nearest second view is of the same image."""
    sim_NN = functional.normalize(first_NF, dim=1) @ functional.normalize(second_NF, dim=1).T
    return float((sim_NN.argmax(1) == torch.arange(len(sim_NN))).float().mean())
