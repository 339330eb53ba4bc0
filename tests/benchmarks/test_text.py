"""The tables of the contest on sentences, from few records and from all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.loading import BENCHMARKS, load

contest = load("text")
figures = load("study_figures")
STUDY: dict[str, Any] = yaml.safe_load((BENCHMARKS / "text.yaml").read_text(encoding="utf-8"))
MEANS = {"plain": 60.0, "gist": 63.0, "guide": 66.0, "glofnd": 61.0, "oracle": 70.0, "mnrl": 60.0}


def write(folder: Path, seeds: dict[str, int], data: str = "banking77") -> None:
    """Records of so many seeds of each method, with small differences between seeds."""
    for place, (name, number) in enumerate(seeds.items()):
        for seed in range(number):
            path = contest.record_path(folder, "final", data, name, seed, {})
            path.parent.mkdir(parents=True, exist_ok=True)
            value = MEANS[name] + 5 * seed + 0.1 * ((place + seed) % 3)
            record = {"data": data, "stage": "final", "method": name, "seed": seed}
            record |= {"detector": None, "settings": {"margin": 0.05}, "recall@1": 90.0}
            record |= {"knn": value / 2, "map": value}
            flags = {"flagged": 0.01, "precision": 0.5, "recall": 0.4, "seconds": 12.0}
            record |= flags if name in ("guide", "glofnd") else {}
            path.write_text(json.dumps(record), encoding="utf-8")


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_full_table_says_whether_the_goal_is_reached(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(MEANS, 5))
    found = contest.tables(STUDY, tmp_path)
    assert set(found) == {"banking77"}
    row = cells(found["banking77"], "guide")
    assert row[5].startswith("76.")
    assert row[6] in ("59%", "60%", "61%")
    assert row[7:9] == ["< 0.001", "< 0.001"]
    assert row[10:] == ["0.010, 0.500, 0.400", "margin 0.05", "12", "5 of 5"]
    assert "mAP: `guide` gains" in found["banking77"]
    assert found["banking77"].count("The goal is reached") == 2


def test_a_part_of_the_records_says_how_many_seeds_it_has(tmp_path: Path) -> None:
    """The seeds that rows share are compared, so that a hard seed counts for both or for none."""
    assert contest.tables(STUDY, tmp_path) == {}
    write(tmp_path, {"plain": 5, "guide": 2, "oracle": 3})
    table = contest.tables(STUDY, tmp_path)["banking77"]
    assert [cells(table, name)[-1] for name in ("plain", "guide", "oracle")] == [
        "5 of 5",
        "2 of 5",
        "3 of 5",
    ]
    assert cells(table, "guide")[6] in ("59%", "60%", "61%")  # and not of the means of all seeds
    assert "2 of 5 seeds. The goal is not reached" in table  # there is no GIST to be ahead of
    write(tmp_path, {"gist": 1})
    assert "guide" in contest.tables(STUDY, tmp_path)["banking77"]
    one = tmp_path / "one"
    write(one, {"plain": 1, "glofnd": 1})
    assert contest.tables(STUDY, one)["banking77"].endswith("No row has a gain yet.")


def test_the_page_has_a_place_for_each_table_and_the_figure_takes_the_rows(tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs" / "results.md").read_text(encoding="utf-8")
    for data in STUDY["data"]:
        changed = figures.with_tables(page, {f"text {data}": "| new |"})
        assert changed.count("| new |") == 1
    write(tmp_path, dict.fromkeys(MEANS, 2))
    rows = figures.read_text(tmp_path)["banking77"]
    assert set(rows) == {"simclr", *(f"simclr+{name}" for name in MEANS if name != "plain")}
    (drawn,) = [
        trace
        for trace in figures.by_precision({"text": {"banking77": rows}})["data"]
        if len(trace["x"])
    ]
    assert 50.0 in [100 * x if x <= 1 else x for x in drawn["x"]]
