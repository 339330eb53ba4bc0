"""A recipe with another method than its own resolves: what belongs to the replaced part is dropped,
and named."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.detectors import DETECTORS
from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.registry import detector_arguments, framework_arguments, parse
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import assemble
from kinfolk.training.settings import load_recipe, recipe_names, with_method
from kinfolk.training.train import train
from tests.training.small import BARE


def resolved(
    recipe: str, method: str, settings: dict[str, Any] | None = None
) -> tuple[TrainConfig, list[str]]:
    """The configuration, and the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = assemble(None, recipe, {"method": method}, settings or {})
    return config, [str(each.message) for each in warned]


def test_every_recipe_resolves_without_and_with_another_detector() -> None:
    for name in recipe_names():
        own = parse(load_recipe(name).method)
        plain, warned = resolved(name, own.framework)
        assert plain.detector == {}
        assert plain.framework.items() >= load_recipe(name).framework.items(), (
            "the framework is the same"
        )
        assert len(warned) == bool(load_recipe(name).detector)
        other = "fnc" if own.detector != "fnc" else "glofnd"
        config, _ = resolved(name, f"{own.framework}+{other}")
        assert config.detector["start_epoch"] == load_recipe(name).detector.get("start_epoch"), (
            "when it starts is kept"
        )


def test_no_recipe_leaves_a_setting_that_another_method_does_not_know() -> None:
    """As `resolve` would refuse it, which is slower. Framework and detector are replaced
    independently of each other, so it is enough to try every framework, every detector, and none
    with its own framework."""
    changed = {"method", "framework", "detector"}
    pairs = itertools.zip_longest(FRAMEWORKS, DETECTORS)
    both = [f"{framework or 'simclr'}+{detector or 'fnc'}" for framework, detector in pairs]
    for name in recipe_names():
        recipe = load_recipe(name)
        kept = recipe.model_dump(exclude=changed)
        for method in (parse(recipe.method).framework, *both):
            config, dropped = with_method(recipe, method)
            assert config.framework.keys() <= framework_arguments(parse(method)).keys()
            assert config.detector.keys() <= detector_arguments(parse(method)).keys()
            assert config.framework.get("queue_size") != 0 or parse(method).framework == "pcl"
            assert config.model_dump(exclude=changed) == kept
            assert bool(dropped) == (
                (config.framework, config.detector) != (recipe.framework, recipe.detector)
            )


@pytest.mark.parametrize(
    "name",
    [
        "simclr-ifnd-cifar100",
        "moco-ifnd-imagenet",
        "spcl-cifar10",
        "rcl-cpu",
        "pcl-cpu",
        "cmc-ring-cpu",
    ],
)
def test_recipes_resolve_with_every_framework(name: str) -> None:
    for framework in FRAMEWORKS:
        config, _ = resolved(name, framework)
        assert config.method == framework
        assert config.framework["temperature"] == load_recipe(name).framework["temperature"]


@pytest.mark.parametrize(
    ("recipe", "method", "framework", "detector"),
    [
        ("simclr-ifnd-cifar100", "simclr", {"temperature": 0.2}, {}),
        (
            "moco-ifnd-imagenet",
            "moco",
            {"temperature": 0.2, "queue_size": 65536, "momentum": 0.999},
            {},
        ),
        (
            "simclr-glofnd-imagenet100",
            "simclr+fnc",
            {"temperature": 0.1},
            {"alpha": 0.01, "start_epoch": 70},
        ),
        ("spcl-cifar10", "simclr", {"temperature": 0.5}, {}),
        ("rcl-cpu", "moco", {"temperature": 0.2, "queue_size": 4096, "momentum": 0.99}, {}),
        (
            "sogclr-glofnd-cpu",
            "simclr+glofnd",
            {"temperature": 0.2},
            {"alpha": 0.01, "init": "quantile", "start_epoch": 10},
        ),
    ],
)
def test_the_baselines_of_the_papers(
    recipe: str, method: str, framework: dict[str, Any], detector: dict[str, Any]
) -> None:
    config, warned = resolved(recipe, method)
    assert config.framework.items() >= framework.items()
    assert config.detector.items() >= detector.items()
    assert len(warned) == 1
    assert (
        f"the recipe is for {load_recipe(recipe).method}; for {method} these settings of it are"
        " dropped: `" in warned[0]
    )


def test_the_own_method_keeps_everything_and_is_silent() -> None:
    config, warned = resolved("simclr-glofnd-cpu", "simclr+glofnd:attract")
    assert config.detector["alpha"] == 0.01
    assert not warned


def test_the_method_may_be_a_setting() -> None:
    with pytest.warns(
        KinfolkWarning, match=r"dropped: `detector\.num_clusters`, `detector\.schedule`"
    ):
        config = assemble(None, "simclr-ifnd-cpu", {}, ["method=simclr"])
    assert (config.method, config.detector) == ("simclr", {})


def test_what_the_user_sets_is_not_dropped() -> None:
    with (
        pytest.raises(UsageError, match=r"`detector\.alpha` is set, but simclr has no detector"),
        pytest.warns(KinfolkWarning),
    ):
        assemble(None, "simclr-glofnd-cpu", {"method": "simclr"}, {"detector.alpha": 0.1})


def test_views_of_the_replaced_framework_are_dropped() -> None:
    config = assemble(None, None, {"method": "cmc"}, {"views.options.flip": 0.5})
    assert config.views.options == {"flip": 0.5, "space": "lab"}
    other, dropped = with_method(config, "moco")
    assert other.views.options == {"flip": 0.5}
    assert "views.options.space" in dropped


def test_it_is_reported_in_one_line_of_the_log(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x_train=x, y_train=np.arange(16) % 2)
    run = train(
        tmp_path / "images.npz",
        tmp_path / "run",
        recipe="simclr-ifnd-cpu",
        method="simclr",
        epochs=1,
        batch_size=8,
        settings={**BARE, "optimizer.warmup_epochs": 0},
        progress=False,
    )
    lines = run.log.read_text(encoding="utf-8").splitlines()
    assert (
        sum(
            "the recipe is for simclr+ifnd; for simclr these settings of it are dropped" in line
            for line in lines
        )
        == 1
    )
