"""Curves of a study: a panel for each method and figure, a line for each run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.loading import load


def test_a_line_for_each_run_in_the_panel_of_its_method(tmp_path: Path) -> None:
    curves = load("curves")
    for run, shift in (
        ("simclr_temperature_0.1-0", 0.0),
        ("simclr_temperature_0.5-0", 0.1),
        ("spcl+fnc-3", 0.2),
    ):
        rows: list[dict[str, float]] = [
            {"epoch": 1, "loss": 3.0},
            {"epoch": 2, "loss": 2.0, "tp_similarity": 0.5 + shift},
        ]
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    runs = curves.read(tmp_path)
    assert [curves.method_of(run) for run in runs] == ["simclr", "simclr", "spcl+fnc"]
    figure = curves.drawn(runs, ["loss", "tp_similarity"])
    assert [(line.name, line.xaxis, len(line.x)) for line in figure.data] == [
        ("simclr temperature 0.1, seed 0", "x", 2),
        ("simclr temperature 0.1, seed 0", "x2", 1),
        ("simclr temperature 0.5, seed 0", "x", 2),
        ("simclr temperature 0.5, seed 0", "x2", 1),
        ("spcl+fnc, seed 3", "x3", 2),
        ("spcl+fnc, seed 3", "x4", 1),
    ]
    assert [note.text for note in figure.layout.annotations][:4] == [
        "simclr: loss",
        "simclr: tp_similarity",
        "spcl+fnc: loss",
        "spcl+fnc: tp_similarity",
    ]
