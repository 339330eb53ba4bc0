"""The configuration: settings, unknown keys, and what is written and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kinfolk.errors import UsageError
from kinfolk.training.config import TrainConfig


def test_settings_are_yaml_and_reach_sections() -> None:
    config = TrainConfig().with_settings(
        [
            "optimizer.lr=1e-3",
            "detector.alpha=0.02",
            "views.options.flip=0",
            "checkpoint.every_minutes=null",
            "optimizer.milestones=[3, 5]",
        ]
    )
    assert config.optimizer.lr == 1e-3
    assert config.detector == {"alpha": 0.02}
    assert config.views.options == {"flip": 0}
    assert config.checkpoint.every_minutes is None
    assert config.optimizer.milestones == (3.0, 5.0)
    assert TrainConfig().optimizer.lr != 1e-3, "the original must not change"


def test_a_section_given_as_a_mapping_keeps_its_other_keys() -> None:
    config = TrainConfig().with_settings({"optimizer": {"lr": 0.5}, "detector": {"alpha": 0.1}})
    assert (config.optimizer.lr, config.optimizer.momentum, config.detector) == (
        0.5,
        0.9,
        {"alpha": 0.1},
    )
    assert (
        TrainConfig()
        .with_settings({"optimizer.momentum": 0.5})
        .with_settings({"optimizer": {"lr": 1}})
        .optimizer.momentum
        == 0.5
    )


def test_a_mapping_sets_the_same_as_texts() -> None:
    assert TrainConfig().with_settings(
        {"epochs": 7, "detector.alpha": 0.5}
    ) == TrainConfig().with_settings(["epochs=7", "detector.alpha=0.5"])


REFUSED: list[tuple[str, list[str]]] = [
    ("optimizer.lrr=1", ["`optimizer.lrr`", "did you mean lr", "weight_decay"]),
    ("epoch=1", ["`epoch`", "did you mean epochs", "batch_size"]),
    ("lr=1", ["`lr`", "did you mean optimizer.lr?"]),
    ("optimzer.lr=1", ["`optimzer`", "did you mean optimizer"]),
    ("epochs.lr=1", ["`epochs` (={'lr': 1}) must be a valid integer"]),
    ("optimizer=1", ["`optimizer` (=1) is a section"]),
    ("optimizer.lr=-1", ["`optimizer.lr` (=-1)", "greater than 0"]),
    ("optimizer.lr=fast", ["`optimizer.lr` (='fast')", "number"]),
    ("optimizer.name=adam", ["`optimizer.name` (='adam')", "'sgd'"]),
    ("trainer.devices=many", ["`trainer.devices` (='many')"]),
    ("optimizer.lr", ["KEY=VALUE", "'optimizer.lr'"]),
    ("optimizer.lr=[", ["`optimizer.lr`", "cannot be read"]),
]


def test_wrong_settings_are_refused_in_one_sentence() -> None:
    for setting, words in REFUSED:
        with pytest.raises(UsageError) as caught:
            TrainConfig().with_settings([setting])
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)


def test_written_and_read_again_is_equal(tmp_path: Path) -> None:
    config = TrainConfig().with_settings(
        [
            "method=sogclr+glofnd",
            "detector.betas=[0.9, 0.98]",
            "trainer.loggers=[tensorboard, wandb]",
            "data.source=Bücher/ü.npz",
        ]
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.load(path) == config
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert written["optimizer"]["momentum"] == 0.9, "defaults are written out"
    assert set(written) == set(TrainConfig.model_fields)


def test_a_document_with_an_unknown_key_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("knn: {evry: 2}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"`knn\.evry` in .*mine\.yaml; did you mean every"):
        TrainConfig.load(path)
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="mapping"):
        TrainConfig.load(path)
