"""The script for the first hour on a GPU also runs on a CPU, and notices what differs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from tests.benchmarks.loading import load
from tests.ranks import run_program, start

ROOT = Path(__file__).parents[2]
gpu_hour = load("gpu_hour")


def run(tmp_path: Path, only: str, python: str = sys.executable) -> tuple[int, str]:
    out = tmp_path / "gpu-hour.md"
    given = {
        "QUICK": "1",
        "ONLY": only,
        "PYTHON": python,
        "OUT": str(out),
        "WORK": str(tmp_path / "work"),
    }
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {
        **os.environ,
        **given,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(
        ["sh", "benchmarks/gpu_hour.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
    )
    return ended.returncode, out.read_text(encoding="utf-8")


def commands(tmp_path: Path, only: str) -> list[list[str]]:
    """The arguments that the shell script gives to Python for these checks, by a stand-in for the
    interpreter that writes them down."""
    stand_in, written = tmp_path / "python", tmp_path / "commands"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {written}\n', encoding="utf-8")
    stand_in.chmod(0o755)
    code, page = run(tmp_path, only, str(stand_in))
    assert code == 0, page
    assert page.count(" | passed | ") == page.count("\n## ") == len(only.split())
    machine, *others = (line.split() for line in written.read_text(encoding="utf-8").splitlines())
    assert machine == ["benchmarks/gpu_hour.py", "machine"]
    return others


def rank_of(environment: dict[str, str], words: list[str]) -> None:
    """One rank of the script, as torchrun starts it."""
    os.environ.update(environment)
    sys.argv = words
    load("gpu_hour").main()


def test_two_ranks_equal_one_process_on_a_cpu(tmp_path: Path) -> None:
    (words,) = commands(tmp_path, "ranks")
    script = words.index("benchmarks/gpu_hour.py")
    assert words[:script] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    meeting |= {"CUDA_VISIBLE_DEVICES": ""}
    other = start(rank_of, {**meeting, "RANK": "1", "LOCAL_RANK": "1"}, words[script:])
    ended = run_program(
        rank_of, tmp_path, {**meeting, "RANK": "0", "LOCAL_RANK": "0"}, words[script:]
    )
    other.join()
    assert (ended.code, other.exitcode) == (0, 0), ended.err
    assert "2 ranks with gloo against one process: batch 32" in ended.out
    assert ended.out.count("| equal |") == len(gpu_hour.LOSSES)
    rows = [line.split(" | ") for line in ended.out.splitlines() if "GloFND" in line]
    assert all(int(row[4]) > 0 for row in rows), "the detectors flag something"


def command_line(log: str, words: list[str]) -> None:
    """`python -m kinfolk` in a session that can be killed as a whole."""
    from kinfolk.cli import main

    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(words)


class Forked:
    """Stands for `subprocess.Popen`, and starts in a fork what would import torch anew."""

    def __init__(self, command: list[str], stdout: IO[bytes], **more: object) -> None:
        assert command[:3] == [sys.executable, "-m", "kinfolk"]
        assert more == {"stderr": subprocess.STDOUT, "start_new_session": True}
        self.process = start(command_line, stdout.name, command[3:])
        self.pid = self.process.pid
        stdout.close()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


def test_a_killed_and_resumed_training_equals_one_never_killed_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (words,) = commands(tmp_path, "resume")
    monkeypatch.setattr(sys, "argv", words)
    popen = SimpleNamespace(Popen=Forked, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(gpu_hour, "subprocess", popen)
    with pytest.raises(SystemExit) as left:
        gpu_hour.main()
    page = capsys.readouterr().out
    assert left.value.code == 0, page
    assert "ended with -9, resumed" in page
    assert "The losses differ by 0.0e+00" in page


def test_a_check_that_fails_is_marked_and_other_files_stay(tmp_path: Path) -> None:
    other = tmp_path / "work" / "thesis.txt"
    other.parent.mkdir()
    other.write_text("mine", encoding="utf-8")
    code, page = run(tmp_path, "unknown")
    assert other.exists()
    assert code == 1
    assert " | **FAILED** | " in page


def test_the_page_is_complete_after_each_check(tmp_path: Path) -> None:
    """The result of each check stands at the top, and again in its section."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$2"; [ "$2" != table ]\n', encoding="utf-8")
    stand_in.chmod(0o755)
    code, page = run(tmp_path, "compile table", str(stand_in))
    assert code == 1
    parts = [line for line in page.splitlines() if line.startswith(("#", "| C", "| T"))]
    assert [part.rpartition(" | ")[0] or part for part in parts] == [
        "# First run on a GPU",
        "| Compiled and eager | passed",
        "| Time and peak memory of a loss | **FAILED**",
        "## Compiled and eager",
        "## Time and peak memory of a loss",
    ]


def test_a_wrong_result_is_called_different(capsys: pytest.CaptureFixture[str]) -> None:
    loss_fn = gpu_hour.LOSSES["NTXentLoss"](False)
    right = gpu_hour.run_steps(loss_fn, torch.device("cpu"), 8, slice(None), steps=2)
    wrong = [step._replace(loss=step.loss * 1.001) for step in right]
    assert gpu_hour.compare("same", right, right, (loss_fn, loss_fn))
    assert not gpu_hour.compare("other", wrong, right, (loss_fn, loss_fn))
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flips", "factor", "equal"),
    [(0, 1.001, False), (1, 1.001, True), (1, 1.1, False), (5, 1.001, False)],
)
def test_a_candidate_at_a_threshold_may_be_flagged_or_not(
    flips: int, factor: float, equal: bool
) -> None:
    loss_fn = gpu_hour.LOSSES["NTXentLoss"](False)
    one = gpu_hour.Step(torch.tensor(1.0), torch.ones(2), torch.tensor(20_000))
    other = one._replace(gradient=factor * one.gradient, flagged=one.flagged + flips)
    assert gpu_hour.compare("flipped", [other], [one], (loss_fn, loss_fn)) is equal


def test_the_machine_is_described(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(name="NVIDIA A100", total_memory=80 << 30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_hour.machine()
    page = capsys.readouterr().out
    assert "| GPU 1 | NVIDIA A100, 80 GB, sm_80 |" in page
    assert "| CUDA | 13.0 |" in page
    assert "| cuDNN, NCCL | 92000, 2.29.7 |" in page


def test_time_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_hour, "LOSSES", {"NTXentLoss": lambda compiles: gpu_hour.kf.NTXentLoss(temperature=0.1)}
    )
    assert gpu_hour.table([8], repeats=1)
    page = capsys.readouterr().out
    assert "| NTXentLoss | 8 |" in page
    assert "nan" not in page


class Ended:
    """A training that writes its epochs at once and is already over, with this exit code."""

    def __init__(self, folder: Path, epochs: int, code: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0}\n' * epochs)
        self.code = code

    def poll(self) -> int:
        return self.code

    wait = poll


@pytest.mark.parametrize(
    ("code", "done"), [(0, 2), (1, 0), (-9, 2)], ids=["complete", "failed", "killed too late"]
)
def test_a_training_that_was_not_killed_in_time_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    done: int,
) -> None:
    def train(folder: Path, epochs: int, *more: str) -> Ended:
        assert "--resume" not in more
        return Ended(folder, epochs, 0) if folder.name == "whole" else Ended(folder, done, code)

    monkeypatch.setattr(gpu_hour, "train", train)
    assert not gpu_hour.resume(tmp_path, 2, [])
    page = capsys.readouterr().out
    assert "**NOT KILLED IN TIME**" in page
    assert f"ended with {code} after {done} of 2 epochs" in page
