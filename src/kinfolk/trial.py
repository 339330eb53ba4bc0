"""`kinfolk advise --try`: a few methods trained on the user's data with equal budgets, within a
time limit, and compared.

A pilot of one epoch measures the speed. The number of epochs is then set so that every method can
be trained with `PLANNED_SEEDS` seeds, seed by seed. The plan is kept in a file: repeated, a trial
continues, and further seeds are added. Without labels, proxies of the accuracy are compared; see
`CRITERIA`.

Dimension key: N samples, F features, R rows of a block.
"""

from __future__ import annotations

import _thread
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.api import train
from kinfolk.auditing.verdict import Candidate
from kinfolk.comparing import Comparison, compare
from kinfolk.data.sample_table import Samples
from kinfolk.errors import InterruptedRunError, UsageError, plural
from kinfolk.evaluation.probes import knn_accuracy
from kinfolk.evaluation.protocols import Augmented, read_results, write_result
from kinfolk.files import write_text
from kinfolk.sweeping import Clock, is_labelled, measure_run
from kinfolk.training.load_run import open_run
from kinfolk.training.run_folder import Run
from kinfolk.training.trainer import duration

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAN = "plan.json"
PLANNED_SEEDS, MOST_SEEDS = 3, 10
FEWEST_EPOCHS, MOST_EPOCHS = 3, 100
USED, SLOWER = 0.8, 1.15
"""Share of the time that is planned, and how much slower than the pilot an epoch may be."""
COMPARED = 2000
"""Samples whose views are compared with each other."""
CRITERIA = {
    "knn": "kNN accuracy by the labels",
    "groups": (
        "share of samples whose nearest neighbour is in their group; a proxy: the data has no"
        " labels"
    ),
    "views": (
        "share of augmented views whose nearest neighbour is another view of the same image; a"
        " proxy: the data has neither labels nor groups. It is lower where images are drawn"
        " together, rightly or not, so methods that attract are left out"
    ),
}


@dataclass(frozen=True)
class Plan:
    """What is trained, with which settings and recipe. The first candidate is the one to compare
    with. Before the pilot, `epochs` is 0 and `criterion` is empty; `seconds` are expected for one
    run."""

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
    """A trial after its time: the number of seeds that all methods have, and the comparison if
    every method was trained."""

    plan: Plan
    seeds: int
    table: Comparison | None

    @property
    def best(self) -> Candidate | None:
        """The method with the largest gain over the first beyond noise."""
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
    """Trains the candidates within `minutes` and compares them. Repeated, it continues, with the
    candidates of the plan in `out`.

    Args:
        minutes: time limit. A round of runs that is not expected to fit is not started.
        settings, recipe: of all runs.
        labels: (N,) of the training samples, below 0 where unknown, if `data` itself has none.
    """
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
    rounds, seconds = list[list[Path]](), dict[str, float]()
    clock = Clock(PLANNED_SEEDS * len(plan.candidates), progress, "trial")
    for seed in range(MOST_SEEDS):
        runs = [Run(out / each.name / f"seed-{seed}") for each in plan.candidates]
        todo = [run for run in runs if plan.criterion not in read_results(run.path)]
        expected = sum(seconds.get(run.path.parent.name, plan.seconds) for run in todo)
        if todo and time.monotonic() + expected > deadline:
            break
        clock.total = max(clock.total, (seed + 1) * len(runs))
        for each, run in zip(plan.candidates, runs, strict=True):
            if run not in todo:
                clock.number += 1
                continue
            clock.start(run.path)
            began = time.monotonic()
            if not _train(plan, each, seed, run, deadline, labels, progress):
                return _compared(plan, rounds)
            clock.finish(run)
            seconds[each.name] = time.monotonic() - began
        rounds.append([run.path for run in runs])
    return _compared(plan, rounds)


