"""Every example runs to its end and learns; where a peer is missing it says so."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PEERS = {"lightly_loop": "lightly"}
LOOPS = ["plain_pytorch", "lightning_loop", "lightly_loop", "sentence_embeddings", "image_text"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def losses(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\S+)", printed)]


@pytest.mark.parametrize("name", LOOPS)
def test_runs(name: str) -> None:
    peer = PEERS.get(name)
    if peer is not None and importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    result = run(name)
    assert result.returncode == 0, result.stderr
    values = losses(result.stdout)
    assert values, result.stdout
    assert all(value == value for value in values), "a loss is not a number"
    assert len(values) == 1 or values[-1] < values[0], "the loss does not fall"


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_peer_is_named(name: str) -> None:
    if importlib.util.find_spec(PEERS[name]) is not None:
        pytest.skip(f"{PEERS[name]} is installed")
    result = run(name)
    assert result.returncode == 1
    assert f"pip install {PEERS[name]}" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LOOPS, "demo_table"}


def test_examples_are_short() -> None:
    too_long = [path.name for path in EXAMPLES.glob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) >= 60]
    assert not too_long


def test_the_demo_ends_with_a_table(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for protocol, accuracy in (("knn", 0.9), ("linear", 0.85)):
        (tmp_path / "eval" / f"{protocol}.json").write_text(json.dumps({"protocol": protocol, "accuracy": accuracy}))
    lines = [{"epoch": epoch, "precision": precision, "recall": 0.5, "f1": 0.55} for epoch, precision in enumerate((0.1, 0.625))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("demo_table", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert re.findall(r"\S+%", result.stdout) == ["90.0%", "85.0%", "62.5%", "50.0%", "55.0%"]
    assert str(tmp_path / "report.html") in result.stdout
