"""Every example runs to its end and learns; where a peer is missing it says so."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
PEERS = {"lightly_loop": "lightly"}


def script(name: str, arguments: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    sys.argv = [f"{name}.py", *arguments]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def last_figures(printed: str) -> dict[str, float]:
    """The names and numbers of the last line."""
    return {
        name: float(value)
        for name, value in re.findall(r"([a-z]+) (-?[\d.]+|nan)", printed.splitlines()[-1])
    }


LEARNT: dict[str, dict[str, tuple[float, float]]] = {
    # a tenth are kin
    "plain_pytorch": {"loss": (-0.5, -0.2), "flagged": (0.04, 0.06), "precision": (0.4, 0.7)},
    "lightning_loop": {"loss": (2.0, 3.5), "flagged": (0.019, 0.021)},  # 5.5 before the training
    # the tenth that is nearest, of a quarter
    "sentence_embeddings": {"precision": (0.95, 1.0), "recall": (0.35, 0.5)},
    "image_text": {"loss": (0.0, 0.05), "temperature": (0.08, 0.099), "flagged": (0.005, 0.02)},
    "lightly_loop": {"loss": (2.0, 5.0), "flagged": (0.019, 0.021)},
}
"""What the last line of each loop must say: bounds that nothing untrained meets."""


@pytest.mark.parametrize("name", LEARNT)
def test_it_runs_and_learns(name: str, tmp_path: Path) -> None:
    peer = PEERS.get(name)
    if peer is not None and importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    ended = run_program(script, tmp_path, name, ())
    assert ended.code == 0, ended.err
    figures = last_figures(ended.out)
    for figure, (low, high) in LEARNT[name].items():
        assert low <= figures[figure] <= high, ended.out


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_peer_is_named(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PEERS[name]) is not None:
        pytest.skip(f"{PEERS[name]} is installed")
    ended = run_program(script, tmp_path, name, ())
    assert ended.code == 1
    assert f"pip install {PEERS[name]}" in ended.err
    assert "Traceback" not in ended.err


def test_every_example_is_tested() -> None:
    others = {"demo_table", "folder_to_decision"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LEARNT, *others}


def test_examples_are_short() -> None:
    too_long = [
        path.name
        for path in EXAMPLES.glob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) >= 80
    ]
    assert not too_long


def test_a_folder_leads_to_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for number in range(24):
        place = tmp_path / "photos" / f"class {number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    ended = run_program(script, tmp_path, "folder_to_decision", ("photos", "1"))
    assert ended.code == 0, ended.err
    assert "47.8% of all pairs are false negatives, by the labels." in ended.out
    assert len(re.findall(r"^simclr\S* +kNN [\d.]+ ± [\d.]+$", ended.out, re.MULTILINE)) == 3
    assert re.search(r"^Decision: simclr", ended.out, re.MULTILINE)
    assert (tmp_path / "decision" / "compare.html").is_file()


def test_the_demo_ends_with_both_runs_side_by_side(tmp_path: Path) -> None:
    """The run without a detector has no figures of false negatives."""
    for name, accuracies, detection in (
        ("base", {"knn": 0.9, "linear": 0.85}, {}),
        ("run", {"knn": 0.92, "linear": 0.84}, {"precision": 0.625, "recall": 0.5, "f1": 0.55}),
    ):
        (tmp_path / name / "eval").mkdir(parents=True)
        for protocol, accuracy in accuracies.items():
            (tmp_path / name / "eval" / f"{protocol}.json").write_text(
                json.dumps({"protocol": protocol, "accuracy": accuracy})
            )
        lines = [{"epoch": 0, "knn": 0.1, "precision": 0.1}, {"epoch": 1, "knn": 0.2, **detection}]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    ended = run_program(
        script, tmp_path, "demo_table", (str(tmp_path / "base"), str(tmp_path / "run"))
    )
    assert ended.code == 0, ended.err
    assert re.findall(r"\S+%", ended.out) == (
        ["90.0%", "92.0%", "85.0%", "84.0%", "62.5%", "50.0%", "55.0%"]
    )
    assert re.findall(r" ([+-]\d\S+)", ended.out) == ["+2.0", "-1.0"]
    for page in ("report.html", "compare.html"):
        assert str(tmp_path / "run" / page) in ended.out
