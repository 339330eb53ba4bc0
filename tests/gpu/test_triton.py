"""The block function of every loss, compiled for a GPU that is not there.

Inductor generates Triton for `cuda:0`; Triton's interpreter runs it and the results equal eager
ones, with one graph for all batch sizes; Triton and ptxas compile it for sm_80 and sm_90. Nothing
was run on a GPU. `make test` tries a few losses where Triton is installed, `make gpu-check` all.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.cases import CASES, FEW
from tests.gpu.conftest import WORST
from tests.pretended.device import AVAILABLE

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the device guard needs g++"),
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="replaces internals of torch 2.13"
    ),
]

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("KINFOLK_GPU_CHECK") == "1"
TOLERANCE = 1e-5
SPILLED = 256
"""Bytes that a thread may spill at the most: 64 registers."""


@functools.cache
def run(names: tuple[str, ...], *options: str, **environment: str) -> dict[str, Any]:
    """What the cases showed, by name. One process runs them all: importing torch takes longer than
    most cases."""
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.run_cases", *options, *names]
    ended = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    return {row["name"]: row for row in rows}


Record = Callable[[str, object], None]


def shown(found: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in found, found["error"]
    return found


INTERPRETED = tuple(CASES) if ALL else FEW
COMPILED = tuple(CASES) if ALL else FEW[:1]


class TestInterpreted:
    """One class for each process of `run`: pytest-xdist keeps the tests of a class on one worker
    (`--dist loadscope`), so that no case runs twice."""

    @pytest.mark.parametrize("name", INTERPRETED)
    def test_interpreted_triton_equals_eager(self, name: str, record_property: Record) -> None:
        found = shown(run(INTERPRETED, TRITON_INTERPRET="1")[name])
        differs = max(found["loss"], found["gradient"], found["state"])
        record_property(f"{WORST}difference to eager", (differs, name))
        assert found["graphs"] == 1, "one graph of each direction for all batch sizes"
        assert found["launches"] > 0
        assert found["flags"] == 0
        assert differs < TOLERANCE, found

    def test_a_wrong_multiplication_is_noticed(self) -> None:
        found = shown(run(("NTXent",), "--fault", TRITON_INTERPRET="1")["NTXent"])
        assert max(found["loss"], found["gradient"]) > 100 * TOLERANCE, found


def check_compiled(name: str, arch: str, record_property: Record) -> None:
    found = shown(run(COMPILED, ARCH=arch, TRITON_INTERPRET="0")[name])
    record_property(f"{WORST}bytes spilled, sm_{arch}", (found["spilled"], name))
    assert found["kernels"] > 0
    assert found["spilled"] <= SPILLED, found


class TestCompiledForSm80:
    @pytest.mark.parametrize("name", COMPILED)
    def test_it_compiles_without_large_spills(self, name: str, record_property: Record) -> None:
        check_compiled(name, "80", record_property)


class TestCompiledForSm90:
    @pytest.mark.parametrize("name", COMPILED)
    def test_it_compiles_without_large_spills(self, name: str, record_property: Record) -> None:
        check_compiled(name, "90", record_property)
