"""Several processes: one training, one folder, and the same exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinfolk.errors import KinfolkError
from kinfolk.training import launch
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.launch import global_rank
from kinfolk.training.run_folder import Run
from tests.training.children import OTHERS, run_ranks
from tests.training.small import assert_same


@pytest.mark.parametrize("more", [{}, OTHERS["moco"]], ids=["sogclr+glofnd", "moco+glofnd"])
def test_two_ranks_interrupted_and_resumed_are_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    whole, out = Run(tmp_path / "whole"), Run(tmp_path / "run")
    assert run_ranks(whole.path, "", "", **more) == [0, 0]
    assert run_ranks(out.path, "", "terminate step 7", **more) == [1, 1], "the signal to one rank ends both"
    assert read_checkpoint(out.checkpoint)["kinfolk"]["step"] == 7
    assert run_ranks(out.path, "", "", resume=True, **more) == [0, 0]
    assert_same(out, whole)
    assert len(whole.epochs()) == 3, "only rank zero writes"


def test_the_others_wait_for_rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status_file = tmp_path / ".launch"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(KinfolkError, match="rank zero has not written"):
        launch.wait_for_rank_zero(status_file, first_sign=0.2)
    launch.mark_ready(status_file)
    launch.wait_for_rank_zero(status_file, first_sign=0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    with pytest.raises(KinfolkError):
        launch.wait_for_rank_zero(status_file, first_sign=0.2)  # the status_file of an earlier launch does not count


def test_machines_that_a_person_starts_meet_at_their_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status_file = tmp_path / ".launch"
    for name in (launch.LAUNCH, "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launch.mark_ready(status_file)
    monkeypatch.setenv("NODE_RANK", "1")
    launch.wait_for_rank_zero(status_file, first_sign=0.2)
    monkeypatch.setenv(launch.LAUNCH, "another")  # a process that rank zero has started goes by the name it was given
    with pytest.raises(KinfolkError):
        launch.wait_for_rank_zero(status_file, first_sign=0.2)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 3),
        ({"LOCAL_RANK": "1", "NODE_RANK": "2"}, 9),
        ({"NODE_RANK": "2"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}, 5),
    ],
)
def test_the_rank_is_read_off_the_environment(environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert global_rank(devices=4) == rank
