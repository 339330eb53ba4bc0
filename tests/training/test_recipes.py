"""Recipes: each is a document, and each runs."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kinfolk.data.text import train_tokenizer
from kinfolk.errors import UsageError
from kinfolk.frameworks import Framework
from kinfolk.frameworks.registry import parse
from kinfolk.training.build import build_framework, build_optimizers, build_views
from kinfolk.training.config import TrainConfig
from kinfolk.training.defaults import assemble, learns_from_text
from kinfolk.training.settings import load_recipe, recipe_names, recipe_path, recipe_summary
from kinfolk.training.train import train
from tests.training.pairs_of import write_pairs

TOKENIZER = train_tokenizer(["a dog runs"], vocab_size=300, context=32)
SMALL = {
    "framework.queue_size": 6,
    "framework.warmup_epochs": 0,
    "framework.num_clusters": [2, 3],
    "detector.num_clusters": [2, 3],
}
"""What takes the place of a recipe's own for 24 images."""


def test_a_recipe_is_a_document() -> None:
    for name in recipe_names():
        header = [
            line
            for line in recipe_path(name).read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        ]
        for word in ("paper", "command", "hardware", "time", "figure"):
            assert any(line.startswith(f"# {word} ") for line in header), word
        assert any(f"--recipe {name} " in line for line in header)
        assert recipe_summary(name)
        assert not recipe_summary(name).startswith("#")


def one_for_each_part() -> list[str]:
    """Recipes that have, together, every framework and every detector that a recipe has; those with
    the most parts first."""
    chosen, seen = [], set[str]()
    for name in sorted(recipe_names(), key=lambda name: (-len(parts(name)), name)):
        if not parts(name) <= seen:
            chosen.append(name)
            seen |= parts(name)
    return chosen


def parts(name: str) -> set[str]:
    method = parse(load_recipe(name).method)
    return {method.framework} | ({f"+{method.detector}"} if method.detector else set())


