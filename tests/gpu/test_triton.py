"""The block function of every loss, compiled for a GPU that is not there.

Inductor generates Triton for `cuda:0`; Triton's interpreter runs it and the results equal eager
ones, with one graph for all batch sizes; Triton and ptxas compile it for sm_80 and sm_90. Nothing
was run on a GPU. `make test` tries a few losses where Triton is installed, `make gpu-check` all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.cases import CASES, FEW
from tests.pretended.device import AVAILABLE

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the device guard needs g++")

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("KINFOLK_GPU_CHECK") == "1"
TOLERANCE = 1e-5
SPILLED = 256
"""Bytes that a thread may spill at the most: 64 registers."""


def run(name: str, *options: str, **environment: str) -> Any:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    given = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.run_cases", *options, name]
    ended = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("name", CASES if ALL else FEW)
def test_interpreted_triton_equals_eager(name: str) -> None:
    found = run(name, TRITON_INTERPRET="1")
    assert found["graphs"] == 1, "one graph of each direction for all batch sizes"
    assert found["launches"] > 0
    assert max(found["loss"], found["gradient"], found["state"]) < TOLERANCE, found


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("name", CASES if ALL else FEW[:1])
def test_it_compiles_without_large_spills(name: str, arch: str) -> None:
    found = run(name, ARCH=arch, TRITON_INTERPRET="0")
    assert found["kernels"] > 0
    assert found["spilled"] <= SPILLED, found


def test_a_wrong_multiplication_is_noticed() -> None:
    found = run("NTXent", "--fault", TRITON_INTERPRET="1")
    assert max(found["loss"], found["gradient"]) > 100 * TOLERANCE, found
