"""The script for the first hour on a GPU also runs on a CPU, and notices what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.loading import load

ROOT = Path(__file__).parents[2]
gpu_hour = load("gpu_hour")


def run(tmp_path: Path, only: str) -> tuple[int, str]:
    out = tmp_path / "gpu-hour.md"
    given = {
        "QUICK": "1",
        "ONLY": only,
        "PYTHON": sys.executable,
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


def test_ranks_and_resume_on_a_cpu(tmp_path: Path) -> None:
    code, page = run(tmp_path, "ranks resume")
    assert code == 0, page
    assert "2 ranks, gloo" in page
    assert page.count("| equal |") == len(gpu_hour.LOSSES)
    assert "ended by -9, resumed" in page
    assert "The losses differ by 0.0e+00" in page
    assert page.count("\npassed after ") == 2


def test_a_check_that_fails_is_marked_and_other_files_stay(tmp_path: Path) -> None:
    other = tmp_path / "work" / "thesis.txt"
    other.parent.mkdir()
    other.write_text("mine", encoding="utf-8")
    code, page = run(tmp_path, "unknown")
    assert other.exists()
    assert code == 1
    assert "**FAILED**" in page


def test_a_wrong_result_is_called_different(capsys: pytest.CaptureFixture[str]) -> None:
    loss_fn = gpu_hour.LOSSES["NTXentLoss"](False)
    right = gpu_hour.run_steps(loss_fn, torch.device("cpu"), 8, slice(None), steps=2)
    wrong = [(loss * 1.001, gradient) for loss, gradient in right]
    assert gpu_hour.compare("same", right, right, (loss_fn, loss_fn), 2e-5)
    assert not gpu_hour.compare("other", wrong, right, (loss_fn, loss_fn), 2e-5)
    assert "DIFFERENT" in capsys.readouterr().out


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
