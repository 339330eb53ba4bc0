"""Trainings with a ring: its bounds move at every step, and what steers it never sees the test
split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.small import SMALL


def images(path: Path, test: str = "test", test_seed: int = 0, val: bool = False) -> Path:
    """64 training images of two classes; the labels of the test split depend on `test_seed`, those
    of a validation split do not."""
    random = np.random.default_rng(0)
    y = np.arange(96) % 2
    x = (random.integers(0, 256, (96, 8, 8, 3)) // (1 + 3 * y[:, None, None, None])).astype(
        np.uint8
    )
    parts: dict[str, Any] = {"x_train": x[:64], "y_train": y[:64]}
    parts |= {
        f"x_{test}": x[64:80],
        f"y_{test}": np.random.default_rng(test_seed).permutation(y[64:80]),
    }
    if val:
        parts |= {"x_val": x[80:], "y_val": y[80:]}
    np.savez(path, **parts)
    return path


def ring(data: Path, out: Path, epochs: int = 3, batch_size: int = 16, **settings: Any) -> Run:
    named = {
        **SMALL,
        **{f"detector.{name}": value for name, value in settings.items()},
        "knn.every": 1,
    }
    return train(
        data=data,
        out=out,
        epochs=epochs,
        batch_size=batch_size,
        progress=False,
        method="simclr+ring",
        settings=named,
    )


def test_the_bounds_move_at_every_step_and_from_the_epoch_it_starts(tmp_path: Path) -> None:
    """Four steps an epoch; a line of the log has the bounds of the epoch's last step."""
    data = images(tmp_path / "x.npz")
    bounds: dict[str, Any] = {"lower": 0.8, "upper": 0.98, "start_upper": 0.9, "anneal_epochs": 2}
    rows = ring(data, tmp_path / "run", **bounds).epochs()
    assert [row["ring_lower"] for row in rows] == pytest.approx(
        [0.8 * 0.75 / 2, 0.8 * 1.75 / 2, 0.8]
    )
    assert [row["ring_upper"] for row in rows] == pytest.approx(
        [0.9 + 0.08 * 0.75 / 2, 0.9 + 0.08 * 1.75 / 2, 0.98]
    )
    late = ring(data, tmp_path / "late", start_epoch=1, **bounds).epochs()
    assert [row["ring_lower"] for row in late] == pytest.approx(
        [0.0, 0.8 * 0.75 / 2, 0.8 * 1.75 / 2]
    )


@pytest.mark.parametrize("val", [False, True])
def test_the_test_split_does_not_steer(tmp_path: Path, val: bool) -> None:
    """The same training whatever the labels of the test split are; it is steered by the validation
    split, or by the training samples."""
    ended = []
    for seed in (0, 1):
        data = images(tmp_path / f"{seed}.npz", test_seed=seed, val=val)
        ended.append(
            ring(
                data, tmp_path / str(seed), epochs=4, batch_size=32, anneal="knn", anneal_epochs=4
            ).epochs()
        )
    shown, steering, lower = (
        [[row[name] for row in rows] for rows in ended]
        for name in ("knn", "steering_knn", "ring_lower")
    )
    assert shown[0] != shown[1], "the accuracy that is shown is that of the test split"
    assert steering[0] == steering[1]
    assert lower[0] == lower[1]
    moves = [
        1 if after > before else -1
        for before, after in zip(steering[0], steering[0][1:], strict=False)
    ]
    expected = [0.0]
    for move in moves[:-1]:
        expected.append(min(max(expected[-1] + move * 0.9 / 4, 0.0), 0.9))
    assert lower[0][1:] == pytest.approx(expected), (
        "a measurement moves the bound of the next epoch"
    )


def test_a_validation_split_is_shown_where_there_is_no_test_split(tmp_path: Path) -> None:
    rows = ring(
        images(tmp_path / "x.npz", test="val"), tmp_path / "run", epochs=2, anneal="knn"
    ).epochs()
    assert [row["knn"] for row in rows] == [row["steering_knn"] for row in rows]
    assert (
        "steering_knn"
        not in ring(images(tmp_path / "y.npz"), tmp_path / "other", epochs=1).epochs()[0]
    )
