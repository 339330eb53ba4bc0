"""The texts and figures of the report page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinfolk.errors import KinfolkWarning, UsageError, duration
from kinfolk.report import record as texts
from kinfolk.report.record import read_record
from kinfolk.report.results import result_rows
from tests.report.synthetic import images, make_run

NUMBERS: list[tuple[Any, str]] = [
    (None, "—"),
    (True, "yes"),
    (0, "0"),
    (0.00012345, "0.0001234"),
    (12345, "12,345"),
    ([0.1, 1], "0.1, 1"),
    ({"a": 1}, "a 1"),
    ({}, "—"),
    (math.nan, "—"),
    ("x", "x"),
]


def test_numbers_are_rounded_to_what_is_readable() -> None:
    for value, text in NUMBERS:
        assert texts.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.7, "1 min 00 s")],
)
def test_durations_are_shown_in_their_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_full_run_has_all_tiles_and_tables(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", data=images(classes=["cat", "dog"])))
    assert [name for name, _, _ in texts.tiles(record)] == [
        "kNN accuracy",
        "Linear probe",
        "Detection F1",
        "Pairs flagged",
        "Loss",
        "Training time",
    ]
    assert texts.describe_training(record) == "trained for 12 epochs on 60 images"
    assert result_rows(record.results) == [("knn", "93.0 %", ""), ("linear", "95.0 %", "")]
    assert record.num_train == 60
    assert ("Refused", "3 files, see quarantine.csv") in texts.facts_of(record)


def test_results_are_named_as_in_a_comparison(tmp_path: Path) -> None:
    shares = [
        {"fraction": 0.1, "accuracy": 0.5, "top5": 0.75, "deviation": 0.01},
        {"fraction": 0.01, "subset": "1percent", "accuracy": 0.25},
    ]
    results = {
        "clusters": {"nmi": 0.5, "normaliser": "geometric"},
        "kin": {"f1": 0.5, "alpha": 0.1, "exact": {"anchor_f1": 0.125}},
        "linear": {"accuracy": 0.9, "top5": 0.99, "measured_on": "test split", "labels": 80},
        "retrieval": {"text_to_image": {"R@1": 0.031}, "mean": 0.0979, "images": 1000},
        "semi": {"accuracy": 0.375, "fractions": shares, "probe": "rcl"},
        "transfer": {"accuracy": 0.5, "sets": [{"name": "pets", "accuracy": 0.25}, 3]},
    }
    (make_run(tmp_path / "run", bare=True) / "eval").mkdir()
    for name, result in results.items():
        (tmp_path / "run" / "eval" / f"{name}.json").write_text(json.dumps(result))
    record = read_record(tmp_path / "run")
    assert result_rows(record.results) == [
        ("clusters", "50.0 %", "NMI, geometric normaliser"),
        ("kin F1", "50.0 %", ""),
        ("kin, exact α = 0.1, F1 per anchor", "12.5 %", ""),
        ("linear", "90.0 %", "80 labels, test split"),
        ("linear top 5", "99.0 %", "80 labels, test split"),
        ("t→i R@1", "3.1 %", ""),
        ("retrieval", "9.8 %", "mean recall"),
        ("semi 10 %", "50.0 ± 1.0 %", ""),
        ("semi 10 % top 5", "75.0 %", ""),
        ("semi 1percent", "25.0 %", ""),
        ("semi average", "37.5 %", ""),
        ("transfer pets", "25.0 %", ""),
    ]
    assert texts.tiles(record) == [
        ("Linear probe", "90.0%", "on frozen features"),
        ("Mean recall", "9.8%", "at 1, 5 and 10, both ways"),
    ]


@pytest.mark.parametrize("part", [None, 3, [], ["x"], [{}], [{"fraction": "x"}]])
def test_parts_that_are_none_are_left_out(part: Any) -> None:
    assert result_rows({"semi": {"accuracy": None, "fractions": part}}) == []


def test_a_run_without_results_has_no_tiles_and_tables(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", bare=True))
    assert not texts.tiles(record)
    assert record.results == {}
    assert "Refused" not in dict(texts.facts_of(record))
    assert texts.describe_training(record) == "trained for 0 of 12 epochs"


def test_a_killed_and_resumed_run_counts_each_epoch_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", bare=True)
    lines = [
        '{"epoch": 1, "loss": 3}',
        '{"epoch": 2, "loss": 2.5}',
        '{"epoch": 2, "loss": 2}',
        '{"epoch": 3, "lo',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.warns(
        KinfolkWarning, match=r"metrics\.jsonl has incomplete lines, which are left out: 4"
    ):
        record = read_record(run)
    assert [(row["epoch"], row["loss"]) for row in record.epochs] == [(1, 3), (2, 2)]


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        read_record(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no config\.yaml"):
        read_record(tmp_path)


def test_empty_sections_are_not_shown() -> None:
    config: dict[str, Any] = {
        "method": "simclr",
        "optimizer": {"lr": 0.1},
        "detector": {},
        "python": {"model": None, "detector": None},
    }
    assert [name for name, _ in texts.configuration(config)] == ["run", "optimizer"]


def test_a_run_without_labels_has_no_tiles_of_labels(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", data=images()))
    record = replace(record, epochs=[{"epoch": 1, "loss": 2.0, "flagged": 0.1}])
    names = [name for name, _, _ in texts.tiles(record)]
    assert names == ["Linear probe", "Pairs flagged", "Loss"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("simclr+glofnd", "images"),
        ("clip+glofnd", "captions"),
        ("pairs", "text pairs"),
        ("of-a-plugin", "images"),
    ],
)
def test_the_summary_counts_what_the_method_learns_from(
    tmp_path: Path, method: str, words: str
) -> None:
    record = read_record(make_run(tmp_path / "run", data=images(classes=["cat", "dog"])))
    record.config["method"] = method
    assert texts.describe_training(record) == f"trained for 12 epochs on 60 {words}"
