"""Runs of earlier versions, where some arguments had other names and checkpoints more state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kinfolk as kf
from kinfolk.cli import main
from kinfolk.comparing.runs import read_runs
from kinfolk.detectors import DETECTORS
from kinfolk.errors import KinfolkError
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.registry import detector_arguments, framework_arguments, parse
from kinfolk.training import defaults
from kinfolk.training import train as training
from kinfolk.training.build import build_framework
from kinfolk.training.config import TrainConfig
from kinfolk.training.run_folder import Run
from kinfolk.training.settings import check_arguments, current_names, digests_of_stored
from tests.training.small import BARE, few_digits

CONFIG = Path(__file__).with_name("earlier_run.yaml")
"""The configuration of a decoupled `simclr+fnc` with 5 percent, as an earlier version wrote it."""


def test_a_stored_configuration_means_the_same() -> None:
    config = TrainConfig.load(CONFIG)
    assert config.detector["fraction"] == 0.05, "as it was written, so that its digest stays"
    method, settable = parse(config.method), framework_arguments(parse(config.method))
    framework = check_arguments(
        FRAMEWORKS["simclr"], settable, config.framework, "framework", "simclr"
    )
    assert framework["decoupled"] is True
    settable = detector_arguments(method, config.detector)
    detector = check_arguments(DETECTORS["fnc"], settable, config.detector, "detector", "fnc")
    assert (detector["alpha"], detector["top_k"]) == (0.05, None)


def test_its_digest_is_known(tmp_path: Path) -> None:
    """The settings that the version before had, and those it counted, are not this version's."""
    text, known = CONFIG.read_text(encoding="utf-8"), digests_of_stored(TrainConfig.load(CONFIG))
    assert "anchor_column" not in text, "a setting of this version"
    assert "rescale_kept: false" in text, "that version counted it"
    assert "63803bc0ab1947805ea0cb75261f8081" in known, "as that version computed it"
    edited = tmp_path / "edited.yaml"
    for was, now in (("batch_size: 256", "batch_size: 128"), ("depth: null", "depth: 1")):
        edited.write_text(text.replace(was, now), encoding="utf-8")
        assert not known & digests_of_stored(TrainConfig.load(edited)), "also a removed setting"


def test_an_argument_that_is_gone_is_left_out_where_it_changed_nothing() -> None:
    given = {"lower": 0.5, "boundaries": "exact"}
    assert current_names(given, "ring") == {"lower": 0.5}
    assert current_names({"boundaries": "learned"}, "ring") == {"boundaries": "learned"}
    assert current_names({"top_k": 2, "degrees": True}, "fnc") == {"top_k": 2}
    assert current_names({"alpha": 0.1, "degrees": True}, "guide") == {
        "alpha": 0.1,
        "degrees": True,
    }
    kmeans = {"iterations": 20, "warm_iterations": 5, "points_per_cluster": 256}
    assert current_names({"every": 2, **kmeans}, "cave") == {"every": 2}
    assert current_names({**kmeans, "iterations": 9}, "cave") == {"iterations": 9}
    assert current_names({"rho": 6.5, "individual_lr": None}, "fastclip") == {"rho": 6.5}
    given = {"max_units": 32, "cluster_seed": 0}
    assert current_names({**given, "num_keys": 2}, "rcl") == {"num_keys": 2}
    given = {"warm_start": True, "warm_iterations": 5}
    assert current_names({**given, "every": 1}, "spcl") == {"every": 1}
    assert current_names({"cluster_seed": 1}, "pcl") == {"cluster_seed": 1}


def test_it_is_a_recipe_for_another_method() -> None:
    config = defaults.assemble(None, CONFIG, {"method": "moco+fnc"}, {})
    assert config.framework["decoupled"] is True
    assert config.detector["alpha"] == 0.05
    assert not {"positive_in_denominator", "fraction"} & {*config.framework, *config.detector}


@pytest.mark.parametrize(
    ("name", "given", "decoupled"),
    [
        ("simclr", {"positive_in_denominator": True, "decoupled": False}, False),
        ("simclr", {"positive_in_denominator": True, "decoupled": True}, True),
        ("spcl", {"positive_in_denominator": False, "decoupled": False}, True),
        ("spcl", {"positive_in_denominator": True}, False),
    ],
)
def test_the_positive_is_where_it_was(name: str, given: dict[str, Any], decoupled: bool) -> None:
    settable = framework_arguments(parse(name))
    found = check_arguments(FRAMEWORKS[name], settable, given, "framework", name)
    assert found["decoupled"] is decoupled


def train_as_before(monkeypatch: pytest.MonkeyPatch, out: Path, **more: Any) -> Run:
    """A run that writes its configuration, digests and checkpoint as an earlier version did."""

    def earlier_names(*args: Any) -> dict[str, Any]:
        found = check_arguments(*args)
        if args[-1] and "decoupled" in found:
            found = {**found, "positive_in_denominator": not found["decoupled"], "decoupled": False}
        return found

    def earlier_state(*args: Any) -> Framework:
        framework = build_framework(*args)
        (detector,) = framework.detectors
        detector.get_submodule("store").register_buffer("tail", torch.zeros(3))
        return framework

    with monkeypatch.context() as patch:
        patch.setattr(defaults, "check_arguments", earlier_names)
        patch.setattr(training, "build_framework", earlier_state)
        return train_small(out, **more)


def train_small(out: Path, **more: Any) -> Run:
    given = {"method": "simclr+glofnd", "epochs": 1, "batch_size": 512, "settings": BARE, **more}
    return training.train("digits", out, progress=False, **given)


def test_an_earlier_run_is_evaluated_and_compared_but_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_digits(monkeypatch)
    earlier = train_as_before(monkeypatch, tmp_path / "earlier")
    assert "positive_in_denominator: true" in earlier.config.read_text(encoding="utf-8")
    today = train_small(tmp_path / "today", settings={**BARE, "seed": 1})
    assert kf.embed(earlier.path).shape == kf.embed(today.path).shape
    for run in (earlier, today):
        with pytest.raises(SystemExit, match="0"):
            main(["eval", str(run.path), "--protocol", "knn,kin"])
    assert 0 < json.loads((earlier.path / "eval" / "kin.json").read_text())["recall"] < 1
    runs, _ = read_runs([tmp_path])
    assert runs[0].settings == runs[1].settings, "two seeds of one row"
    with pytest.raises(KinfolkError, match=r"was .* when the run began"):
        training.train(None, earlier.path, resume=True, epochs=2, progress=False)
