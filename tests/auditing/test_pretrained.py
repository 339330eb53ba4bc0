"""Images embedded by a model of timm, with a stand-in for the package: the whole way of `audit
--encoder` and `advise --guide`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.cli import main
from tests.cli.test_audit import image_folder
from tests.training.test_guides import timm  # noqa: F401, the fixture


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize(("command", "option"), [("audit", "--encoder"), ("advise", "--guide")])
def test_images_are_embedded_by_a_model_of_timm(
    command: str,
    option: str,
    timm: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photos = image_folder(tmp_path / "photos", 24)
    out = tmp_path / "out"
    assert run(command, photos, option, "timm/colours", "--out", out, "--alpha", "0.1") == 0
    assert timm.made == [("colours", True, 0)], (
        "with the published weights and without the classifier"
    )
    said = capsys.readouterr().out
    assert "Features by timm/colours with its pretrained weights." in " ".join(said.split())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["samples"] == 24
    assert not (out / "encoder").exists(), "nothing was trained"
    for line in said.splitlines():
        if line.startswith("  kinfolk train") and "--guide" in line:
            assert shlex.split(line)[shlex.split(line).index("--guide") + 1] == "timm/colours"


def test_a_wrong_name_and_a_missing_package_are_said(
    timm: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photos = image_folder(tmp_path / "photos", 24)
    assert run("audit", photos, "--encoder", "timm/colors", "--out", tmp_path / "out") == 2
    assert "did you mean colours" in capsys.readouterr().err
    assert run("audit", photos, "--encoder", "open_clip/RN50", "--out", tmp_path / "out") == 2
    assert "pip install" in capsys.readouterr().err


def test_the_next_command_trains_with_the_same_features(
    timm: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Colours in six clear groups: the model is a good guide, and the advised command runs as
    printed."""
    colours = np.asarray(
        [
            [240, 20, 20],
            [20, 240, 20],
            [20, 20, 240],
            [240, 240, 20],
            [20, 240, 240],
            [240, 20, 240],
        ]
    )
    shades = colours[np.arange(96) % 6]
    pixels = shades[:, None, None] + np.random.default_rng(0).integers(-9, 9, (96, 8, 8, 3))
    np.savez(tmp_path / "data.npz", images=pixels.astype(np.uint8))
    assert (
        run(
            "advise",
            tmp_path / "data.npz",
            "--guide",
            "timm/colours",
            "--out",
            tmp_path / "out",
            "--alpha",
            "0.1",
        )
        == 0
    )
    (command,) = (line for line in capsys.readouterr().out.splitlines() if "+guide:attract" in line)
    words = shlex.split(command)
    assert words[words.index("--guide") + 1] == "timm/colours"
    words[words.index("--out") + 1] = str(tmp_path / "run")
    assert run(*words[1:], "--epochs", "1", "--set", "model.width=4", "--no-report") == 0
