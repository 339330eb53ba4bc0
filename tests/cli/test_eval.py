"""`kinfolk eval`: every protocol of labels through the command, what it writes, shows and
refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.cli import main
from kinfolk.data.open_source import digits


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def result(folder: Path, protocol: str) -> Any:
    return json.loads((folder / "eval" / f"{protocol}.json").read_text())


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 digits to train on and 100 to test on."""
    source, file = digits(), tmp_path_factory.mktemp("data") / "few.npz"
    items = source.items()
    chosen = {
        split: [i for i, item in enumerate(items) if item.split == split]
        for split in ("train", "test")
    }
    kept = {"train": chosen["train"][:240], "test": chosen["test"][:100]}
    x_train, x_test = (np.stack([source.load(i) for i in ids]) for ids in kept.values())
    y_train, y_test = (np.array([items[i].label for i in ids]) for ids in kept.values())
    np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return file


@pytest.fixture(scope="module")
def trained(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    method = [
        "--method",
        "sogclr+glofnd",
        "--set",
        "detector.init=quantile",
        "--set",
        "detector.alpha=0.1",
    ]
    small = [
        "--epochs",
        "3",
        "--batch-size",
        "40",
        "--model",
        "resnet10",
        "--set",
        "model.width=4",
        "--set",
        "views.preset=mild",
        "--no-report",
    ]
    assert run("train", "--data", str(few_digits), "--out", str(out), *method, *small) == 0
    return out


def test_eval_writes_probes_and_few_labels(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "eval",
            str(trained),
            "--protocol",
            "semi,linear",
            "--percent",
            "100,10,0.1",
            "--probe",
            "ifnd",
        )
        == 0
    )
    shown = capsys.readouterr().out
    found = result(trained, "semi")
    assert [(row["fraction"], row["labels"]) for row in found["fractions"]] == [
        (1.0, 240),
        (0.1, 20),
        (0.001, 10),
    ]
    assert found["accuracy"] == pytest.approx(
        np.mean([row["accuracy"] for row in found["fractions"]])
    )
    assert "deviation" not in found["fractions"][0], "there is one draw of all labels"
    assert found["fractions"][1]["deviation"] > 0
    assert (found["probe"], found["draws"], found["test"]) == ("ifnd", 3, 100)
    assert result(trained, "linear")["probe"] == "ifnd"
    assert result(trained, "linear")["accuracy"] == found["fractions"][0]["accuracy"]
    for text in (
        "semi 100 %",
        "semi 0.1 %",
        "10 labels, test split",
        "±",
        "semi average",
        "top 5",
    ):
        assert text in shown
    assert found["top5"] == pytest.approx(np.mean([row["top5"] for row in found["fractions"]]))
    assert found["accuracy"] < found["top5"] <= 1
    assert result(trained, "linear")["top5"] == found["fractions"][0]["top5"]


