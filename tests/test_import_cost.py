"""`import kinfolk` and its losses must cost hardly more than `import torch`: checked by what is
loaded.

benchmarks/import_time.py measures the time.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import kinfolk
verbs = ("audit", "compare", "embed", "evaluate", "export", "load", "sweep", "train")
losses = [getattr(kinfolk, name) for name in kinfolk.__all__ if name not in verbs]  # public names are loaded when asked for
print(json.dumps(sorted(set(sys.modules) - before)))
"""  # noqa: E501
HEAVY = {
    "lightning",
    "faiss",
    "sklearn",
    "scipy",
    "plotly",
    "pandas",
    "pyarrow",
    "PIL",
    "pydantic",
    "rich",
    "typer",
    "yaml",
    "torchvision",
}
# modules beyond torch's own and kinfolk's; `import torch` alone loads some two thousand
AT_MOST = 60


@pytest.fixture(scope="module")
def added() -> list[str]:
    """Every module that `import kinfolk` and its public names load after `import torch`, in a fresh
    interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return list(json.loads(result.stdout))


def test_the_losses_are_loaded(added: list[str]) -> None:
    assert {"kinfolk.objectives.ntxent", "kinfolk.detectors.glofnd"} <= set(added)


def test_nothing_heavy_is_loaded(added: list[str]) -> None:
    assert not {name.partition(".")[0] for name in added} & HEAVY


def test_only_torch_and_the_standard_library_are_used(added: list[str]) -> None:
    assert {name.partition(".")[0] for name in added} - {
        "kinfolk",
        "torch",
        "numpy",
    } <= sys.stdlib_module_names


def test_few_modules_are_loaded(added: list[str]) -> None:
    others = [name for name in added if name.partition(".")[0] != "kinfolk"]
    assert len(others) <= AT_MOST, others