@pytest.mark.parametrize("name", [*one_for_each_part(), "simclr-debiased-cpu"])
def test_a_recipe_runs_two_steps(name: str, tmp_path: Path) -> None:
    """At its own settings, but for the size of everything; detection begins at once."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), np.arange(24) % 3
    recipe = load_recipe(name)
    data = tmp_path / ("images" if recipe.data.labels_from_folders else "images.npz")
    if learns_from_text(recipe):
        data = write_pairs(tmp_path / "captions", 32, captions=1)
    elif recipe.data.labels_from_folders:
        for i in range(24):
            (data / "train" / f"class {y[i]}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i]).save(data / "train" / f"class {y[i]}" / f"{i}.png")
    else:
        np.savez(data, x_train=x, y_train=y)
    settings: dict[str, Any] = {
        "model.name": "resnet10",
        "model.width": 8,
        "views.size": 16,
        "optimizer.warmup_epochs": 1,
    }
    if learns_from_text(recipe):
        settings |= {
            "text.name": "transformer",
            "text.layers": 1,
            "text.width": 16,
            "text.heads": 2,
            "text.context": 12,
            "head.layers": 1,
        }
    if "start_epoch" in recipe.detector:
        settings["detector.start_epoch"] = 0
    if "num_clusters" in recipe.detector and "schedule" in recipe.detector:
        settings["detector.schedule"] = "constant"
    if "+guide" in recipe.method:
        np.save(tmp_path / "features.npy", random.normal(size=(24, 4)).astype(np.float16))
        settings["detector.features"] = str(tmp_path / "features.npy")
    for key, value in SMALL.items():
        section, _, name_ = key.partition(".")
        if getattr(recipe, section).get(name_):
            settings[key] = value
    run = train(
        data,
        tmp_path / "run",
        recipe=name,
        epochs=1,
        batch_size=12,
        settings=settings,
        progress=False,
    )
    (row,) = run.epochs()
    assert row["step"] == 2
    # which has a detector of its own
    assert ("flagged" in row) == ("+" in recipe.method or recipe.method == "la")


FEATURES = Path(tempfile.mkdtemp()) / "features.npy"
"""Those of a guide, for 200,000 samples."""


class Data(SimpleNamespace):
    """As much of the data as a framework is built from."""

    texts = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_ids(self) -> int:
        return int(self.num_train)

    def of_ids(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture(scope="module", autouse=True)
def guide() -> Iterator[None]:
    # a worker that takes tests of this module again comes here again
    FEATURES.parent.mkdir(exist_ok=True)
    np.save(FEATURES, np.ones((200_000, 2), dtype=np.float16))
    yield
    shutil.rmtree(FEATURES.parent)


def built(name: str, **settings: Any) -> tuple[TrainConfig, Framework]:
    """The configuration and the framework of a recipe for 200,000 samples, with small networks."""
    small = {
        "model.name": "resnet10",
        "model.width": 4,
        "model.stem": "cifar",
        "model.init": None,
        "head.out_size": 4,
        "views.size": 16,
    }
    small |= {
        "text.name": "transformer",
        "text.layers": 1,
        "text.width": 8,
        "text.heads": 1,
        "text.pretrained": False,
    }
    known: dict[str, Any] = {
        key: 16
        for key in ("framework.predictor_size",)
        if "predictor_size" in load_recipe(name).framework
    }
    known |= {"detector.features": str(FEATURES)} if "+guide" in load_recipe(name).method else {}
    config = assemble(None, name, {}, {**small, **known, **settings})
    keys = SimpleNamespace(keys=[""] * 200_000)
    data: Any = Data(num_train=200_000, labels=torch.arange(200_000) % 10, samples=keys)
    framework = build_framework(config, data, TOKENIZER if learns_from_text(config) else None)
    framework.set_progress(0, config.epochs)
    return config, framework


@pytest.mark.parametrize("part", range(4))
def test_a_recipe_is_built_and_its_detector_flags_in_its_training(part: int) -> None:
    """Of every fourth recipe: two processes share them."""
    for name in recipe_names()[part::4]:
        config, framework = built(name)
        recipe = load_recipe(name)
        assert bool(framework.detectors) == ("+" in recipe.method or name.startswith("la-")), name
        assert framework.silent_reason() is None, name
        assert build_views(config).size == 16, name
        made = build_optimizers(config, framework, num_batches=200_000 // config.batch_size)
        groups = made["optimizer"].param_groups
        assert min(group["initial_lr"] for group in groups) > 0, name
        assert len({id(p) for group in groups for p in group["params"]}) == sum(
            p.requires_grad for p in framework.parameters()
        ), name


@pytest.mark.parametrize(
    ("name", "epochs", "reason"),
    [
        (
            "simclr-ifnd-cifar100",
            20,
            r"no clustering is due in 20 epochs; choose a smaller `every` \(=20\)",
        ),
        ("simclr-glofnd-imagenet100", 70, "starts in epoch 70"),
        ("simclr-hierarchy-cpu", 5, r"`warmup_epochs` \(=5\)"),
        ("la-cpu", 5, "starts in epoch 5"),
    ],
)
def test_a_recipe_cut_short_says_that_it_flags_nothing(name: str, epochs: int, reason: str) -> None:
    _, framework = built(name, epochs=epochs, **{"optimizer.warmup_epochs": 0})
    assert re.search(reason, framework.silent_reason() or "")


def test_the_imagenet100_recipe_has_the_settings_of_the_paper() -> None:
    recipe = load_recipe("sogclr-glofnd-imagenet100")
    assert (recipe.epochs, recipe.batch_size, recipe.model.name) == (200, 128, "resnet50")
    assert recipe.detector == {
        "alpha": 0.01,
        "rule": "adam",
        "lr": 0.05,
        "betas": [0.9, 0.98],
        "init": "one",
        "start_epoch": 70,
    }
    optimizer = recipe.optimizer
    assert (
        optimizer.name,
        optimizer.lr,
        optimizer.lr_scaling,
        optimizer.weight_decay,
        optimizer.warmup_epochs,
    ) == (
        "lars",
        0.075,
        "sqrt",
        1e-6,
        10,
    )


@pytest.mark.parametrize(
    ("name", "framework", "detector"),
    [
        (
            "sogclr-clip",
            {"temperature": 0.03, "gamma": 0.2, "decay_epochs": 18},
            {"alpha": 0.0005, "start_epoch": 15},
        ),
        (
            "fastclip",
            {
                "temperature": 0.07,
                "gamma": 0.2,
                "decay_epochs": 18,
                "rho": 6.5,
                "temperature_lr": 0.0002,
                "temperature_gradient": "released",
            },
            {"alpha": 0.001, "start_epoch": 20},
        ),
    ],
)
def test_the_paper_s_settings_of_image_and_text(
    name: str, framework: dict[str, Any], detector: dict[str, Any]
) -> None:
    """Table 4 of the GloFND paper, and section 4.2."""
    learned = {"rule": "adam", "lr": 0.05, "init": "one"}
    kinds = {
        "": {},
        "-fnc": {"alpha": detector["alpha"], "start_epoch": detector["start_epoch"]},
        "-glofnd": {**detector, **learned},
    }
    for kind, expected in kinds.items():
        recipe = load_recipe(f"{name}{kind}-cc3m")
        assert (recipe.epochs, recipe.batch_size, recipe.model.name, recipe.text.layers) == (
            37,
            1024,
            "resnet50",
            12,
        )
        assert (recipe.framework, recipe.detector) == (framework, expected)
        optimizer = recipe.optimizer
        assert (optimizer.name, optimizer.lr, optimizer.weight_decay, list(optimizer.betas)) == (
            "adamw",
            0.001,
            0.1,
            [0.9, 0.999],
        )
        assert optimizer.warmup_epochs is not None
        assert round(optimizer.warmup_epochs * (2_723_840 // 1024)) == pytest.approx(
            10_000, rel=0.001
        )


def test_what_the_papers_code_has_and_their_equations_do_not() -> None:
    assert load_recipe("simclr-glofnd-imagenet100").framework["rescale_kept"] is True
    for name in ("simclr-ifnd-cifar100", "moco-ifnd-imagenet"):
        detector = load_recipe(name).detector
        assert (
            detector["space"],
            detector["warm_start"],
            detector["points_per_cluster"],
        ) == (
            "features",
            False,
            1000,
        )
        assert "temperature" not in detector, "that of the loss"
    assert load_recipe("moco-ifnd-imagenet").framework["cluster_encoder"] == "momentum"


def test_the_paper_s_fine_tuning() -> None:
    recipe = load_recipe("clip-finetune-cc3m")
    assert (recipe.epochs, recipe.detector["start_epoch"], recipe.detector["alpha"]) == (
        15,
        1,
        0.0001,
    )
    assert recipe.model.name == recipe.text.name


def test_a_recipe_by_path_and_unknown_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\nepochs: 3\n", encoding="utf-8")
    assert load_recipe(path).epochs == load_recipe(str(path)).epochs == 3
    with pytest.raises(UsageError, match="unknown recipe `demo-digit`; did you mean demo-digits"):
        load_recipe("demo-digit")
    with pytest.raises(UsageError, match="there is no recipe file"):
        load_recipe(tmp_path / "other.yaml")
