"""The loggers: one name is enough, and where each of them logs. W&B and MLflow are replaced by
stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinfolk.training.config import TrainConfig
from kinfolk.training.run_folder import Run
from kinfolk.training.train import _logger


class StandIn:
    """Keeps what it was made with and the settings that it was given."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def log_hyperparams(self, settings: dict[str, Any]) -> None:
        self.settings = settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [("wandb", ("wandb",)), ("none", ()), ("[tensorboard, mlflow]", ("tensorboard", "mlflow"))],
)
def test_loggers_are_given_by_one_name_or_a_list(given: str, expected: tuple[str, ...]) -> None:
    assert TrainConfig().with_settings([f"trainer.loggers={given}"]).trainer.loggers == expected


@pytest.mark.parametrize("project", [None, "birds"])
def test_wandb_logs_to_its_project_with_all_settings(
    project: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", StandIn)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if project is not None:
        monkeypatch.setenv("WANDB_PROJECT", project)
    made: Any = _logger("wandb", TrainConfig(epochs=3), Run(tmp_path / "photos"), 0)
    assert made.arguments == {
        "name": "photos",
        "save_dir": tmp_path / "photos",
        "project": project or "kinfolk",
    }
    assert made.settings["epochs"] == 3


def test_mlflow_logs_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.MLFlowLogger", StandIn)
    made: Any = _logger("mlflow", TrainConfig(), Run(tmp_path / "photos"), 0)
    assert made.arguments == {
        "experiment_name": "kinfolk",
        "run_name": "photos",
        "save_dir": str(tmp_path / "photos" / "mlflow"),
    }
