"""Studies: what they must have, and the table says what it should of made-up figures;
test_studies.py resolves them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from kinfolk.training.defaults import assemble
from tests.benchmarks.loading import BENCHMARKS, load

STUDIES = sorted((BENCHMARKS / "studies").glob("*.yaml"))

study, study_figures = load("study"), load("study_figures")


def test_the_tables_of_the_ifnd_paper_are_there() -> None:
    named = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES
    }
    assert {
        "simclr",
        "pcl",
        "simclr+ifnd",
        "simclr+ifnd:attract",
        "simclr+oracle:attract",
    } <= named["clusters"].keys()
    crossed = [
        next(iter(change.values())) for name, change in named["ifnd-table7"].items() if "(" in name
    ]
    kinds = {
        ("queue_size" in one, one["schedule"], one["num_clusters"][0], one.get("confidence"))
        for one in crossed
    }
    assert len(kinds) == len(crossed) == 12, (
        "objective × assignment × clusters × confidence, which only a growing share goes by"
    )
    assert all((one["schedule"] == "linear") == ("confidence" in one) for one in crossed)
    rates = [
        change.get("detector", {}).get("final_rate", 1.0)
        for change in named["ifnd-schemes"].values()
    ]
    assert {0.25, 0.5, 0.75, 1.0} == set(rates)


def test_the_ablations_of_the_spcl_paper_are_there() -> None:
    named = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES
    }
    assert {"simclr", "spcl"} <= named["spcl"].keys()
    losses = ("contrast_weight", "metric_weight", "prototype_weight")
    changes = [
        change.get("framework", {})
        for name, change in named["spcl-table2"].items()
        if name != "simclr"
    ]
    weights = {
        tuple(change.get(loss, 1.0) for loss in losses)
        for change in changes
        if "prototypes" not in change
    }
    assert weights == {
        (1, 1, 1),
        (1, 1, 0),
        (1, 0, 1),
        (0, 1, 1),
        (0.1, 1, 1),
        (1, 0.1, 1),
        (1, 1, 0.1),
    }
    assert {"prototypes": "labels"} in changes
    figure = named["spcl-figure2"].values()
    numbers = {tuple(change.get("framework", {}).get("num_clusters", ())) for change in figure}
    assert {(8,), (4096,)} <= numbers
    assert {128, 4096} <= {change.get("batch_size") for change in figure}
    hot = {
        (name.partition(" ")[0], change["framework"]["temperature"])
        for name, change in named["spcl-temperature"].items()
    }
    assert hot == {
        (method, temperature)
        for method in ("simclr", "spcl")
        for temperature in (0.1, 0.2, 0.5, 1.0)
    }


def test_the_ablations_of_the_rcl_paper_are_there() -> None:
    named = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES
    }
    assert {"moco", "mocov3", "nnclr", "rcl"} <= named["rcl"].keys()
    assert {"nnclr", "rcl"} <= named["rcl-table2"].keys()
    sizes = [change["framework"]["queue_size"] for change in named["rcl-figure5b"].values()]
    assert sizes == sorted(sizes)
    assert 4096 in sizes[1:-1], "the recipe's has a smaller and a larger one beside it"
    removed = {
        name: {
            kind.partition(" ")[2]: change.get("views", {})
            for kind, change in named["rcl-figure5c"].items()
            if kind.startswith(name)
        }
        for name in ("simclr", "mocov3", "nnclr", "rcl")
    }
    assert len(removed["rcl"]) == 4
    assert all(kinds == removed["rcl"] for kinds in removed.values()), "each method loses the same"
    table3 = {
        (change["framework"]["criteria"], "shared_predictor" in change["framework"])
        for change in named["rcl-table3"].values()
    }
    assert {(1, False), (2, True), (3, True), (4, True), (3, False)} <= table3
    kinds = {
        change.get("framework", {}).get("hierarchy", "none")
        for change in named["rcl-table4"].values()
    }
    assert kinds == {"none", "kmeans", "dbscan", "online"}
    assert {
        f"{base}+hierarchy{action}" for base in ("simclr", "moco") for action in ("", ":reweight")
    } <= named["hierarchy"].keys()


def test_the_ablations_of_the_ring_paper_are_there() -> None:
    named = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES
    }
    lesions = [
        (one.get("detector", {}).get("anneal"), one.get("detector", {}).get("upper"))
        for one in named["ring-table2"].values()
    ]
    assert {(None, None), ("none", None), (None, 1.0)} <= set(lesions)
    assert {"la", "ir+cave", "cmc+cave", "ir+ring:attract", "cmc+ring:attract"} <= named[
        "ring-table6"
    ].keys()
    for name in ("ir+ring:attract", "cmc+ring:attract"):
        assert named["ring-table6"][name]["framework"]["pool_kin"], "equation 5"
    balls = [one["detector"] for name, one in named["ring-figure2a"].items() if name != "ir"]
    assert {(ball["lower"], ball.get("start_epoch", 0)) for ball in balls} == {
        (low, at) for low in (0.5, 0.75, 0.9) for at in (0, 8, 15, 22)
    }
    assert all(ball["anneal"] == "none" and ball["upper"] == 1 for ball in balls)
    policies = {
        one["detector"]["anneal"] for name, one in named["ring-figure2bc"].items() if name != "ir"
    }
    assert policies == {"linear", "step", "knn", "loss"}


def test_the_ablations_of_the_glofnd_paper_are_there() -> None:
    named = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES
    }
    assert named["glofnd-figure4"]["sogclr+glofnd (single threshold)"]["detector"] == {
        "shared": True,
        "rule": "adam",
        "alpha": 0.1,
    }
    assert {"sogclr", "sogclr+fnc", "sogclr+glofnd"} <= named["glofnd-figure4"].keys()
    starts = {
        (name.partition(" ")[0], one["detector"]["start_epoch"])
        for name, one in named["glofnd-figure5"].items()
        if name != "sogclr"
    }
    assert starts == {
        (f"sogclr+{detector}", epoch)
        for detector in ("glofnd", "fnc")
        for epoch in (2, 5, 8, 11, 14, 17)
    }


def test_no_two_rows_are_the_same_training() -> None:
    for path in STUDIES:
        document, seen = yaml.safe_load(path.read_text(encoding="utf-8")), dict[str, str]()
        for name in document["methods"]:
            change = study.settings_of(document, name)
            labels = change.pop("labels", None)
            for key, file in change.pop("files", {}).items():
                change = study.merged(change, study.in_section(key, file))
            method = study.method_of(name, change)
            config = assemble(
                None,
                change.pop("recipe", document["recipe"]),
                {"method": method},
                study.settings(change),
            )
            for part in (config.framework, config.detector):
                if (
                    part.get("schedule") in ("step", "constant")
                    and part.get("final_rate", 1.0) == 1
                ):
                    part.pop("confidence", None)  # of samples that are all accepted
            same = seen.setdefault(f"{config.model_dump_json()} {labels}", name)
            assert same == name, f"{name} is {same}"


def runs(*linear: float, **more: float) -> list[dict[str, float]]:
    return [{"knn": value - 1, "linear": value, "seconds": 2.0, **more} for value in linear]


def test_the_gap_to_the_oracle() -> None:
    figures = {
        "simclr": runs(50.0, 52.0),
        "pcl": runs(53.0, 53.0),
        "simclr+ifnd": runs(54.5, 55.5, mtpr=30.0, mtnr=99.0, nmi=40.0, fn_similarity=11.0),
        "simclr+fnc (late)": runs(49.5, 50.5),
        "simclr+oracle:attract": runs(59.0, 63.0),
    }
    assert study.gap_closed("simclr+ifnd", figures) == pytest.approx(0.4)
    assert study.gap_closed("simclr+oracle:attract", figures) == 1
    assert study.gap_closed("simclr+fnc (late)", figures) == pytest.approx(-0.1)
    assert study.gap_closed("simclr", figures) is None
    assert study.gap_closed("pcl", figures) is None, "a framework of its own"
    assert study.gap_closed("pcl", figures, "simclr") == pytest.approx(0.2)
    text = study.table(figures, "simclr")
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
    ]
    assert {len(row) for row in rows} == {len(header)}
    closed = dict(zip(figures, (row[header.index("gap closed")] for row in rows), strict=True))
    assert closed == {
        "simclr": "–",
        "pcl": "20 %",
        "simclr+ifnd": "40 %",
        "simclr+fnc (late)": "-10 %",
        "simclr+oracle:attract": "100 %",
    }
    assert rows[2][header.index("MTPR")] == "30.0 ± 0.0"
    assert rows[0][header.index("MTPR")] == "–"
    assert rows[2][header.index("FN similarity")] == "11.0 ± 0.0"
    assert "TP similarity" not in header
    assert rows[2][header.index("against its base")] == "+4.0 / +4.0"


def test_the_base_has_the_same_setting() -> None:
    figures = {
        f"{method} ({n})": runs(value)
        for n, values in {"20": (50.0, 53.0, 60.0), "100": (20.0, 29.0, 30.0)}.items()
        for method, value in zip(
            ("simclr", "simclr+ifnd", "simclr+oracle:attract"), values, strict=True
        )
    }
    assert study.gap_closed("simclr+ifnd (20)", figures) == pytest.approx(0.3)
    assert study.gap_closed("simclr+ifnd (100)", figures) == pytest.approx(0.9)
    assert study.base_of("simclr (20)", figures) is None


def test_without_an_oracle_above_the_base_there_is_no_gap() -> None:
    figures = {"simclr": runs(50.0), "simclr+fnc": runs(51.0)}
    assert study.gap_closed("simclr+fnc", figures) is None
    assert study.gap_closed("simclr+fnc", {**figures, "simclr+oracle:attract": runs(49.0)}) is None
    assert "MTPR" not in study.table(figures)


def test_the_table_of_recalls_has_means_and_gains() -> None:
    directions = {
        "image_to_text": {"R@1": 0.05, "R@5": 0.2, "R@10": 0.3},
        "text_to_image": {"R@1": 0.04, "R@5": 0.15, "R@10": 0.26},
    }
    plain = {**study.figures_of_result("retrieval", {**directions, "mean": 1 / 6}), "seconds": 2.0}
    better = {
        **study.figures_of_result("retrieval", {**directions, "mean": 0.2}),
        "seconds": 2.0,
        "flagged": 0.19,
    }
    text = study.recall_table(
        {"clip": [plain], "clip (no groups)": [plain], "clip+glofnd": [better]}
    )
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
    ]
    assert {len(row) for row in rows} == {len(header)}
    assert header[1:7] == ["i→t R@1", "i→t R@5", "i→t R@10", "t→i R@1", "t→i R@5", "t→i R@10"]
    assert rows[0][1:9] == ["5.0", "20.0", "30.0", "4.0", "15.0", "26.0", "16.7", "–"]
    assert rows[2][header.index("against its base")] == "+3.3"
    assert rows[2][header.index("flagged")] == "0.19"
    assert study.figures_of_result("knn", {"accuracy": 0.5}) == {"knn": 50.0}


def document() -> dict[str, Any]:
    methods = {
        "simclr": None,
        "simclr+oracle (half)": {"labels": {"precision": 0.5, "recall": 0.5}},
        "late": {"method": "simclr"},
    }
    datasets = {"a": {"file": "a.npz"}, "b": {"file": "b.npz", "settings": {"epochs": 2}}}
    stages = [
        {"name": "first", "methods": ["simclr"]},
        {"name": "second", "datasets": ["b"], "seeds": [0, 1]},
    ]
    return {
        "recipe": "simclr-cpu",
        "datasets": datasets,
        "methods": methods,
        "stages": stages,
        "settings": {"epochs": 1, "seed": 3},
    }


def test_the_queue_runs_stage_by_stage_and_each_run_once() -> None:
    keys = [job.key for job in study.jobs(document())]
    assert keys[:2] == [("a", "simclr", 0), ("b", "simclr", 0)]
    assert keys[2:] == [
        ("b", "simclr+oracle (half)", 0),
        ("b", "late", 0),
        *(("b", name, 1) for name in document()["methods"]),
    ]
    assert [job.key for job in study.jobs(document(), ["first"])] == keys[:2]
    with pytest.raises(SystemExit, match="names 'gone', which is not among the methods"):
        list(study.jobs({**document(), "stages": [{"name": "x", "methods": ["gone"]}]}))
    assert study.settings_of(document(), "simclr", "b") == {"epochs": 2, "seed": 3}


def test_a_failed_run_leaves_no_record_and_the_queue_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=np.zeros(4),
            y_train=np.array([0, 1, 0, 1]),
            x_test=np.zeros(1),
            y_test=np.zeros(1),
        )
    given: list[dict[str, Any]] = []

    def run(
        folder: Path,
        recipe: str,
        name: str,
        change: dict[str, Any],
        data: Path,
        seed: int,
        measure: list[str],
        probes: Any,
    ) -> Any:
        given.append(change)
        if name == "late":
            raise subprocess.CalledProcessError(1, "kinfolk")
        return SimpleNamespace(
            epochs=[{"epoch": 0, "knn": 0.123456789, "seconds": 1.0}],
            results={"knn": {"accuracy": 0.5}},
        )

    monkeypatch.setattr(study, "run", run)
    path = tmp_path / "results" / "gain.json"
    todo = list(study.jobs(document()))
    with pytest.raises(SystemExit, match=r"failed: b late 0 \(exit 1\); b late 1"):
        study.run_queue(document(), tmp_path, tmp_path / "out", study.Results(path), todo, None)
    again = study.Results(path)
    assert [job in again for job in todo] == [job.method != "late" for job in todo]
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept[0]["figures"] == {"knn": 50.0, "seconds": 1.0}
    assert kept[0]["curves"] == {"knn": [0.12346]}
    assert kept[0]["version"]
    corrupted = next(change for change in given if "detector" in change)
    assert len(np.load(corrupted["detector"]["labels_file"])) == 4


def test_files_of_a_method_carry_the_seed_and_may_be_of_any_section(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", y_train=np.array([0, 1]))
    made = document()
    made["datasets"]["b"]["files"] = {"near": "near.csv", "after": "simclr-{seed}.safetensors"}
    made["methods"]["late"] = {"files": {"pairs": "near", "model.init": "after"}}
    _, _, _, change, *_ = study._prepared(
        made, tmp_path, tmp_path / "out", list(study.jobs(made))[-1]
    )
    assert change["detector"] == {"pairs": str(tmp_path / "near.csv")}
    assert change["model"] == {"init": str(tmp_path / "simclr-1.safetensors")}


def _fake_run(folder: Path, recipe: str, name: str, *rest: Any) -> Any:
    if name == "late":
        raise subprocess.CalledProcessError(3, "kinfolk")
    return SimpleNamespace(
        epochs=[{"epoch": 0, "seconds": 1.0}], results={"knn": {"accuracy": 0.5}}
    )


def test_parallel_runs_leave_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=np.zeros(4),
            y_train=np.array([0, 1, 0, 1]),
            x_test=np.zeros(1),
            y_test=np.zeros(1),
        )
    monkeypatch.setattr(study, "run", _fake_run)
    kept = []
    for beside in (1, 2):
        results = study.Results(tmp_path / f"{beside}.json")
        with pytest.raises(SystemExit, match=r"b late 0 \(exit 3\)"):
            study.run_queue(
                document(),
                tmp_path,
                tmp_path / "out",
                results,
                list(study.jobs(document())),
                None,
                beside,
            )
        kept.append(json.loads(results.path.read_text(encoding="utf-8")))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 5


def test_the_cpu_seconds_of_a_child_are_in_the_record(tmp_path: Path) -> None:
    assert study.forked(sum, range(10_000_000)) > 0.01
    results = study.Results(tmp_path / "gain.json")
    results.add(
        next(study.jobs(document())),
        {"knn": 50.0},
        [{"epoch": 0}, {"epoch": 1}],
        "1",
        cpu_seconds=3.0,
    )
    assert json.loads(results.path.read_text(encoding="utf-8"))[0]["cpu_seconds"] == 1.5


def test_whole_groups_are_held_out(tmp_path: Path) -> None:
    track = np.repeat(np.arange(10), 3)
    np.savez(
        tmp_path / "a.npz",
        x_train=track,
        y_train=track % 2,
        track_train=track,
        x_test=np.zeros(1),
        y_test=np.zeros(1),
    )
    with np.load(
        study.limited(tmp_path / "a.npz", None, tmp_path / "out", 0.2, "track_train")
    ) as cut:
        assert sorted(set(cut["track_test"])) == [0, 5]
        assert len(cut["x_train"]) == 24
        assert not set(cut["track_train"]) & set(cut["track_test"])
    with np.load(study.limited(tmp_path / "a.npz", 10, tmp_path / "out", 0.5)) as cut:
        assert list(np.bincount(cut["y_test"])) == [8, 8], (
            "every second of each class, the first one included"
        )
        assert len(cut["x_train"]) == 10, "cut after that"


def test_classes_are_replaced_by_coarser_ones(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        x_train=np.arange(4),
        y_train=np.array([0, 1, 2, 3]),
        x_test=np.zeros(2),
        y_test=np.array([3, 1]),
        classes=np.array(["cat", "dog", "rose", "oak"]),
        coarse=np.array([0, 0, 1, 2]),
    )
    for coarser, train, test in (
        (["coarse"], [0, 0, 1, 2], [2, 0]),
        (["coarse", [0, 1, 1]], [0, 0, 1, 1], [1, 0]),
    ):
        with np.load(study.limited(tmp_path / "a.npz", None, tmp_path, coarser=coarser)) as cut:
            assert (list(cut["y_train"]), list(cut["y_test"])) == (train, test)
            assert list(cut["x_train"]) == [0, 1, 2, 3]
            assert "classes" not in cut, "the names of the finer classes"


def _record(method: str, seed: int, knn: float, **more: float) -> dict[str, Any]:
    figures = {"knn": knn, "linear": knn + 2, "semi 10 %": knn - 2, "semi 1 %": knn - 9, **more}
    return {
        "dataset": "a",
        "method": method,
        "seed": seed,
        "figures": figures,
        "curves": {"precision": [None, 0.5]},
    }


def test_the_table_and_the_map_of_the_gains(tmp_path: Path) -> None:
    kin = {"precision": 50.0, "recall": 10.0}
    records = [
        *(_record("simclr", seed, 30.0 + seed) for seed in range(4)),
        *(
            _record("simclr+oracle:attract", seed, 50.0 + seed, precision=100.0, recall=100.0)
            for seed in range(4)
        ),
        *(_record("simclr+glofnd:attract", seed, 38.0 + seed + seed % 2, **kin) for seed in (0, 1)),
        _record("simclr+oracle (p 0.5 r 0.1)", 2, 31.0, **kin),
        _record("pcl", 3, 33.0),
    ]
    path = tmp_path / "gain.json"
    records[0]["cpu_seconds"], records[-1]["cpu_seconds"] = 8.0, 10.0
    path.write_text(json.dumps(records), encoding="utf-8")
    rows = study_figures.read(path)["a"]
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in study_figures.table(rows).splitlines()
    ]
    found = {line[0].strip("`"): dict(zip(header, line, strict=True)) for line in lines}
    assert list(found) == ["simclr", "simclr+oracle:attract", "simclr+glofnd:attract", "pcl"]
    ours = found["simclr+glofnd:attract"]
    assert ours["kNN against base"] == "+8.5", "38 and 40 against 30 and 31, the seeds of both"
    assert ours["gap closed: kNN"] == "42 %", "of 50 and 51 against 30 and 31"
    assert ours["precision"] == "50.0"
    assert found["pcl"]["kNN against base"] == "+1.5"
    assert found["pcl"]["p"] == "–"
    assert [row["cost"] for row in found.values()] == ["1.00", "–", "–", "1.25"], (
        "only runs that have CPU seconds"
    )
    traces = study_figures.the_map(rows)["data"]
    assert [len(trace["x"]) for trace in traces] == [1, 0, 1, 1]
    assert traces[0]["text"] == [" −0.5"]
    assert traces[3]["text"] == [" glofnd +8.5"]


@pytest.mark.parametrize(
    ("precision", "recall"), [(1.0, 0.1), (0.7, 0.7), (0.5, 1.0), (0.5, 0.1), (0.2, 0.2)]
)
def test_labels_corrupted_to_a_precision_and_a_recall(precision: float, recall: float) -> None:
    truth = np.arange(4000) % 10
    queue = sys.modules["study_queue"]
    found = queue.agreement(queue.corrupted(truth, precision, recall), truth)
    assert found == (pytest.approx(precision, rel=0.05), pytest.approx(recall, rel=0.1))
