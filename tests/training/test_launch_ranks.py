"""Several processes: one training, one folder, and the same exactness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kinfolk.errors import KinfolkError
from kinfolk.training import launch
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.launch import global_rank
from kinfolk.training.metrics_log import quiet_lightning
from kinfolk.training.run_folder import Run
from tests.ranks import exit_codes, run_program
from tests.training.children import OTHERS, few_images, run_ranks
from tests.training.small import assert_same


@pytest.mark.parametrize("more", [{}, OTHERS["moco"]], ids=["sogclr+glofnd", "moco+glofnd"])
def test_two_ranks_interrupted_and_resumed_are_the_same(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    whole, out, more = Run(tmp_path / "whole"), Run(tmp_path / "run"), few_images(tmp_path) | more
    assert run_ranks(whole.path, "", "", **more) == [0, 0]
    assert run_ranks(out.path, "", "terminate step 7", **more) == [
        1,
        1,
    ], "the signal to one rank ends both"
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
        # the status_file of an earlier launch does not count
        launch.wait_for_rank_zero(status_file, first_sign=0.2)


def test_machines_that_a_person_starts_meet_at_their_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_file = tmp_path / ".launch"
    for name in (launch.LAUNCH, "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launch.mark_ready(status_file)
    monkeypatch.setenv("NODE_RANK", "1")
    launch.wait_for_rank_zero(status_file, first_sign=0.2)
    # a process that rank zero has started goes by the name it was given
    monkeypatch.setenv(launch.LAUNCH, "another")
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
def test_the_rank_is_read_off_the_environment(
    environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_JOB_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert global_rank(devices=4) == rank


@pytest.fixture
def named_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun calls every launch that is given no name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


@pytest.mark.usefixtures("named_none")
def test_a_killed_launch_of_the_same_name_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed half a minute ago, so its files are still there."""
    status_file = tmp_path / ".launch"
    monkeypatch.setattr(launch, "_pid_file", lambda: tmp_path / "pid")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with monkeypatch.context() as earlier:
        earlier.setattr(os, "getpid", lambda: gone.pid)
        launch.register_rank_zero(0, several=True)
        launch.mark_ready(status_file)
    before = launch._process_start() - 30
    for path in (status_file, tmp_path / "pid"):
        os.utime(path, (before, before))
    with pytest.raises(KinfolkError, match="rank zero has not written"):
        launch.wait_for_rank_zero(status_file, first_sign=0.2)
    launch.mark_ready(status_file)  # the new rank zero
    launch.wait_for_rank_zero(status_file, first_sign=0.2)


def print_age() -> None:
    print(time.time() - launch._process_start())  # noqa: T201


def test_the_start_of_a_process_is_known(tmp_path: Path) -> None:
    assert -0.1 < float(run_program(print_age, tmp_path).out) < 60


def lost(terminated: bool) -> None:
    """A collective fails because another rank has ended; torchrun's SIGTERM arrives while Lightning
    cleans up."""

    def training() -> None:
        with as_if_training():
            try:
                raise RuntimeError("[gloo] Connection closed by peer")
            finally:
                if terminated:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        launch.RankLeftError, match=r"another process of this training has ended.*; all is saved"
    ):
        training()
    os.kill(os.getpid(), signal.SIGTERM)  # and once more, while the message is printed


def as_if_training() -> Any:
    return launch.explain_lost_ranks(lambda: "all is saved")


def finished() -> None:
    with as_if_training():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def terminated() -> None:
    with as_if_training():
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_does_not_cut_off_the_message_of_a_lost_rank() -> None:
    assert exit_codes(lost, [(True,), (False,)]) == [0, 0]
    assert exit_codes(finished, [()]) == [-signal.SIGTERM], "the usual handler is back"
    assert exit_codes(terminated, [()]) == [-signal.SIGTERM], (
        "before the first step SIGTERM ends the process"
    )


def test_a_child_that_has_ended_is_reported_before_lightning_kills(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On GPUs rank zero would wait in a collective, until Lightning kills it."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    with (
        subprocess.Popen(sleep) as child,
        subprocess.Popen(sleep) as main,
        quiet_lightning(),
    ):
        child.kill()
        child.wait()
        assert _ChildProcessObserver(main.pid, [child])._run()
    assert main.returncode == -signal.SIGKILL
    assert "terminated with code -9" in caplog.text
