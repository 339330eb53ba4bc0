"""The study from a good encoder: every method trains, settings are chosen on held-out images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.loading import load

study = load("good_encoder")
ALL_BUT_GROUPS = ("train", "views", "test", "train_y", "test_y")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Features of 150 images in three classes, and short trainings."""
    draw = np.random.default_rng(0)
    labels = np.arange(150) % 3
    centres = draw.normal(size=(3, 20))
    x = (centres[labels] + 0.3 * draw.normal(size=(4, 150, 20))).astype(np.float16)
    (tmp_path / "guides").mkdir()
    arrays = {"x_train": x[0], "views": x[1:], "x_test": x[0, :30], "y_train": labels}
    track = labels + 3 * (np.arange(150) // 15)
    np.savez(
        tmp_path / "guides" / "gtsrb-views.npz", **arrays, y_test=labels[:30], track_train=track
    )
    for name, value in {"EPOCHS": 5, "BATCH": 50, "WIDTH": 16, "SEEDS": (0,)}.items():
        monkeypatch.setattr(study, name, value)
    return tmp_path


@pytest.mark.parametrize("name", study.METHODS)
def test_every_method_trains(name: str, small: Path) -> None:
    data = study.read(small, "gtsrb")
    method = study.METHODS[study.METHODS[name].as_chosen or name]
    setting = {
        key: min(value, 10) if key == "num_clusters" else value
        for key, value in method.grid[0].items()
    }
    adapter, flags = study.train(name, setting, data, seed=0)
    assert study.evaluate(adapter, data, probes=False)["knn"] > 80
    if study.METHODS[name].detector not in (None, "hierarchy") and "stops" not in name:
        assert flags["flagged"] > 0
    if study.METHODS[name].detector == "oracle":
        assert (flags["precision"], flags["recall"]) == (100, 100)


def test_the_adapter_starts_as_the_identity(small: Path) -> None:
    data = study.read(small, "gtsrb")
    assert torch.equal(study.Adapter()(data.train), data.train)


def test_whole_groups_are_held_out(small: Path) -> None:
    data = study.read(small, "gtsrb")
    held = study.hold_out(data)
    assert len(held.train) + len(held.test) == 150
    assert held.views.shape == (3, len(held.train), 16)
    assert len(held.test) == int((data.groups % 5 == 0).sum()) > 0


def test_a_study_chooses_first_and_does_nothing_twice(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {name: study.METHODS[name] for name in ("simclr", "fnc", "fnc:reweight")}
    monkeypatch.setattr(study, "METHODS", methods)
    results = small / "good_encoder.json"
    study.run(small, results)
    records: list[dict[str, Any]] = json.loads(results.read_text())
    by_name = {(one["method"], one["seed"]): one for one in records}
    chosen = by_name["fnc", study.CHOOSING_SEED]
    best = max(chosen["tried"], key=lambda one: one["knn"])
    assert chosen["settings"] == best["settings"]
    assert by_name["fnc", 0]["settings"] == best["settings"]
    assert by_name["fnc:reweight", 0]["settings"] == best["settings"]
    assert {"frozen", "distillation", "simclr"} <= {name for name, seed in by_name if seed == 0}
    assert list(study.jobs(records, ("gtsrb",))) == []
    monkeypatch.setattr(study, "train", None)
    study.run(small, results)
    assert json.loads(results.read_text()) == records


def test_criteria_without_labels_are_recorded(small: Path) -> None:
    data = study.read(small, "gtsrb")
    figures = study.evaluate(None, data)
    assert 0 < figures["views"] <= 100
    assert 0 < figures["tracks"] <= 100
    alone = study.Data(*(getattr(data, name) for name in ALL_BUT_GROUPS), torch.arange(150))
    assert "tracks" not in study.evaluate(None, alone)
