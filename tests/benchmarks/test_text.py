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


def last_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[-1].split())


def test_a_full_table_compares_with_the_plain_loss_gist_and_the_oracle(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(MEANS, 5))
    rounds = [{"mnrl": 2.0, "guide": 3.0}, {"mnrl": 2.0, "guide": 5.0}, {"mnrl": 4.0, "guide": 6.0}]
    (tmp_path / "times.json").write_text(json.dumps({"rounds": rounds}), encoding="utf-8")
    found = contest.tables(STUDY, tmp_path)
    assert set(found) == {"banking77"}
    row = cells(found["banking77"], "guide")
    assert row[4].startswith("76.")
    assert row[5:7] == ["+6.0 (p < 0.001)", "+3.0 (p < 0.001)"]
    assert row[8:] == ["0.010, 0.500, 0.400", "margin 0.05", "1.50", "5 of 5"]
    summary = last_paragraph(found["banking77"])
    assert "mAP: `oracle` gains +10.0 (p < 0.001), and `guide`, the best without labels" in summary
    assert "60% of that" in summary


def test_the_share_of_the_oracle_is_shown_only_where_the_oracle_gains(tmp_path: Path) -> None:
    write(tmp_path, {"plain": 4, "guide": 4})
    for seed, gain in enumerate((1.0, -1.0, 1.0, -0.9)):
        plain = contest.record_path(tmp_path, "final", "banking77", "plain", seed, {})
        record = json.loads(plain.read_text(encoding="utf-8"))
        record = {**record, "method": "oracle", "map": record["map"] + gain}
        path = contest.record_path(tmp_path, "final", "banking77", "oracle", seed, {})
        path.write_text(json.dumps(record), encoding="utf-8")
    summary = last_paragraph(contest.tables(STUDY, tmp_path)["banking77"])
    assert "`guide`, the best without labels, +6.0 (p < 0.001) (4 of 5 seeds)" in summary
    assert "of that" not in summary


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
    assert cells(table, "guide")[5].startswith("+6.1")  # and not of the means of all seeds
    assert "(2 of 5 seeds)" in table
    one = tmp_path / "one"
    write(one, {"plain": 1, "glofnd": 1})
    table = contest.tables(STUDY, one)["banking77"]
    assert table.endswith("No row can be compared with `oracle` yet.")


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
