"""The texts and figures of the report page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kinfolk.errors import KinfolkWarning, UsageError, duration
from kinfolk.report import record as texts
from kinfolk.report.record import read_record
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
    assert [row["accuracy"] for row in texts.results(record)] == ["93.0%", "95.0%"]
    assert (record.num_train, record.labelled) == (60, True)
    assert ("Refused", "3 files, see quarantine.csv") in texts.facts_of(record)


def test_several_data_sets_are_named_and_fractions_have_their_own_figure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", bare=True)
    (run / "eval").mkdir()
    (run / "eval" / "transfer.json").write_text(
        '{"accuracy": 0.5, "sets": [{"name": "pets", "accuracy": 0.25}, 3], "fractions": [{}]}'
    )
    (row,) = texts.results(read_record(run))
    assert row["details"] == [("pets", "25.0%")]


def test_top5_averages_and_figures_per_anchor(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", bare=True)
    (run / "eval").mkdir()
    shares = [
        {"fraction": 0.1, "accuracy": 0.5, "top5": 0.75},
        {"fraction": 0.01, "subset": "1percent", "accuracy": 0.25},
    ]
    results = {
        "semi": {"accuracy": 0.375, "fractions": shares, "probe": "rcl"},
        "linear": {"accuracy": 0.9, "top5": 0.99},
        "kin": {"f1": 0.5, "anchor_f1": 0.25, "exact": {"anchor_f1": 0.125}},
        "clusters": {"nmi": 0.5, "normaliser": "geometric"},
    }
    for name, result in results.items():
        (run / "eval" / f"{name}.json").write_text(json.dumps(result))
    record = read_record(run)
    rows = {row["title"]: dict(row["details"]) for row in texts.results(record)}
    assert rows["Few labels, average"] == {
        "10 %": "50.0% (top-5 75.0%)",
        "1percent": "25.0%",
        "probe": "rcl",
    }
    assert rows["Linear probe"] == {"top-5": "99.0%"}
    assert rows["False negatives"] == {
        "F1": "50.0%",
        "F1 per anchor": "25.0%",
        "exact": "F1 per anchor 12.5%",
    }
    assert rows["Clusters"] == {"NMI": "50.0%", "normaliser": "geometric"}
    assert texts.tiles(record) == [("Linear probe", "90.0%", "on frozen features, top-5 99.0%")]


def test_retrieval_is_recall_in_percent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", bare=True)
    (run / "eval").mkdir()
    found = {
        "image_to_text": {"R@1": 0.031, "R@5": 0.1},
        "mean": 0.0979,
        "images": 1000,
        "chance": 0.001,
    }
    (run / "eval" / "retrieval.json").write_text(json.dumps(found))
    record = read_record(run)
    (row,) = texts.results(record)
    assert (row["title"], row["accuracy"], row["share"]) == ("Retrieval, mean recall", "9.8%", 9.8)
    assert row["details"] == [
        ("image to text", "R@1 3.1%, R@5 10.0%"),
        ("images", "1000"),
        ("chance", "0.1%"),
    ]
    assert texts.tiles(record) == [
        ("Mean recall", "9.8%", "at 1, 5 and 10, both ways, of 1000 images")
    ]


def test_a_run_without_results_has_no_tiles_and_tables(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", bare=True))
    assert not texts.tiles(record)
    assert texts.results(record) == []
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


def test_sections_without_effect_are_not_shown() -> None:
    config: dict[str, Any] = {
        "method": "simclr",
        "text": {"context": 32},
        "knn": {"every": 1},
        "optimizer": {"lr": 0.1},
        "detector": {},
    }
    config["python"] = {"model": None, "detector": None}
    assert [name for name, _ in texts.configuration(config)] == ["run", "knn", "optimizer"]
    assert [name for name, _ in texts.configuration(config, labelled=False)] == [
        "run",
        "optimizer",
    ]
    assert [name for name, _ in texts.configuration({**config, "method": "clip"})] == [
        "run",
        "text",
        "knn",
        "optimizer",
    ]


def test_an_unlabelled_run_has_no_figures_of_labels(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", data=images()))
    assert not record.labelled
    names = [name for name, _, _ in texts.tiles(record)]
    assert "kNN accuracy" not in names
    assert "Detection F1" not in names
    assert read_record(make_run(tmp_path / "labelled", data=images(classes=["a", "b"]))).labelled


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
