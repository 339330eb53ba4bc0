"""Runs side by side: rows, figures, tests, and what is refused."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

import kinfolk as kf
from kinfolk.comparing.table import p_value
from kinfolk.errors import UsageError
from kinfolk.evaluation.protocols import write_result
from kinfolk.report.results import figures_of_result
from tests.comparing.runs import make_run
from tests.report.browser import open_page, resize

FLAGGED = {"flagged": 0.01, "precision": 0.5, "recall": 0.25, "f1": 1 / 3}


def two_degrees(t: float) -> float:
    """Beyond `t` in Student's distribution with two degrees of freedom, in closed form."""
    return (1 - t / math.hypot(t, math.sqrt(2))) / 2


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three methods, three seeds each; in a folder below the one that is given."""
    accuracies = {
        "simclr": (0.50, 0.52, 0.54),
        "simclr+glofnd": (0.55, 0.56, 0.60),
        "simclr+oracle:attract": (0.60, 0.62, 0.64),
    }
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            epoch = FLAGGED if "+" in method else {}
            run = make_run(
                tmp_path / "study" / f"{method.replace(':', '-')}-{seed}",
                method,
                seed,
                value,
                epoch=epoch,
            )
            write_result(
                run,
                "knn",
                {
                    "accuracy": value - 0.1,
                    "test": 10,
                    "measured_on": "test split",
                    "data": "photos",
                },
            )
    return tmp_path


def test_seeds_are_one_row_with_a_test(study: Path) -> None:
    table = kf.compare([study])
    plain, glofnd, oracle = table.records
    assert [record["method"] for record in table.records] == [
        "simclr",
        "simclr+glofnd",
        "simclr+oracle:attract",
    ]
    assert glofnd["seeds"] == [0, 1, 2]
    assert glofnd["linear"] == pytest.approx(57.0)
    assert glofnd["linear_deviation"] == pytest.approx(7**0.5)
    assert glofnd["linear_gain"] == pytest.approx(5.0)
    assert glofnd["linear_to_oracle"] == pytest.approx(-5.0)
    # differences 5, 4 and 6, two-sided
    assert glofnd["linear_p"] == pytest.approx(2 * two_degrees(5 * 3**0.5))
    half = 4.302653 / 3**0.5  # Student's t, two degrees of freedom, deviation 1
    assert (glofnd["linear_gain_low"], glofnd["linear_gain_high"]) == pytest.approx(
        (5 - half, 5 + half)
    )
    assert (glofnd["linear_pairs"], glofnd["linear_verdict"]) == (3, "better")
    assert glofnd["linear_p_holm"] == glofnd["linear_p"], (
        "one method is compared; the oracle is a reference"
    )
    assert (
        table.sentences()[0]
        == "simclr+glofnd: +5.0 points of linear against simclr (95% interval +2.5 to +7.5, n = 3"
        " seeds, p = 0.013): significantly better."
    )
    assert glofnd["knn_gain"] == pytest.approx(5.0)
    assert (plain["base"], plain["linear_p"]) == (None, None)
    assert plain["linear_to_oracle"] == pytest.approx(-10.0)
    assert oracle["linear_to_oracle"] is None
    assert plain["precision"] is None
    assert glofnd["precision"] == pytest.approx(50.0)
    assert glofnd["seconds"] == 3.0, "the median of the epochs"
    assert table.notes == []


def test_the_base_is_chosen(study: Path) -> None:
    plain, glofnd, oracle = kf.compare(study, base="simclr+oracle:attract", figure="knn").records
    assert plain["base"] == glofnd["base"] == "simclr+oracle:attract"
    assert glofnd["knn_gain"] == pytest.approx(-5.0)
    assert oracle["base"] is None
    for wrong, message in (
        ({"base": "moco"}, "`base` .=moco. must be one of the rows"),
        ({"figure": "map"}, "there are: knn, linear"),
    ):
        with pytest.raises(UsageError, match=message):
            kf.compare([study], **wrong)


def test_only_seeds_of_both_are_paired(study: Path) -> None:
    make_run(study / "more" / "glofnd-7", "simclr+glofnd", 7, 0.9)
    record = kf.compare([study]).records[1]
    assert record["seeds"] == [0, 1, 2, 7]
    assert record["linear_p"] == pytest.approx(2 * two_degrees(5 * 3**0.5))
    assert record["linear_pairs"] == 3
    assert "4" in str(kf.compare([study]))


def test_settings_tell_rows_apart(tmp_path: Path) -> None:
    for alpha in (0.01, 0.1):
        for seed in (0, 1):
            settings = {"detector.alpha": alpha, "knn.every": seed, "trainer.devices": 1 + seed}
            make_run(tmp_path / f"{alpha}-{seed}", "simclr+glofnd", seed, 0.5, settings=settings)
    make_run(tmp_path / "plain", "simclr", 0, 0.4, settings={"epochs": 7})
    table = kf.compare([tmp_path])
    assert [record["method"] for record in table.records] == [
        "simclr",
        "simclr+glofnd (alpha 0.01)",
        "simclr+glofnd (alpha 0.1)",
    ]
    assert [record["base"] for record in table.records] == [None, "simclr", "simclr"]
    assert table.notes == ["The methods were not trained with the same settings: epochs."]


def test_a_run_given_twice_counts_once_and_a_copy_is_refused(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, "simclr", 3, 0.5) for name in ("a", "b"))
    assert kf.compare([first, tmp_path / "a"]).records[0]["seeds"] == [3]
    with pytest.raises(
        UsageError, match=r"a and .*b are of the same method, settings and seed \(3\)"
    ):
        kf.compare([first, second])


def test_different_data_is_refused(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, name, 0, 0.5, num_samples=number)
        for name, number in (("simclr", 6), ("moco", 7))
    ]
    with pytest.raises(
        UsageError,
        match=r"simclr was trained on photos \(6 samples\) and .*moco on photos \(7 samples\)",
    ):
        kf.compare(runs)


def test_the_same_data_elsewhere_is_the_same(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, name, 0, 0.5, source=f"{name}/photos")
        for name in ("simclr", "moco")
    ]
    assert len(kf.compare(runs).records) == 2


def test_results_on_different_data_are_refused(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, name, 0, 0.5, data=data)
        for name, data in (("simclr", "photos"), ("moco", "digits"))
    ]
    with pytest.raises(
        UsageError,
        match=r"linear was not measured in the same way: .* on the run's own data, .* on digits",
    ):
        kf.compare(runs)


def test_runs_without_results_are_refused(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "study" / "bare", "moco")
    with pytest.raises(
        UsageError, match="has no results to compare; measure it with `kinfolk eval"
    ):
        kf.compare([bare])
    with pytest.raises(UsageError, match="none of the runs has results"):
        kf.compare([tmp_path])
    (bare / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no run folder"):
        kf.compare([bare / "empty"])
    with pytest.raises(UsageError, match="there is no folder"):
        kf.compare([tmp_path / "nowhere"])
    for seed in (0, 1):
        run = make_run(tmp_path / "study" / str(seed), "simclr", seed, 0.5)
    write_result(run, "knn", {"accuracy": 0.4})
    table = kf.compare([tmp_path])
    assert [record["method"] for record in table.records] == ["simclr"]
    left_out, partly = table.notes
    assert left_out.startswith("Left out because nothing was measured: ")
    assert partly == "knn is missing in some runs of a row: its mean is over the others."


def test_the_table_as_markdown_and_csv(study: Path, tmp_path: Path) -> None:
    table = kf.compare([study])
    head, rule, _, glofnd, _ = str(table).splitlines()
    assert head.startswith(
        "| method | knn | linear | gain | 95% interval | n | p | verdict | to oracle | precision |"
    )
    assert rule.count("---:") == head.count("|") - 2
    assert glofnd.startswith(
        "| simclr+glofnd | 47.0 ± 2.6 | 57.0 ± 2.6 | +5.0 | +2.5 to +7.5 | 3 | 0.013 | better |"
        " -5.0 | 50.0 ± 0.0 |"
    )
    (row,) = [
        row
        for row in csv.DictReader(io.StringIO(table.to_csv()))
        if row["method"] == "simclr+glofnd"
    ]
    assert float(row["linear"]) == pytest.approx(57.0)
    assert row["seeds"] == "0 1 2"
    table.save(tmp_path / "new" / "table.csv")
    assert (tmp_path / "new" / "table.csv").read_text(encoding="utf-8") == table.to_csv()
    with pytest.raises(UsageError, match=r"must end in .csv or .html"):
        table.save(tmp_path / "table.doc")


def test_names_are_escaped(tmp_path: Path) -> None:
    for width in (8, 16):
        make_run(tmp_path / str(width), "simclr", 0, 0.5, settings={"model.name": f"a|b_{width}&%"})
    table = kf.compare([tmp_path])
    assert r"a\|b_8&%" in str(table)


def test_features_and_normalisers_must_be_the_same(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "simclr", 0, 0.5)
    make_run(tmp_path / "b", "simclr", 1, 0.5, normaliser="arithmetic")
    assert len(kf.compare([tmp_path]).records) == 1, "results of earlier versions do not name it"
    make_run(tmp_path / "c", "simclr", 2, 0.5, features="before pooling")
    with pytest.raises(UsageError, match="features before pooling; evaluate both in the same way"):
        kf.compare([tmp_path])


def test_each_protocol_gives_its_columns_in_percent() -> None:
    assert figures_of_result(
        "linear", {"accuracy": 0.5, "strength": 0.01, "converged": True, "test": 10}
    ) == {"linear": 50.0}
    parts = [
        {"fraction": 0.001, "accuracy": 0.25, "accuracies": [0.25]},
        {"fraction": 1.0, "accuracy": 0.5, "deviation": None},
    ]
    sets = [{"name": "cifar100", "accuracy": 0.5, "top1": 0.5, "map": None}]
    assert figures_of_result(
        "transfer", {"accuracy": 0.5, "sets": sets, "measured_on": "test split"}
    ) == {"transfer cifar100": 50.0}
    kin = {
        "f1": 0.25,
        "precision": None,
        "exact": {"f1": 0.5},
        "threshold": {"mae": 0.02},
        "tp_similarity": 0.9,
        "alpha": 0.01,
    }
    assert figures_of_result("kin", kin) == {
        "kin F1": 25.0,
        "kin threshold MAE": 0.02,
        "kin TP similarity": 90.0,
    }
    semi = {"semi 0.1 %": 25.0, "semi 100 %": 50.0}
    assert figures_of_result("semi", {"accuracy": 0.375, "fractions": parts}) == semi
    assert figures_of_result("semi", {"accuracy": 0.5, "fractions": parts[1:]}) == {
        "semi 100 %": 50.0
    }
    five = {"fraction": 0.0999, "subset": "10percent", "accuracy": 0.5, "top5": 0.75}
    assert figures_of_result("finetune", {"accuracy": 0.5, "top5": 0.75, "fractions": [five]}) == {
        "finetune 10percent": 50.0,
        "finetune 10percent top 5": 75.0,
    }
    assert figures_of_result("linear", {"accuracy": 0.5, "top5": 0.75}) == {
        "linear": 50.0,
        "linear top 5": 75.0,
    }
    assert figures_of_result("kin", {"anchor_f1": 0.5}) == {"kin F1 per anchor": 50.0}
    recalls = {
        "image_to_text": {"R@1": 0.1},
        "text_to_image": {"R@1": 0.2},
        "mean": 0.15,
        "images": 5,
    }
    assert figures_of_result("retrieval", recalls) == {
        "i→t R@1": 10.0,
        "t→i R@1": 20.0,
        "retrieval": 15.0,
    }


def test_few_seeds_are_not_significant_in_words(tmp_path: Path) -> None:
    accuracies = {
        "simclr": (0.50, 0.54),
        "simclr+glofnd": (0.52, 0.54),
        "simclr+fnc": (0.5,),
        "simclr+oracle": (0.49, 0.56),
    }
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            make_run(tmp_path / f"{method}-{seed}", method, seed, value)
    table = kf.compare(tmp_path)
    record = {record["method"]: record for record in table.records}
    assert record["simclr+glofnd"]["linear_verdict"] == "not significant"
    assert record["simclr+fnc"]["linear_verdict"] == "no test"
    sentences = {sentence.partition(":")[0]: sentence for sentence in table.sentences()}
    assert sentences["simclr+glofnd"].endswith(
        "n = 2 seeds, p = 0.500): not significant, so it may be noise."
    )
    assert sentences["simclr+fnc"].endswith("one seed in common, so there is no test.")


def test_several_methods_are_corrected_by_holm(tmp_path: Path) -> None:
    accuracies = {
        "simclr": (0.5, 0.5, 0.5),
        "simclr+glofnd": (0.54, 0.55, 0.56),
        "simclr+fnc": (0.51, 0.52, 0.53),
    }
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            make_run(tmp_path / f"{method}-{seed}", method, seed, value)
    table = kf.compare(tmp_path)
    record = {record["method"]: record for record in table.records}
    smaller, larger = record["simclr+glofnd"]["linear_p"], record["simclr+fnc"]["linear_p"]
    assert record["simclr+glofnd"]["linear_p_holm"] == pytest.approx(2 * smaller)
    assert record["simclr+fnc"]["linear_p_holm"] == pytest.approx(max(2 * smaller, larger))
    assert "p (Holm)" in [column.head for column in table.columns]


def test_the_page_draws_the_intervals(study: Path, tmp_path: Path, browser: Any) -> None:
    path = tmp_path / "compare.html"
    kf.compare([study]).save(path)
    opened = open_page(browser, path, viewport={"width": 390, "height": 900})
    for width in (390, 1300):
        resize(opened, width)
        assert opened.complaints == []
        assert opened.page.locator(".plot .main-svg .errorbar").count() >= 5
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert "significantly better" in opened.page.locator(".verdict").inner_text()
        assert opened.page.locator("#table tbody tr").count() == 3
        wide = opened.page.evaluate(
            "(e => e.scrollWidth > e.clientWidth)(document.querySelector('#table .sideways'))"
        )
        assert wide or width == 1300
        assert opened.page.locator("#table .scrolls").is_visible() == wide


def test_p_values_equal_formulas() -> None:
    assert p_value([1.0], [0.0]) is None
    assert p_value([1.0, 2.0], [0.0]) is None
    assert p_value([1.0, 2.0], [1.0, 2.0]) is None
    assert p_value([5.0, 4.0, 6.0], [1.0, 1.0, 1.0]) == pytest.approx(two_degrees(4 * 3**0.5))
    assert p_value([1.0, 1.0, 1.0], [5.0, 4.0, 6.0]) == pytest.approx(
        1 - two_degrees(4 * 3**0.5)
    ), "one-sided"
