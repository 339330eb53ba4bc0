"""Processes that end: killed at any moment, interrupted again and again, one of several ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from kinfolk.errors import UsageError
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.training import launch
from kinfolk.training.config import TrainConfig
from kinfolk.training.launch import resolve_trainer
from tests.faults.campaign import Tally, kills, rank_kills
from tests.faults.inject import as_ranks, in_children
from tests.faults.methods import METHODS
from tests.ranks import start


def test_every_framework_is_killed() -> None:
    images = set(FRAMEWORKS) - {"pairs"}
    assert {method.partition("+")[0] for method in METHODS} == images


def test_killed_at_random_moments(tmp_path: Path) -> None:
    tally = Tally()
    kills(3, random.Random(4), tmp_path, tally)
    assert tally.all_held


def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    tally = Tally()
    rank_kills(1, random.Random(0), tmp_path, tally)
    assert tally.all_held


def refused(data: str, out: str) -> None:
    from kinfolk.training.train import train

    train(data, out, batch_size=12, epochs=1, settings={"trainer.devices": 2}, progress=False)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_rank_zero_that_refuses_ends_the_others_at_once(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine", encoding="utf-8")
    calls = [
        (refused, ("digits", str(tmp_path / "run")), environment)
        for environment in as_ranks(2, launcher)
    ]
    start = time.monotonic()
    assert in_children(calls, patience=100) == [1, 1]
    assert time.monotonic() - start < 90
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_lost_rank_is_reported_in_a_sentence() -> None:
    text = (
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        " [127.0.0.1]:3171"
    )
    with (
        pytest.raises(
            launch.RankLeftError,
            match=r"another process of this training has ended.*; all is well$",
        ) as caught,
        launch.explain_lost_ranks(lambda: "all is well"),
    ):
        raise RuntimeError(text)
    assert "gloo" not in str(caught.value)
    with pytest.raises(RuntimeError, match="shapes differ"), launch.explain_lost_ranks(lambda: ""):
        raise RuntimeError("shapes differ")


def test_synchronised_batchnorm_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match=r"`trainer\.sync_batchnorm` \(=true\) needs GPUs"):
        resolve_trainer(
            TrainConfig()
            .with_settings(
                {"trainer.sync_batchnorm": True, "trainer.accelerator": "cpu", "trainer.devices": 2}
            )
            .trainer
        )


def command_line(log: str, words: list[str]) -> None:
    """`kinfolk`, with its messages in a file."""
    from kinfolk.cli import main

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    main(words)


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_exits_130(tmp_path: Path, times: int) -> None:
    """However often it is pressed: the process is asked as soon as it has begun its steps."""
    log, words = tmp_path / "log", ["train", "--data", "digits", "--out", str(tmp_path / "run")]
    words += ["--epochs", "500", "--model", "resnet10", "--no-report"]
    for setting in ("model.width=4", "knn.every=0", "trainer.loggers=[]"):
        words += ["--set", setting]
    child = start(command_line, str(log), words)
    assert child.pid is not None
    while not (log.exists() and "epoch 1/" in log.read_text(encoding="utf-8")):
        assert child.is_alive()
        time.sleep(0.02)
    for _ in range(times):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.02)
    child.join()
    said = log.read_text(encoding="utf-8")
    assert child.exitcode == 130, said
    assert "press Ctrl-C again to end at once" in said, "it is acknowledged at once"
    assert "Interrupted: the training was ended" in said
    assert "Traceback" not in said
