"""A training that was killed and resumed ends in the same bits as one that was not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as read_file

from kinfolk.errors import UsageError
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.children import OTHERS, few_images, run_child, training
from tests.training.small import assert_same


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return few_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(few: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted training."""
    return train(**training(tmp_path_factory.mktemp("whole") / "run", **few))


@pytest.mark.parametrize(
    ("moment", "each_step"),
    [
        ("kill folder 1", False),  # before the run folder is whole
        ("kill step 8", False),  # within an epoch, the checkpoint is at its beginning
        # the epoch's line is written, and half of another, its checkpoint is not
        ("kill line 2", False),
        ("kill step 10", True),  # at the last step of an epoch, which has its checkpoint
        ("kill writing 7", True),  # half of a checkpoint within an epoch is on the disk
    ],
)
def test_killed_and_resumed_is_the_same(
    tmp_path: Path, few: dict[str, Any], whole: Run, moment: str, each_step: bool
) -> None:
    out = tmp_path / "run"
    assert run_child(out, moment, each_step=each_step, **few) == -signal.SIGKILL
    run = train(**training(out, each_step=each_step, resume=True, **few))
    assert_same(run, whole)


def test_killed_again_and_again(tmp_path: Path, few: dict[str, Any], whole: Run) -> None:
    out = tmp_path / "run"
    for moment in ("kill writing 2", "kill step 2", "kill step 5", "kill line 1"):
        assert run_child(out, moment, each_step=True, resume=True, **few) == -signal.SIGKILL
    assert_same(train(**training(out, resume=True, **few)), whole)


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_a_training_stopped_by_a_signal_saves_within_the_epoch(
    tmp_path: Path, few: dict[str, Any], whole: Run, how: str
) -> None:
    out = tmp_path / "run"
    assert run_child(out, f"{how} step 7", **few) == 1
    state = read_checkpoint(Run(out).checkpoint)["kinfolk"]
    assert {key: state[key] for key in ("epoch", "step", "finished")} == {
        "epoch": 1,
        "step": 7,
        "finished": False,
    }
    assert_same(train(**training(out, resume=True, **few)), whole)


@pytest.mark.parametrize("name", OTHERS)
def test_queues_and_banks_go_on_where_they_were(
    tmp_path: Path, few: dict[str, Any], name: str
) -> None:
    out, given = tmp_path / "run", {**few, **OTHERS[name]}
    assert run_child(out, "kill step 8", each_step=True, **given) == -signal.SIGKILL
    run = train(**training(out, each_step=True, resume=True, **given))
    assert_same(run, train(**training(tmp_path / "whole", **given)))
    state = read_checkpoint(run.checkpoint)["state_dict"]
    kept = {
        "moco": {"slow.encoder.conv1.weight", "queue.ids", "queue.pointer"},
        "ir": {"bank.features", "draw.count"},
        "pcl": {
            "prototypes.clusters.labels",
            "prototypes.clusters.centroids",
            "prototypes.concentration",
            "prototypes.accepted",
            "draws",
        },
        "rcl": {
            "criteria.hierarchy.clusters.tree.parent",
            "criteria.hierarchy.started",
            "chance.count",
            "queue.ids",
            "slow.head.0.weight",
        },
        "spcl": {
            "assigned.clusters.labels",
            "assigned.clusters.centroids",
            "metric.head.0.weight",
            "prototype.head.weight",
            "seed",
            "draws",
        },
    }[name]
    assert {f"framework.{key}" for key in kept} <= state.keys()
    if name == "moco":
        assert torch.equal(
            read_file(run.model)["conv1.weight"], state["framework.encoder.conv1.weight"]
        ), "the queries' encoder"


def test_a_finished_run_is_left_alone(
    few: dict[str, Any], whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")}
    again = train(**training(whole.path, resume=True, progress=True, **few))
    assert again.epochs() == whole.epochs()
    assert {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")} == before
    assert "is finished after 3 epochs" in capsys.readouterr().err


def test_fewer_epochs_than_are_done_are_refused(few: dict[str, Any], whole: Run) -> None:
    with pytest.raises(
        UsageError,
        match=r"`epochs` \(=2\) is less than the 3 epochs that .* has done; leave `epochs`",
    ):
        train(**training(whole.path, resume=True, epochs=2, **few))