def _compared(plan: Plan, rounds: Sequence[Sequence[Path]]) -> Trial:
    paths = [path for runs in rounds for path in runs]
    if not paths:
        return Trial(plan, 0, None)
    table = compare(paths, figure=plan.criterion)
    shown = (plan.criterion, "gain", "95% interval", "p", "p (Holm)")
    columns = [column for column in table.columns if column.head in shown]
    return Trial(plan, len(rounds), replace(table, columns=columns))


def _fit_to_time(
    plan: Plan, out: Path, deadline: float, labels: NDArray[np.int64] | None, progress: bool
) -> Plan:
    """The plan with its epochs and criterion, by an epoch of the first method."""
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
    """Trains and measures a run; False if the deadline ended it."""
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
                settings={**plan.settings, "snapshots.epochs": 0, **candidate.settings},
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
        found = _measure(made, criterion, labels)
        write_result(made.path, criterion, {"accuracy": found, "data": plan.data})
    return True


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends a training that runs inside after `seconds`, with a checkpoint, as SIGTERM does."""
    done = threading.Event()

    def interrupt() -> None:
        if not done.wait(max(seconds, 0.0)):
            while True:  # the training may not have begun yet
                _thread.interrupt_main(signal.SIGTERM)
                if done.wait(0.5):
                    return

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _criterion(run: Run, labels: NDArray[np.int64] | None) -> str:
    if labels is not None or is_labelled(run):
        return "knn"
    samples = Samples.read(run.samples)
    groups = _groups(samples)
    return "views" if groups is None else "groups"


def _groups(samples: Samples) -> Tensor | None:
    """(N,) groups of the training samples, −1 without others; None if there are none."""
    if samples.groups is None:
        return None
    given = samples.groups[: samples.num_train]
    filled = np.asarray(["" if name is None else name for name in given])
    names, numbers = np.unique(filled, return_inverse=True)
    sizes = np.bincount(numbers)
    groups = np.where((names[numbers] != "") & (sizes[numbers] > 1), numbers, -1)
    return torch.from_numpy(groups) if (groups >= 0).any() else None


def _measure(run: Run, criterion: str, labels: NDArray[np.int64] | None) -> float:
    opened = open_run(run.path)
    images = opened.data()
    if criterion == "views":
        number = images.num_train
        ids = np.arange(min(number, COMPARED)) * number // min(number, COMPARED)
        views = (Augmented(opened.views(), 0, version) for version in (1, 2))
        first, second = (torch.from_numpy(opened.features(images, ids, views=v)) for v in views)
        return view_agreement(first, second)
    features = opened.features(images, np.arange(images.num_train))
    if criterion == "knn":
        assert labels is not None
        return knn_accuracy(features, labels)
    groups = _groups(Samples.read(run.samples))
    assert groups is not None
    return group_precision(torch.from_numpy(features), groups)


def view_agreement(first_NF: Tensor, second_NF: Tensor) -> float:
    """Share of the first views whose nearest second view is of the same image.

    Example:
        >>> view_agreement(torch.eye(3), torch.eye(3)[[0, 2, 1]])
        0.3333333432674408
    """
    sim_NN = functional.normalize(first_NF, dim=1) @ functional.normalize(second_NF, dim=1).T
    return float((sim_NN.argmax(1) == torch.arange(len(sim_NN))).float().mean())


def group_precision(features_NF: Tensor, groups_N: Tensor, block: int = 1024) -> float:
    """Share of the samples with a group (0 or above) whose nearest other sample is in it.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.5, 0.5]])
        >>> group_precision(x, torch.tensor([0, 0, 1, 1]))
        0.75
    """
    unit_NF, hits = functional.normalize(features_NF, dim=1), list[Tensor]()
    for rows in torch.split((groups_N >= 0).nonzero()[:, 0], block):
        sim_RN = unit_NF[rows] @ unit_NF.T
        sim_RN[torch.arange(len(rows)), rows] = -2
        hits.append(groups_N[sim_RN.argmax(1)] == groups_N[rows])
    return float(torch.cat(hits).float().mean())
