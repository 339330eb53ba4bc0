"""The script that counts the launches of a training step runs, and its table on the page has every framework."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kinfolk.frameworks import FRAMEWORKS
from tests.pretended.device import AVAILABLE

ROOT = Path(__file__).parents[2]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("launches", ROOT / "benchmarks" / "launches.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launches = load()


@pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
@pytest.mark.parametrize("method", ["simclr+glofnd", "clip"])
def test_a_step_is_counted(method: str) -> None:
    number, waits = launches.count(method, {})
    assert waits == 0
    assert 100 < number < 500, "less than the 775 and 687 of before"


@pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
def test_a_compiled_call_has_fewer_launches() -> None:
    """Of a compiler that would fuse each function into one kernel; the benchmark asks the real one."""
    make, labelled = launches.loss_calls()["NTXent + GloFND"]
    eager = launches.call(make, labelled, compiles=False, device=True)
    with patch.object(launches, "groups_of", lambda *_: {"track": 1, "_weighed": 1}):
        compiled = launches.compiled_call(make, labelled)
    assert eager[1] == compiled[1] == 0
    assert compiled[0] < eager[0] - 20


def test_the_table_has_every_framework() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| [0-9,–]+ → [0-9,]+ \|", page, re.MULTILINE)
    assert rows == list(launches.FRAMEWORKS)
    assert set(rows) == set(FRAMEWORKS)
