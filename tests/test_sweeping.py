"""Sweeps: every combination once, compared in one table, and nothing done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kinfolk as kf
from kinfolk.errors import UsageError
from kinfolk.sweeping import combinations, split_values


def test_a_sweep_trains_compares_and_resumes(tmp_path: Path) -> None:
    given: dict[str, Any] = {"methods": ["simclr", "simclr+fnc"], "settings": {"detector.fraction": [0.05, 0.1]}, "protocols": ["knn"]}
    given |= {"epochs": 1, "batch_size": 512, "report": False, "progress": False}
    found = kf.sweep("digits", tmp_path, seeds=[0], recipe=recipe(tmp_path), **given)
    names = [run.path.relative_to(tmp_path).as_posix() for run in found.runs]
    assert names == ["simclr/seed-0", "simclr+fnc,fraction=0.05/seed-0", "simclr+fnc,fraction=0.1/seed-0"]
    assert found.table is not None
    assert [record["method"] for record in found.table.records] == ["simclr", "simclr+fnc (fraction 0.05)", "simclr+fnc (fraction 0.1)"]
    again = kf.sweep("digits", tmp_path, seeds=[0], recipe=recipe(tmp_path), **given)
    assert [run.unchanged for run in again.runs] == [True] * 3
    assert again.table is not None
    assert again.table.records == found.table.records


def recipe(folder: Path) -> Path:
    """The small settings as a file."""
    path = folder / "small.yaml"
    path.write_text(
        "model: {name: resnet10, width: 4}\nhead: {out_size: 8}\nviews: {preset: mild}\nknn: {every: 0}\nsnapshots: {epochs: 0}\n"
    )
    return path


def test_settings_of_detectors_apply_to_methods_with_one() -> None:
    found = combinations(["simclr", "simclr+glofnd:attract"], {"optimizer.lr": [0.1], "detector.alpha": [0.01, 0.05]})
    assert list(found) == ["simclr,lr=0.1", "simclr+glofnd-attract,lr=0.1,alpha=0.01", "simclr+glofnd-attract,lr=0.1,alpha=0.05"]
    assert found["simclr,lr=0.1"] == ("simclr", {"optimizer.lr": 0.1})


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert split_values("detector.alpha=0.01,1e-3") == ("detector.alpha", [0.01, 0.001])
    with pytest.raises(UsageError, match="KEY=VALUE,VALUE"):
        split_values("detector.alpha=0.1,")


@pytest.mark.parametrize("wrong", [{"methods": []}, {"seeds": []}, {"settings": {"optimizer.lr": []}}, {"resume": True}])
def test_wrong_use_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a sweep"):
        kf.sweep("digits", tmp_path / "sweep", **wrong)
    assert not (tmp_path / "sweep").exists()
