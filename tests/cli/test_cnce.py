"""`kinfolk cnce`: the paper's table beside what is measured, the study of variance, and the file of
figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk import cnce
from kinfolk.cli import main


def left(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["cnce", *arguments])
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 points in place of 2,000, 80 columns in place of the terminal's."""

    def toy(**settings: Any) -> cnce.Toy:
        return original(**{"num_points": 60, "num_negatives": 10, **settings})

    original = cnce.Toy
    monkeypatch.setattr(cnce, "Toy", toy)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table_has_the_papers_figures_next_to_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "table.json"
    assert left("--seeds", "2", "--epochs", "1", "--train-each", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "0.02041 nats" in shown
    assert shown.count("0.01345 ± 0.00100") == 4  # the paper's NCE, whole, for both critics
    assert all(len(line) <= 80 for line in shown.splitlines())
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["settings"]["epochs"] == 1
    row = next(
        row
        for row in found["rows"]
        if (row["critic"], row["points"], row["omega"]) == ("own", "fresh", 95)
    )
    assert len(row["values"]) == 2
    assert left("--out", str(out)) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_one_run_is_shown_without_a_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert left("--seeds", "1", "--epochs", "1") == 0
    shown = capsys.readouterr().out
    assert "One run" in shown
    assert " own " not in shown
    assert "None" not in shown


def test_the_variance_study_prints_every_number_of_negatives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert left("--study", "variance", "--seeds", "1", "--epochs", "1") == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("4,096", "  90  ", "0.02041", "anchors: 60"))


def test_the_variance_of_two_files_is_shown_without_the_true_information(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "a.npy"), str(tmp_path / "b.npy")
    for path in (first, second):
        np.save(path, np.eye(20))
    assert left("--study", "variance", "--views", first, second, "--temperature", "0.5") == 0
    shown = capsys.readouterr().out
    assert "nats" not in shown  # nothing is known of the truth
    assert "anchors: 20" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study", "bias"], "'bias' is not one of"),
        (["--study", "variance", "--train-each"], "--train-each belongs to --study table"),
        (["--views", "a.npy", "b.npy"], "--views belongs to --study variance"),
        (
            ["--study", "variance", "--views", "a.npy", "b.npy"],
            "there is no file or folder `a.npy`",
        ),
        (["--temperature", "0"], "--temperature (=0.0) must be above 0"),
        (["--out", "table.csv"], "must end in .json"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
