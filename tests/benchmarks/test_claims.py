"""The table of claims and the figure of gains by precision: from few records and from many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.loading import BENCHMARKS, load

figures = load("study_figures")
CLAIM: dict[str, Any] = {
    "paper": "IFND",
    "claim": "better",
    "run": "`simclr+ifnd`",
    "evidence": [
        {"study": study, "dataset": "gtsrb", "method": "simclr+ifnd", "base": "simclr"}
        for study in ("long", "gain")
    ],
}


def rows(*gains: float) -> dict[str, dict[int, Any]]:
    """The base and a method that is above it by these gains, one for each seed."""
    return {
        method: {
            seed: {
                "figures": {"knn": 50.0, "linear": 60.0 + seed + above * gain, "precision": 30.0},
                "curves": {"precision": [None, 0.2, 0.2 + gain / 100]},
            }
            for seed, gain in enumerate(gains)
        }
        for method, above in (("simclr", 0), ("simclr+ifnd", 1))
    }


def verdict(results: dict[str, Any], claim: dict[str, Any] | None = None) -> tuple[str, str]:
    """The cells "measured" and "verdict"."""
    row = figures.claims_table([claim or CLAIM], results).splitlines()[-1]
    measured, said = row.strip("| ").split(" | ")[-2:]
    return measured, said.strip("*")


def test_what_has_no_record_is_not_run_yet() -> None:
    assert verdict({}) == ("–", "not run yet")
    assert verdict({"long": {"gtsrb": {"simclr": {}}}}) == ("–", "not run yet")


def test_verdicts_follow_from_the_seeds() -> None:
    short = {"gain": {"gtsrb": rows(-1.0, -2.0, -1.5)}}
    assert verdict(short)[1] == "not seen (from scratch, 6 to 16 epochs)"
    assert verdict({"long": {"gtsrb": rows(2.0)}, **short})[1].startswith("not seen (from scratch,")
    measured, said = verdict({"long": {"gtsrb": rows(2.0, 2.5, 2.2)}, **short})
    assert said == "reproduced"
    assert "GTSRB from scratch, 100 epochs: kNN +0.0, linear +2.2 (3 seeds, p = 0.002)" in measured
    assert verdict({"long": {"gtsrb": rows(9.0, -3.0, 1.0)}})[1] == "same sign"
    assert verdict({"long": {"gtsrb": rows(2.0)}})[1] == "one seed: no verdict"
    assert verdict({}, {**CLAIM, "verdict": "cannot be asked"})[1] == "cannot be asked"


def test_data_sets_that_disagree_are_named() -> None:
    claim = {**CLAIM, "evidence": [{**CLAIM["evidence"][0], "datasets": ["gtsrb", "cifar10"]}]}
    above, below = rows(2.0, 2.5, 2.2), rows(-2.0, -2.5, -2.2)
    said = verdict({"long": {"gtsrb": below, "cifar10": above}}, claim)[1]
    assert said == "reproduced: CIFAR-10; not seen: GTSRB"
    assert verdict({"long": {"gtsrb": above, "cifar10": above}}, claim)[1] == "reproduced"
    assert verdict({"long": {"cifar10": above}}, claim)[1] == "reproduced"


def test_a_criterion_that_orders_methods_as_accuracy_does_correlates_with_it() -> None:
    def runs(knn: float, views: float) -> dict[int, Any]:
        return {0: {"figures": {"knn": knn, "views": views, "nearest": -views}}}

    datasets = {
        "gtsrb": {
            "simclr": runs(50, 70),
            "simclr+a": runs(51, 71),
            "simclr+b": runs(52, 73),
            "simclr+c": runs(49, 60),
            "simclr+c:attract": runs(60, 10),
        }
    }
    views, nearest = figures.criteria_table(datasets).splitlines()[2:]
    assert "| +1.00 | −0.20 | `simclr+b` | +2.0 | +2.0 |" in views
    assert "| −1.00 | +0.20 | `simclr+c` | −1.0 | +2.0 |" in nearest


def test_a_claim_about_a_curve_compares_its_ends() -> None:
    claim = {**CLAIM, "evidence": [{**CLAIM["evidence"][0], "curve": "precision"}]}
    measured, said = verdict({"long": {"gtsrb": rows(5.0, 6.0, 7.0)}}, claim)
    assert "precision 20 % to 26 % (3 seeds, p = 0.005)" in measured
    assert said == "reproduced"


def test_a_claim_about_a_gap_compares_the_first_and_the_last_data_set() -> None:
    one = {**CLAIM["evidence"][0], "gaps": ["a", "b", "gtsrb"]}
    claim = {**CLAIM, "evidence": [one]}
    datasets = {"a": rows(1.0, 1.5), "b": rows(2.0, 2.0), "gtsrb": rows(5.0, 5.6)}
    measured, said = verdict({"long": datasets}, claim)
    assert "gap in the linear probe 1.2, 2.0, 5.3 (2 seeds, p = 0.004)" in measured
    assert said == "reproduced"
    swapped = {**datasets, "a": datasets["gtsrb"], "gtsrb": datasets["a"]}
    assert verdict({"long": swapped}, claim)[1] == "not seen"
    assert verdict({"long": {"gtsrb": rows(1.0)}}, claim) == ("–", "not run yet")


def test_every_claim_names_methods_of_its_study() -> None:
    claims = yaml.safe_load((BENCHMARKS / "claims.yaml").read_text(encoding="utf-8"))
    assert {claim["paper"] for claim in claims} == {"IFND", "GloFND", "Ring", "SPCL", "RCL"}
    adapters = load("good_encoder").METHODS
    for one in (one for claim in claims for one in figures.comparisons(claim)):
        for method in (one["method"], one.get("base", one["method"])):
            if one["study"] == "good_encoder":
                assert method.removeprefix("simclr+") in adapters
                assert one["dataset"] in load("good_encoder").DATASETS
            elif one["study"] == "text":
                study = yaml.safe_load((BENCHMARKS / "text.yaml").read_text(encoding="utf-8"))
                assert one["dataset"] in study["data"]
                assert method in ("simclr", *(f"simclr+{name}" for name in study["methods"]))
            else:
                path = BENCHMARKS / "studies" / f"{one['study']}.yaml"
                study = yaml.safe_load(path.read_text(encoding="utf-8"))
                assert one["dataset"] in study["datasets"]
                assert method in study["methods"], (one["study"], method)


def test_the_figure_has_a_trace_for_each_data_set_and_regime() -> None:
    results = {"long": {"gtsrb": rows(1.0, 2.0)}, "gain": {"gtsrb": rows(1.0), "tuning": rows(1.0)}}
    traces = figures.by_precision(results)["data"]
    assert [trace["name"] for trace in traces] == [
        "GTSRB, from scratch, 100 epochs",
        "GTSRB, from scratch, 6 to 16 epochs",
    ]
    assert traces[0]["x"] == [0.3]
    assert traces[1]["marker"]["symbol"] == ["circle-open"]
    assert figures.by_precision({})["data"] == []


def test_records_of_sentences_are_points_of_the_figure(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    for stage, method, knn in (
        ("run", "plain", 90.0),
        ("run", "fnc", 92.0),
        ("choose", "fnc", 1.0),
    ):
        record = {"data": "banking77", "stage": stage, "method": method, "seed": 0, "knn": knn}
        record["precision"] = None if method == "plain" else 0.6
        (tmp_path / "banking77" / f"{stage}-{method}.json").write_text(json.dumps(record))
    (trace,) = figures.by_precision({"text": figures.read_text(tmp_path)})["data"]
    assert (trace["x"], trace["y"], trace["text"]) == ([0.6], [2.0], [" fnc"])
    assert figures.read_text(tmp_path / "none") == {}


def test_a_table_without_the_oracle_has_no_gap() -> None:
    line = figures.table(rows(1.0, 2.0), oracle="simclr+oracle").splitlines()[-1]
    assert line.split(" | ")[8:10] == ["–", "–"]
