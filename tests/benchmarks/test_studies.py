"""Every study resolves, one case for each file; tables and figures of the papers are one command
each."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from kinfolk.data.text import train_tokenizer
from kinfolk.training.build import build_framework
from kinfolk.training.defaults import assemble, learns_from_text
from kinfolk.training.settings import recipe_path
from tests.benchmarks.loading import BENCHMARKS, load

STUDIES = {path.stem: path for path in sorted((BENCHMARKS / "studies").glob("*.yaml"))}
study, study_figures = load("study"), load("study_figures")


class _Data(SimpleNamespace):
    texts, num_ids = None, 8000

    def __len__(self) -> int:
        return 8000

    def of_ids(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["a dog runs"], vocab_size=300, context=32)


@pytest.mark.parametrize("path", STUDIES.values(), ids=STUDIES.keys())
def test_every_method_of_a_study_resolves(
    path: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command line would take it, up to the untrained framework for 8,000 samples."""
    for name in ("kaiming_normal_", "kaiming_uniform_", "uniform_", "normal_", "trunc_normal_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *given, **named: tensor)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert path.stem in path.read_text(encoding="utf-8").split("command")[1], (
        "the header has the command"
    )
    (tmp_path / "pairs.csv").write_text("anchor,kin\n0,1\n", encoding="utf-8")
    np.save(tmp_path / "features.npy", np.ones((8000, 2), np.float32))
    keys = [str(number) for number in range(8000)]
    data: Any = _Data(
        num_train=8000, labels=torch.arange(8000) % 100, samples=SimpleNamespace(keys=keys)
    )
    assert document.get("base", next(iter(document["methods"]))) in document["methods"]
    for name in document["methods"]:
        for dataset in list(document.get("datasets", [None]))[:2]:
            change = study.settings_of(document, name, dataset)
            change.pop("labels", None)
            # weights would be read here
            for key in change.pop("files", {}).keys() - {"model.init"}:
                file = tmp_path / {"pairs": "pairs.csv", "features": "features.npy"}[key]
                change = study.merged(change, study.in_section(key, str(file)))
            method = study.method_of(name, change)
            config = assemble(
                None,
                change.pop("recipe", document["recipe"]),
                {"method": method},
                study.settings(change),
            )
            assert config.method in (method, method.removesuffix(":eliminate")), name
        # the data sets differ in settings of the training
        framework = build_framework(config, data, tokenizer if learns_from_text(config) else None)
        assert framework.detectors or "+" not in method, name


TABLES: list[tuple[str, str | None, set[str]]] = [
    ("glofnd-table1", "knn,linear,semi", {"sogclr", "sogclr+fnc", "sogclr+glofnd"}),
    ("glofnd-table2", "transfer", {"sogclr", "sogclr+fnc", "sogclr+glofnd"}),
    ("glofnd-table7", "knn,linear,semi", {"simclr", "simclr+fnc", "simclr+glofnd"}),
    (
        "glofnd-figure4",
        "knn,linear,semi",
        {"sogclr", "sogclr+fnc", "sogclr+glofnd (single threshold)", "sogclr+glofnd"},
    ),
    ("rcl-table2", "knn,linear,finetune --percent 10,1 --finetuning rcl", {"nnclr", "rcl"}),
    (
        "ring-table1",
        "knn,linear --unpooled",
        {"ir", "ir+ring", "cmc", "cmc+ring", "moco", "moco+ring", "la"},
    ),
    (
        "ring-table3",
        "transfer --own-mean --unpooled",
        {"ir", "ir+ring", "cmc", "cmc+ring", "moco", "moco+ring", "la"},
    ),
    ("ifnd-figure1", None, {"simclr", "simclr+ifnd", "simclr+oracle:attract"}),
    ("ifnd-figure6", None, {"simclr+ifnd (constant)", "simclr+ifnd (step)", "simclr+ifnd"}),
    (
        "ifnd-figure7",
        None,
        {"simclr", "simclr+ifnd", "simclr+ifnd:attract", "simclr+oracle:attract"},
    ),
    (
        "spcl-figure2a",
        None,
        {"spcl (8 prototypes batch 128)", "spcl (4096 prototypes batch 4096)"},
    ),
    ("rcl-figure5a", None, {f"rcl ({epochs} epochs)" for epochs in (30, 60, 120)}),
]


def test_tables_and_figures_are_one_study() -> None:
    for name, protocol, rows in TABLES:
        document = yaml.safe_load(STUDIES[name].read_text(encoding="utf-8"))
        assert document.get("protocol") == protocol
        assert rows <= document["methods"].keys()


