"""The reference of settings: complete and explained."""

from __future__ import annotations

import pytest

from kinfolk.cli import main
from kinfolk.errors import UsageError
from kinfolk.training.config import TrainConfig, list_settings, sections
from kinfolk.training.settings import flat


def test_every_key_is_there_with_a_sentence() -> None:
    found = list_settings()
    empty = {"framework", "detector", "views.options"}  # mappings, which `flat` leaves out
    assert {setting.key for setting in found} == flat(
        TrainConfig().model_dump(mode="json")
    ).keys() | empty
    for setting in found:
        assert setting.description.endswith((".", "…")), f"`{setting.key}` has no sentence"
        assert "\n" not in setting.description
        assert "|" not in setting.type + setting.default + setting.description
    assert {setting.section for setting in found} == sections().keys()


def test_types_bounds_and_defaults() -> None:
    found = {setting.key: (setting.type, setting.default) for setting in list_settings()}
    assert found["optimizer.lr"] == ("number or null, > 0", "null")
    assert found["optimizer.trust"] == ("number, > 0", "0.001")
    assert found["model.stem"] == ("cifar, imagenet or null", "null")
    assert found["model.width"] == ("whole number or null, ≥ 1 and ≤ 16384", "null")
    assert found["optimizer.betas"] == ("2 values, each number", "[0.9, 0.999]")
    assert found["trainer.loggers"] == (
        "list, each tensorboard, wandb or mlflow",
        '["tensorboard"]',
    )
    assert found["trainer.devices"] == ("whole number or auto", '"auto"')


def test_the_command_prints_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["settings", "optimizer"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "optimizer.lr_scaling" in text
    assert "model.width" not in text


def test_an_unknown_prefix_gets_the_nearest() -> None:
    assert [each.key for each in list_settings("checkpoint.every")] == [
        "checkpoint.every_epochs",
        "checkpoint.every_minutes",
    ]
    with pytest.raises(UsageError, match=r"there is no setting `lr`; did you mean optimizer\.lr"):
        list_settings("lr")
    with pytest.raises(
        UsageError, match=r"there is no setting `optimiser`; did you mean optimizer"
    ):
        list_settings("optimiser")
