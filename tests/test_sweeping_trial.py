"""Trials: equal budgets within a time limit, continued where they were, and honest about noise."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kinfolk import sweeping as trials
from kinfolk.auditing.verdict import Candidate
from kinfolk.cli.audit import show_trial
from kinfolk.errors import InterruptedRunError, UsageError
from kinfolk.evaluation.protocols import read_results
from kinfolk.sweeping import Plan, Trial, run_trial, time_limit, view_agreement
from kinfolk.training.run_folder import Run

METHODS = (
    Candidate("", "simclr", "simclr"),
    Candidate("", "fnc", "simclr+fnc", {"detector.alpha": 0.05}),
)
QUICK = {"model.name": "resnet10", "model.width": 4, "batch_size": 32, "views.size": 8}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials of one epoch and two seeds; signals as before."""
    for name, value in {"PLANNED_SEEDS": 1, "MOST_SEEDS": 2, "MOST_EPOCHS": 1}.items():
        monkeypatch.setattr(trials, name, value)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
    InterruptedRunError.latest = None


def images(path: Path, labels: bool, number: int = 64) -> str:
    draw = np.random.default_rng(0)
    y = np.arange(number) % 2
    x = (draw.integers(0, 90, (number, 8, 8, 3)) + 150 * y[:, None, None, None]).astype(np.uint8)
    arrays: dict[str, Any] = {"x_train": x, "y_train": y} if labels else {"x_train": x}
    np.savez(path, **arrays)
    return str(path)


def test_a_trial_trains_every_method_alike_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = images(tmp_path / "x.npz", labels=True)
    found = run_trial(data, tmp_path / "try", METHODS, minutes=60, settings=QUICK)
    assert (found.seeds, found.plan.criterion, found.plan.epochs) == (2, "knn", 1)
    assert found.table is not None
    assert [record["seeds"] for record in found.table.records] == [[0, 1], [0, 1]]
    assert not (tmp_path / "try" / "pilot").exists()
    shown = capsys.readouterr().err
    assert "run 1 of 2" in shown
    assert "left in the trial" in shown
    show_trial(found)
    said = capsys.readouterr().out
    assert "knn: kNN accuracy by the labels." in said
    (command,) = (line.strip() for line in said.splitlines() if line.startswith("  kinfolk train"))
    assert shlex.split(command)[:4] == ["kinfolk", "train", "--data", data]
    assert "--set model.width=4" in command
    monkeypatch.setattr(trials, "train", None)
    again = run_trial(data, tmp_path / "try", (), minutes=1, settings=QUICK)
    assert again.table is not None
    assert again.table.records == found.table.records
    with pytest.raises(UsageError, match=r"contains a trial on .*x\.npz, not on digits"):
        run_trial("digits", tmp_path / "try", METHODS, minutes=1)


def test_without_labels_a_proxy_decides_and_says_so(tmp_path: Path) -> None:
    data = images(tmp_path / "x.npz", labels=False)
    attracts = Candidate("", "drawn", "simclr+fnc:attract", {"detector.alpha": 0.05})
    methods = (*METHODS, attracts)
    found = run_trial(data, tmp_path / "try", methods, minutes=60, settings=QUICK, progress=False)
    assert found.plan.criterion == "views"
    assert found.plan.candidates == METHODS  # the proxy does not judge the one that attracts
    assert "a proxy" in found.verdict()
    result = read_results(tmp_path / "try" / "simclr" / "seed-0")["views"]
    assert 0 <= result["accuracy"] <= 1
    plan = json.loads((tmp_path / "try" / "plan.json").read_text())
    assert plan["criterion"] == "views"


def test_labels_of_a_file_decide_where_the_data_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "MOST_SEEDS", 1)
    data, labels = images(tmp_path / "x.npz", labels=False), np.arange(64) % 2
    found = run_trial(
        data, tmp_path / "try", METHODS[:1], minutes=60, settings=QUICK, labels=labels
    )
    assert found.plan.criterion == "knn"
    assert read_results(tmp_path / "try" / "simclr" / "seed-0")["knn"]["accuracy"] > 0.9
    assert "cannot tell methods apart" in found.verdict()


def test_an_epoch_that_is_too_long_ends_the_pilot(tmp_path: Path) -> None:
    data = images(tmp_path / "x.npz", labels=True, number=6_000)
    began = time.monotonic()
    with pytest.raises(UsageError, match="an epoch takes more than a third of the"):
        run_trial(
            data, tmp_path / "try", METHODS, minutes=0.01, settings={**QUICK, "batch_size": 2}
        )
    assert time.monotonic() - began < 120
    assert (tmp_path / "try" / "plan.json").exists()  # the next call begins with the pilot


def test_a_round_that_does_not_fit_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "train", None)
    Plan("digits", METHODS, {}, None, epochs=1, seconds=100.0, criterion="knn").save(tmp_path)
    found = run_trial("digits", tmp_path, METHODS, minutes=1, progress=False)
    assert (found.seeds, found.table) == (0, None)
    assert "repeat the command to continue" in found.verdict()


def test_too_few_minutes_are_refused_with_how_many_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_train", lambda *given: True)
    monkeypatch.setattr(trials, "_criterion", lambda *given: "knn")
    monkeypatch.setattr(Run, "epochs", lambda run: [{"seconds": 20.0}])
    (tmp_path / "pilot").mkdir()
    with pytest.raises(UsageError, match="give it at least 4 minutes"):
        run_trial("digits", tmp_path, METHODS, minutes=1, progress=False)


def of(gain: float, verdict: str | None, seeds: int = 3) -> Trial:
    records = [
        {"method": "simclr", "knn_gain": None, "knn_verdict": None},
        {"method": "simclr+fnc (alpha 0.05)", "knn_gain": gain, "knn_verdict": verdict},
    ]
    plan = Plan("digits", METHODS, {}, None, epochs=5, seconds=1.0, criterion="knn")
    return Trial(plan, seeds, cast(Any, SimpleNamespace(records=records)))


def test_the_verdict_says_no_difference_where_there_is_none() -> None:
    assert of(2.0, "not significant").best is None
    assert of(2.0, "not significant").verdict().startswith("No difference")
    assert of(-2.0, "worse").verdict().startswith("No difference: no method is better than simclr")
    better = of(2.0, "better")
    assert better.best is METHODS[1]
    assert better.verdict().startswith("simclr+fnc is better than simclr here, by kNN accuracy")


def test_view_agreement() -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    assert view_agreement(x, 3 * x) == 1
    assert view_agreement(x, x.roll(1, 0)) == 0


def test_a_time_limit_interrupts_what_handles_the_signal_and_nothing_else() -> None:
    received = list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with time_limit(0.05):
        time.sleep(0.4)
    assert signal.SIGTERM in received
    received.clear()
    with time_limit(30):
        pass
    assert not received
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with time_limit(0.0):  # the process lives on
        time.sleep(0.2)
