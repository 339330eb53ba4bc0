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

from kinfolk.training import launch
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.launch import global_rank
from kinfolk.training.metrics_log import quiet_lightning
from kinfolk.training.run_folder import Run
from tests.faults.inject import as_ranks
from tests.ranks import exit_codes
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


def meet(environment: dict[str, str], number: int, act: str) -> None:
    """The trainings of one program on one rank; exits with 3 where rank zero has left it."""
    os.environ |= environment
    for turn in range(number):
        with launch.Rendezvous(int(environment["RANK"]), 2) as ranks:
            if environment["RANK"] == "0" and act == "fail":
                raise OSError("no data")
            if environment["RANK"] == "0" and act == "die":
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGKILL)
            if environment["RANK"] == "0":
                time.sleep(0.5)
                Path(environment["OUT"], str(turn)).touch()
                ranks.mark_ready()
                continue
            try:
                ranks.wait()
            except launch.RankLeftError as error:
                Path(environment["OUT"], "why").write_text(str(error))
                os._exit(3)
            assert Path(environment["OUT"], str(turn)).exists()
    if environment["RANK"] == "0":
        time.sleep(1)  # in a training the process group waits for the others


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("act", ["", "fail", "die"])
def test_the_others_wait_for_rank_zero(tmp_path: Path, act: str, launcher: str) -> None:
    own = {"OUT": str(tmp_path)}
    calls = [
        ({**environment, **own, "RANK": str(rank)}, 2, act)
        for rank, environment in enumerate(as_ranks(2, launcher))
    ]
    expected = {"": [0, 0], "fail": [1, 3], "die": [-signal.SIGKILL, 3]}[act]
    assert exit_codes(meet, calls) == expected
    if act:
        reason = {"fail": "rank zero has ended: no data", "die": "rank zero "}[act]
        assert (tmp_path / "why").read_text().startswith(reason)


def lose(environment: dict[str, str]) -> None:
    """Rank zero is killed in the middle of the training, while the other waits on its device."""
    os.environ |= environment
    launch.BEAT = launch.GRACE = 0.1
    with launch.Rendezvous(int(environment["RANK"]), 2) as ranks:
        if environment["RANK"] == "0":
            ranks.mark_ready()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.wait()
        time.sleep(100)


def test_a_rank_that_waits_on_its_device_ends_with_rank_zero() -> None:
    calls = [(environment,) for environment in as_ranks(2)]
    assert exit_codes(lose, calls) == [-signal.SIGKILL, 1]


def test_machines_that_a_person_starts_meet_at_their_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert launch._address() is None, "rank zero starts the others"
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launch._address() == ("node0", 29500)


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
