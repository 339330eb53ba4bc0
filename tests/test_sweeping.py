"""Sweeps: every combination once, compared in one table, and nothing done twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kinfolk as kf
from kinfolk.errors import UsageError
from kinfolk.sweeping import combinations, split_values


def test_a_sweep_trains_compares_and_resumes(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "methods": ["simclr", "simclr+fnc"],
        "settings": {"detector.alpha": [0.05, 0.1]},
        "protocols": ["knn"],
    }
    given |= {"epochs": 1, "batch_size": 512, "report": False, "progress": False}
    found = kf.sweep("digits", tmp_path, seeds=[0], recipe=recipe(tmp_path), **given)
    names = [run.path.relative_to(tmp_path).as_posix() for run in found.runs]
    assert names == ["simclr/seed-0", "simclr+fnc,alpha=0.05/seed-0", "simclr+fnc,alpha=0.1/seed-0"]
    assert found.table is not None
    assert [record["method"] for record in found.table.records] == [
        "simclr",
        "simclr+fnc (alpha 0.05)",
        "simclr+fnc (alpha 0.1)",
    ]
    again = kf.sweep("digits", tmp_path, seeds=[0], recipe=recipe(tmp_path), **given)
    assert [run.unchanged for run in again.runs] == [True] * 3
    assert again.table is not None
    assert again.table.records == found.table.records


def classes(root: Path) -> Path:
    """A folder of images with a folder for each of two classes."""
    draw = np.random.default_rng(0)
    for number in range(40):
        place = root / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 90, (8, 8, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number:02}.png")
    return root


def test_a_sweep_over_a_folder_of_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "protocols": ["knn", "linear"],
        "epochs": 1,
        "report": False,
        "seeds": [0, 1],
    }
    labels = {"data.labels_from_folders": True}
    found = kf.sweep(
        str(classes(tmp_path / "classes")),
        tmp_path / "out",
        recipe=recipe(tmp_path),
        common=labels,
        **given,
    )
    assert found.table is not None
    assert found.table.records[0]["seeds"] == [0, 1]
    shown = capsys.readouterr().err
    assert f"run 1 of 2: {tmp_path / 'out' / 'simclr' / 'seed-0'}\n" in shown
    assert re.search(r"run 2 of 2: .*seed-1; about .* left in the sweep\n", shown)


def test_a_folder_of_classes_is_evaluated(tmp_path: Path) -> None:
    folder = classes(tmp_path / "classes")
    run = kf.train(
        str(folder),
        tmp_path / "run",
        recipe=recipe(tmp_path),
        epochs=1,
        report=False,
        progress=False,
    )
    assert kf.evaluate(run, str(folder))["accuracy"] > 0.9
    assert kf.evaluate(run, folder, labels_from_folders=True)["accuracy"] > 0.9
    assert kf.evaluate(run, labels_from_folders=True)["accuracy"] > 0.9
    for data in (None, str(folder)):
        with pytest.raises(UsageError, match="no labels to measure with"):
            kf.evaluate(run, data, labels_from_folders=False)
    for given in (True, None):
        with pytest.raises(UsageError, match="a folder per class"):
            kf.evaluate(run, str(folder / "dark"), labels_from_folders=given)


@pytest.mark.parametrize("how", ["tuple", "labels"])
def test_a_sweep_trains_on_arrays_with_labels(tmp_path: Path, how: str) -> None:
    x, y = (
        np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8),
        np.arange(40) % 2,
    )
    common: dict[str, Any] = {
        "recipe": recipe(tmp_path),
        "epochs": 1,
        "report": False,
        "progress": False,
    }
    data: dict[str, Any] = (
        {"data": (x, torch.from_numpy(y))} if how == "tuple" else {"data": x, "labels": y.tolist()}
    )
    run = kf.train(out=tmp_path / "run", settings={"knn.every": 1}, **data, **common)
    assert "knn" in run.epochs()[-1]
    assert 0 <= kf.evaluate(run, (x, y))["accuracy"] <= 1
    with pytest.raises(UsageError, match="`labels` belong to an array of images"):
        kf.train("digits", tmp_path / "other", labels=y)
    with pytest.raises(UsageError, match="`labels` belong to images as an array, tensor or"):
        kf.train(("digits", y), tmp_path / "other")  # type: ignore[arg-type]


def recipe(folder: Path) -> Path:
    """The small settings as a file."""
    path = folder / "small.yaml"
    path.write_text(
        "model: {name: resnet10, width: 4}\nhead: {out_size: 8}\nviews: {preset: mild}\nknn:"
        " {every: 0}\n"
    )
    return path


def test_settings_of_detectors_apply_to_methods_with_one() -> None:
    found = combinations(
        ["simclr", "simclr+glofnd:attract"], {"optimizer.lr": [0.1], "detector.alpha": [0.01, 0.05]}
    )
    assert list(found) == [
        "simclr,lr=0.1",
        "simclr+glofnd-attract,lr=0.1,alpha=0.01",
        "simclr+glofnd-attract,lr=0.1,alpha=0.05",
    ]
    assert found["simclr,lr=0.1"] == ("simclr", {"optimizer.lr": 0.1})


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert split_values("detector.alpha=0.01,1e-3") == ("detector.alpha", [0.01, 0.001])
    with pytest.raises(UsageError, match="KEY=VALUE,VALUE"):
        split_values("detector.alpha=0.1,")


@pytest.mark.parametrize(
    "wrong", [{"methods": []}, {"seeds": []}, {"settings": {"optimizer.lr": []}}, {"resume": True}]
)
def test_a_sweep_without_axes_or_with_wrong_ones_is_refused(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="a sweep"):
        kf.sweep("digits", tmp_path / "sweep", **wrong)
    assert not (tmp_path / "sweep").exists()
