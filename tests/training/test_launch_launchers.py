"""Two processes end in the same metrics however they are started: by the command line, by torchrun
on one node, and on two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kinfolk.training.run_folder import Run
from tests.faults.inject import as_ranks, in_children
from tests.training.children import few_images
from tests.training.small import BARE

SETTINGS: dict[str, Any] = {**BARE, "detector.alpha": 0.05, "trainer.accelerator": "cpu"}


def trained(data: str, out: str, devices: int, nodes: int) -> None:
    import torch

    from kinfolk.training.train import train

    torch.set_num_threads(1)
    settings = {**SETTINGS, "trainer.devices": devices, "trainer.num_nodes": nodes}
    train(
        data,
        out,
        method="sogclr+glofnd",
        epochs=1,
        batch_size=32,
        settings=settings,
        progress=False,
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    timing = ("seconds", "refresh_seconds", "images_per_second")
    rows = [
        {key: value for key, value in row.items() if key not in timing} for row in Run(out).epochs()
    ]
    assert len(rows) == 1
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(few_images(tmp_path_factory.mktemp("data"))["data"])


@pytest.fixture(scope="module")
def one_node(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes on one node, with the environment that torchrun gives them."""
    out: Path = tmp_path_factory.mktemp("one") / "run"
    assert in_children(
        [(trained, (data, str(out), 2, 1), environment) for environment in as_ranks(2)],
        patience=200,
    ) == [0, 0]
    return metrics(out)


def test_two_nodes_of_one_process(
    tmp_path: Path, data: str, one_node: list[dict[str, Any]]
) -> None:
    nodes = [
        {**environment, "GROUP_RANK": str(node), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for node, environment in enumerate(as_ranks(2))
    ]
    assert in_children(
        [(trained, (data, str(tmp_path / "run"), 1, 2), environment) for environment in nodes],
        patience=200,
    ) == [0, 0]
    assert metrics(tmp_path / "run") == one_node


def test_the_command_is_started_again_for_the_other_rank(
    tmp_path: Path, data: str, one_node: list[dict[str, Any]]
) -> None:
    """Lightning starts the script of this process once more. `kinfolk` is such a script, and so is
    a user's own."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, pathlib, torch
from kinfolk.cli import main
torch.set_num_threads(1)
try:
    main()
finally:
    pathlib.Path(f"ended as rank {os.environ.get('LOCAL_RANK', 0)}").touch()
""",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        str(script),
        "train",
        "--data",
        data,
        "--out",
        "run",
        "--method",
        "sogclr+glofnd",
    ]
    command += ["--epochs", "1", "--batch-size", "32", "--no-report"]
    for name, value in {**SETTINGS, "trainer.devices": 2}.items():
        command += ["--set", f"{name}={value}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run") == one_node
    assert sorted(path.name for path in tmp_path.glob("ended *")) == [
        "ended as rank 0",
        "ended as rank 1",
    ]
    assert done.stderr.count("epoch 1/1") == 1, "only rank zero writes"
