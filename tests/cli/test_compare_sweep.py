"""`kinfolk sweep` hands its options on and shows the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.cli import main


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["sweep", *words])
    return int(left.value.code or 0)


def test_a_sweep_of_labelled_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 255, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2
    np.savez(
        tmp_path / "data.npz",
        x_train=images[:30],
        y_train=labels[:30],
        x_test=images[30:],
        y_test=labels[30:],
    )
    options = [
        "--data",
        str(tmp_path / "data.npz"),
        "--out",
        str(tmp_path / "sweep"),
        "--epochs",
        "1",
        "--no-report",
    ]
    assert (
        run(*options, "--set", "model.width=4", "--set", "optimizer.lr=0.1,0.2", "--seeds", "0,1")
        == 0
    )
    assert "lr 0.1" in capsys.readouterr().out
    assert len(list((tmp_path / "sweep").glob("*/seed-*"))) == 4


def test_seeds_are_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--data", "digits", "--out", str(tmp_path / "sweep"), "--seeds", "one") == 2
    assert "--seeds (=one) must be whole numbers" in capsys.readouterr().err