def test_eval_takes_the_labelled_samples_from_a_list(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys of an array are train/0, train/1, …"""
    few = tmp_path / "1percent.txt"
    few.write_text("".join(f"train/{i}\n" for i in range(30)) + "train/777\n")
    command = [
        "eval",
        str(trained),
        "--protocol",
        "semi,finetune",
        "--subset",
        str(few),
        "--epochs",
        "1",
        "--finetuning",
        "rcl",
    ]
    assert run(*command) == 0
    shown = capsys.readouterr().out
    assert "semi 1percent" in shown
    assert "30 labels" in " ".join(shown.split())
    for protocol in ("semi", "finetune"):
        (row,) = result(trained, protocol)["fractions"]
        assert (row["subset"], row["labels"], row["fraction"]) == ("1percent", 30, 0.125)
    assert result(trained, "finetune")["finetuning"] == "rcl"
    assert run(*command, "--percent", "50") == 0
    assert [row["labels"] for row in result(trained, "semi")["fractions"]] == [120, 30]


def test_features_before_pooling_and_own_mean(trained: Path, few_digits: Path) -> None:
    plain, own = (
        ["eval", str(trained), "--protocol", "linear,transfer,knn"],
        ["--unpooled", "--own-mean"],
    )
    assert run(*plain) == 0
    before = [result(trained, name) for name in ("linear", "knn")]
    assert run(*plain, *own) == 0
    after = [result(trained, name) for name in ("linear", "knn")]
    assert all(each["features"] == "before pooling" for each in after)
    assert all(
        each["normalised_by"] == "the data's own mean"
        for each in (*after, *result(trained, "transfer")["sets"])
    )
    assert after[1]["accuracy"] != before[1]["accuracy"]
    assert not any("features" in each for each in before)


def test_mutual_information_by_its_normaliser(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("arithmetic", "max"):
        assert (
            run(
                "eval",
                str(trained),
                "--protocol",
                "clusters",
                "--num-clusters",
                "20",
                "--normaliser",
                name,
            )
            == 0
        )
        assert f"{name} normaliser" in " ".join(capsys.readouterr().out.split())
        assert result(trained, "clusters")["normaliser"] == name
        found[name] = result(trained, "clusters")["nmi"]
    assert found["max"] < found["arithmetic"]


def test_finetuning_leaves_the_run_as_it_was(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hashlib.sha256((trained / "model.safetensors").read_bytes()).hexdigest()
    assert run("eval", str(trained), "--protocol", "finetune", "--epochs", "2") == 0
    found = result(trained, "finetune")
    assert [(row["fraction"], row["labels"], row["epochs"]) for row in found["fractions"]] == [
        (0.1, 20, 2),
        (0.01, 10, 2),
    ]
    assert all(0 <= row["accuracy"] <= row["top5"] <= 1 for row in found["fractions"])
    assert "finetune 1 %" in capsys.readouterr().out
    assert hashlib.sha256((trained / "model.safetensors").read_bytes()).hexdigest() == before


def test_transfer_keeps_the_other_data_sets(
    trained: Path, few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pets = tmp_path / "pets.npz"
    pets.write_bytes(few_digits.read_bytes())
    assert run("eval", str(trained), "--data", str(pets), "--protocol", "transfer") == 0
    assert run("eval", str(trained), "--protocol", "transfer", "--metric", "top1") == 0
    found = result(trained, "transfer")
    assert [(each["name"], each["metric"]) for each in found["sets"]] == [
        ("few", "top1"),
        ("pets", "mean-per-class"),
    ]
    few, same = found["sets"]
    assert (few["accuracy"], same["accuracy"]) == (few["top1"], same["mean_per_class"])
    assert found["accuracy"] == pytest.approx((few["accuracy"] + same["accuracy"]) / 2)
    assert few["map"] is None
    assert (few["data"], same["data"]) == (str(few_digits), str(pets))
    assert "mean per class" in capsys.readouterr().out


def test_transfer_measures_sets_of_several_labels(
    trained: Path, few_digits: Path, tmp_path: Path
) -> None:
    with np.load(few_digits) as arrays:
        labels = {split: arrays[f"y_{split}"] for split in ("train", "test")}
    table = tmp_path / "sets.csv"
    rows = [
        f"{split}/{i},{name}"
        for split, each in labels.items()
        for i, y in enumerate(each)
        for name in _names(int(y))
    ]
    table.write_text("\n".join(["image,label", *rows]) + "\n")
    assert run("eval", str(trained), "--protocol", "transfer", "--label-sets", str(table)) == 0
    (found,) = [each for each in result(trained, "transfer")["sets"] if each["name"] == "few"]
    assert found["metric"] == "map"
    assert 0.3 < found["map_11"] <= 1
    assert found["accuracy"] == found["map"]


def _names(digit: int) -> list[str]:
    return ["even" if digit % 2 == 0 else "odd", *(["small"] if digit < 4 else [])]


def test_the_kin_protocol_measures_rule_and_exact_thresholds(
    trained: Path, few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", str(trained), "--protocol", "kin") == 0
    found, shown = result(trained, "kin"), capsys.readouterr().out
    assert found["alpha"] == 0.1
    for figures in (found, found["exact"]):
        assert all(
            0 < figures[name] <= 1
            for name in ("precision", "recall", "f1", "mtpr", "mtnr", "flagged")
        )
        assert all(0 < figures[f"anchor_{name}"] <= 1 for name in ("precision", "recall", "f1"))
    assert found["exact"]["flagged"] == pytest.approx(0.1, abs=0.002)
    assert found["exact"]["precision"] > 0.15, "better than chance, a tenth"
    assert 0 < found["threshold"]["mae"] <= found["threshold"]["rmse"] < 0.5
    assert found["tp_similarity"] > found["fn_similarity"] > found["tn_similarity"]
    for text in ("precision", "per anchor", "MTPR", "RMSE", "similarity"):
        assert text in shown
    assert run("eval", str(trained), "--protocol", "kin", "--alpha", "0.05") == 0
    assert "threshold" not in result(trained, "kin")
    assert run("eval", str(trained), "--data", "digits", "--protocol", "kin") == 2
    assert "leave --data out" in capsys.readouterr().err
    (trained / "checkpoints" / "last.ckpt").rename(tmp_path / "last.ckpt")
    try:
        assert run("eval", str(trained), "--protocol", "kin") == 2
        assert "there is no checkpoints/last.ckpt" in capsys.readouterr().err
    finally:
        (tmp_path / "last.ckpt").rename(trained / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe", "lbgfs"], "'lbgfs' is not one of"),
        (["--finetuning", "simclr"], "'simclr' is not one of"),
        (["--subset", "none.txt"], "'none.txt' does not exist"),
        (["--percent", "10;1"], "--percent (=10;1) must be numbers"),
        (["--percent", "200"], "at most 100"),
        (["--alpha", "1.5"], "less than or equal to 1"),
        (["--protocol", "transfer", "--label-sets", "none.csv"], "does not exist"),
    ],
)
def test_wrong_options_of_eval_end_in_one_sentence(
    arguments: list[str], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", str(trained), *arguments) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown


def test_protocols_refuse_data_without_enough_labels(
    trained: Path, few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(few_digits) as arrays:
        images = arrays["x_train"][:30]
    for name, labels, protocol, message in (
        ("none", np.full(30, -1), "semi", "no labels"),
        ("one", np.zeros(30, dtype=int), "semi", "at least two classes"),
        ("one-transfer", np.zeros(30, dtype=int), "transfer", "at least two classes"),
        ("one-finetune", np.zeros(30, dtype=int), "finetune", "at least two classes"),
        ("singles", np.arange(30), "transfer", "at least two samples of a class"),
    ):
        np.savez(tmp_path / f"{name}.npz", images=images, labels=labels)
        assert run(
            "eval", str(trained), "--data", str(tmp_path / f"{name}.npz"), "--protocol", protocol
        ) in (1, 2)
        shown = capsys.readouterr().err
        assert message in " ".join(shown.split())
        assert "Traceback" not in shown
