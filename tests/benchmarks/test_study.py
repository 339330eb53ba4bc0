"""Studies: every configuration resolves, and the table says what it should of made-up figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from kinfolk.data.tokenizer import train_tokenizer
from kinfolk.training.assemble import assemble, build_framework
from kinfolk.training.towers import learns_from_text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = sorted((BENCHMARKS / "studies").glob("*.yaml"))
TOKENIZER = train_tokenizer(["a dog runs"], vocab_size=300, context=32)


def load() -> Any:
    spec = importlib.util.spec_from_file_location("study", BENCHMARKS / "study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = load()


def configurations() -> list[Any]:
    documents = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in STUDIES}
    return [pytest.param(document, name, id=f"{stem}-{name}") for stem, document in documents.items() for name in document["methods"]]


@pytest.mark.parametrize(("document", "name"), configurations())
def test_every_configuration_resolves(document: dict[str, Any], name: str) -> None:
    """As the command line would take it, up to the untrained framework for 8,000 samples."""
    change = study.merged(document.get("settings", {}), document["methods"][name] or {})
    method = study.method_of(name, change)
    config = assemble(None, change.pop("recipe", document["recipe"]), {"method": method}, study.settings(change))
    data: Any = SimpleNamespace(num_train=8000, labels=torch.arange(8000) % 100)
    framework = build_framework(config, data, TOKENIZER if learns_from_text(config) else None)
    assert config.method == method or config.method == method.removesuffix(":eliminate")
    assert framework.detectors or "+" not in method
    if "base" in document:
        assert document["base"] in document["methods"]


def test_the_tables_of_the_ifnd_paper_are_there() -> None:
    named = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES}
    assert {"simclr", "pcl", "simclr+ifnd", "simclr+ifnd:attract", "simclr+oracle:attract"} <= named["clusters"].keys()
    crossed = [next(iter(change.values())) for name, change in named["ifnd-table7"].items() if "(" in name]
    kinds = {(len(one) > 3, one["schedule"], one["num_clusters"][0], one["confidence"]) for one in crossed}
    assert len(kinds) == 16, "objective × assignment × clusters × confidence"
    rates = [change.get("detector", {}).get("final_rate", 1.0) for change in named["ifnd-schemes"].values()]
    assert {0.25, 0.5, 0.75, 1.0} == set(rates)


def test_the_ablations_of_the_spcl_paper_are_there() -> None:
    named = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES}
    assert {"simclr", "spcl"} <= named["spcl"].keys()
    losses = ("contrast_weight", "metric_weight", "prototype_weight")
    changes = [change.get("framework", {}) for name, change in named["spcl-table2"].items() if name != "simclr"]
    weights = {tuple(change.get(loss, 1.0) for loss in losses) for change in changes if "prototypes" not in change}
    assert weights == {(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (0.1, 1, 1), (1, 0.1, 1), (1, 1, 0.1)}
    assert {"prototypes": "labels"} in changes
    figure = named["spcl-figure2"].values()
    numbers = {tuple(change.get("framework", {}).get("num_clusters", ())) for change in figure}
    assert {(8,), (4096,)} <= numbers
    assert {128, 4096} <= {change.get("batch_size") for change in figure}
    hot = {(name.partition(" ")[0], change["framework"]["temperature"]) for name, change in named["spcl-temperature"].items()}
    assert hot == {(method, temperature) for method in ("simclr", "spcl") for temperature in (0.1, 0.2, 0.5, 1.0)}


def test_the_ablations_of_the_rcl_paper_are_there() -> None:
    named = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["methods"] for path in STUDIES}
    assert {"moco", "mocov3", "nnclr", "rcl"} <= named["rcl"].keys()
    assert {"nnclr", "rcl"} <= named["rcl-table2"].keys()
    sizes = [change["framework"]["queue_size"] for change in named["rcl-figure5b"].values()]
    assert sizes == sorted(sizes)
    assert 4096 in sizes[1:-1], "the recipe's has a smaller and a larger one beside it"
    removed = {
        name: {kind.partition(" ")[2]: change.get("views", {}) for kind, change in named["rcl-figure5c"].items() if kind.startswith(name)}
        for name in ("simclr", "mocov3", "nnclr", "rcl")
    }
    assert len(removed["rcl"]) == 4
    assert all(kinds == removed["rcl"] for kinds in removed.values()), "each method loses the same"
    table3 = {(change["framework"]["criteria"], "shared_predictor" in change["framework"]) for change in named["rcl-table3"].values()}
    assert {(1, False), (2, True), (3, True), (4, True), (3, False)} <= table3
    kinds = {change.get("framework", {}).get("hierarchy", "none") for change in named["rcl-table4"].values()}
    assert kinds == {"none", "kmeans", "dbscan", "online"}
    assert {f"{base}+hierarchy{action}" for base in ("simclr", "moco") for action in ("", ":reweight")} <= named["hierarchy"].keys()


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
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert {len(row) for row in rows} == {len(header)}
    closed = dict(zip(figures, (row[header.index("gap closed")] for row in rows), strict=True))
    assert closed == {"simclr": "–", "pcl": "20 %", "simclr+ifnd": "40 %", "simclr+fnc (late)": "-10 %", "simclr+oracle:attract": "100 %"}
    assert rows[2][header.index("MTPR")] == "30.0 ± 0.0"
    assert rows[0][header.index("MTPR")] == "–"
    assert rows[2][header.index("FN similarity")] == "11.0 ± 0.0"
    assert "TP similarity" not in header
    assert rows[2][header.index("against its base")] == "+4.0 / +4.0"


def test_the_base_has_the_same_setting() -> None:
    figures = {
        f"{method} ({n})": runs(value)
        for n, values in {"20": (50.0, 53.0, 60.0), "100": (20.0, 29.0, 30.0)}.items()
        for method, value in zip(("simclr", "simclr+ifnd", "simclr+oracle:attract"), values, strict=True)
    }
    assert study.gap_closed("simclr+ifnd (20)", figures) == pytest.approx(0.3)
    assert study.gap_closed("simclr+ifnd (100)", figures) == pytest.approx(0.9)
    assert study.base_of("simclr (20)", figures) is None


def test_without_an_oracle_above_the_base_there_is_no_gap() -> None:
    figures = {"simclr": runs(50.0), "simclr+fnc": runs(51.0)}
    assert study.gap_closed("simclr+fnc", figures) is None
    assert study.gap_closed("simclr+fnc", {**figures, "simclr+oracle:attract": runs(49.0)}) is None
    assert "MTPR" not in study.table(figures)


def test_the_table_of_recalls() -> None:
    directions = {"image_to_text": {"R@1": 0.05, "R@5": 0.2, "R@10": 0.3}, "text_to_image": {"R@1": 0.04, "R@5": 0.15, "R@10": 0.26}}
    plain = {**study.measured("retrieval", {**directions, "mean": 1 / 6}), "seconds": 2.0}
    better = {**study.measured("retrieval", {**directions, "mean": 0.2}), "seconds": 2.0, "flagged": 0.19}
    text = study.recall_table({"clip": [plain], "clip (no groups)": [plain], "clip+glofnd": [better]})
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert {len(row) for row in rows} == {len(header)}
    assert header[1:7] == ["i→t R@1", "i→t R@5", "i→t R@10", "t→i R@1", "t→i R@5", "t→i R@10"]
    assert rows[0][1:9] == ["5.0", "20.0", "30.0", "4.0", "15.0", "26.0", "16.7", "–"]
    assert rows[2][header.index("against its base")] == "+3.3"
    assert rows[2][header.index("flagged")] == "0.19"
    assert study.measured("knn", {"accuracy": 0.5}) == {"knn": 50.0}