def test_table_4_of_rcl_has_three_levels_of_clusters() -> None:
    methods = yaml.safe_load(STUDIES["rcl-table4"].read_text(encoding="utf-8"))["methods"]
    criteria = {name: one.get("framework", {}).get("criteria") for name, one in methods.items()}
    assert {criteria[f"rcl ({kind})"] for kind in ("k-means", "dbscan", "online")} == {4}


def test_a_table_has_a_column_for_each_share_of_the_labels_and_each_data_set() -> None:
    runs = {
        name: [{"knn": 1.0, "semi 10 %": value, "finetune 1 %": 3.0, "seconds": 1.0}]
        for name, value in (("a", 4.5), ("b", 5.5))
    }
    header, _, one, two = study.table(runs, "a").splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert {"semi 10 %", "finetune 1 %"} <= set(columns)
    place = columns.index("semi 10 %")
    assert [line.strip("|").split("|")[place].strip() for line in (one, two)] == ["4.5", "5.5"]


def test_transfer_is_measured_on_each_of_several_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def command(*words: object) -> float:
        calls.append(tuple(str(word) for word in words))
        if words[0] == "eval":
            file = tmp_path / "run" / "eval" / "transfer.json"
            sets = json.loads(file.read_text())["sets"] if file.exists() else []
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"sets": [*sets, {"name": str(words[5]), "accuracy": 0.5}]}))
        else:
            (tmp_path / "run").mkdir(exist_ok=True)
        return 1.0

    monkeypatch.setattr(study, "command", command)
    monkeypatch.setattr(study, "read_record", lambda folder: folder)
    given: tuple[Any, ...] = (
        tmp_path / "run",
        "ir-cpu",
        "ir",
        {},
        Path("a.npz"),
        0,
        ["transfer", "--own-mean"],
    )
    for _ in range(2):
        study.run(*given, tests=[Path("b.npz"), Path("c.npz")], report=True)
    assert [call[0] for call in calls] == ["train", "eval", "eval", "report"], (
        "what is measured is not measured again"
    )
    assert calls[1] == (
        "eval",
        str(tmp_path / "run"),
        "--protocol",
        "transfer",
        "--data",
        "b.npz",
        "--own-mean",
    )


def test_the_gap_by_number_of_classes_is_drawn() -> None:
    """Figure 1 of IFND: three curves of accuracy, and two rows of bars for the gap to SupCon."""
    accuracy = {
        "simclr": (80.0, 50.0),
        "simclr+ifnd": (81.0, 53.0),
        "simclr+oracle:attract": (82.0, 56.0),
    }
    results = {
        dataset: {
            method: {0: {"figures": {"linear": values[place]}}}
            for method, values in accuracy.items()
        }
        for place, dataset in enumerate(("ten", "hundred"))
    }
    figure = study_figures.by_classes(
        {**results, "unfinished": {"simclr": {}}}, {"hundred": 100, "ten": 10, "unfinished": 20}
    )
    assert [trace["x"] for trace in figure["data"]] == [["10", "100"]] * 5
    assert figure["data"][0]["y"] == [80.0, 50.0]
    assert [trace["y"] for trace in figure["data"][3:]] == [[2.0, 6.0], [1.0, 3.0]]
    assert figure["layout"]["xaxis"]["anchor"] == "y2", (
        "the numbers of classes stand below the bars"
    )


@pytest.mark.parametrize("dataset", ["gtsrb", "tinyimagenet15", "cifar10", "cifar100"])
def test_the_settings_of_the_readmes_table_are_a_recipe(dataset: str) -> None:
    """With the options that its header gives for the other data sets."""
    document = yaml.safe_load(STUDIES["gain"].read_text(encoding="utf-8"))
    change = study.settings_of(document, "simclr+guide:attract (patches, 10 %)", dataset)
    change.pop("files")
    change.pop("knn")
    for part in ("checkpoint", "trainer"):
        change.pop(part)
    method = {"method": "simclr+guide:attract"}
    expected = assemble(None, "simclr-cpu", method, study.settings(change))
    header = recipe_path("simclr-guide-gain").read_text(encoding="utf-8").partition("\n\n")[0]
    lines = re.sub(r"\n# {5,}", " ", header).splitlines()  # an entry may have several lines
    named = {line.split()[1].lower().replace("-", ""): line for line in lines if "--" in line}
    words = shlex.split(named[dataset])[2:] if dataset != "gtsrb" else []
    flags = {"--epochs": "epochs", "--batch-size": "batch_size", "--image-size": "views.size"}
    flags["--temperature"] = "framework.temperature"
    given = [
        value if flag == "--set" else f"{flags[flag]}={value}"
        for flag, value in zip(words[::2], words[1::2], strict=True)
    ]
    found = assemble(None, "simclr-guide-gain", {}, given)
    flips = {"views": {"options": {"flip": 0.5}}} if dataset != "gtsrb" else {}
    assert found.model_dump() == expected.with_settings(study.settings(flips)).model_dump()
