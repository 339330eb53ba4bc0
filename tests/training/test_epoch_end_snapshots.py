"""Snapshots of the embedding: when, of whom, with which pseudo-labels; and none after the
checkpoint that a training goes on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.training.epoch_end import read_snapshots, snapshot_epochs
from kinfolk.training.run_folder import remove_later_snapshots, snapshot_file
from kinfolk.training.train import train
from tests.training.children import training


@pytest.mark.parametrize(
    ("number", "epochs", "expected"),
    [(0, 9, []), (1, 9, [9]), (4, 100, [1, 34, 67, 100]), (4, 1, [1]), (4, 3, [1, 2, 3])],
)
def test_snapshots_are_spread_over_the_epochs(
    number: int, epochs: int, expected: list[int]
) -> None:
    assert sorted(snapshot_epochs(number, epochs)) == expected


def test_a_training_leaves_them_with_the_labels_it_accepts(tmp_path: Path) -> None:
    settings = {"detector.num_clusters": [10], "snapshots.samples": 50}
    run = train(**training(tmp_path / "run", method="simclr+ifnd", settings=settings))
    first, second, third = read_snapshots(run.snapshots)
    assert [snapshot.epoch for snapshot in (first, second, third)] == [1, 2, 3]
    assert first.pseudo is None  # nothing is accepted in the first epoch
    assert second.pseudo is not None
    assert third.pseudo is not None
    assert len(third.ids) == 50
    assert np.array_equal(first.ids, third.ids)
    assert (np.diff(third.ids) > 0).all()
    np.testing.assert_allclose(
        np.linalg.norm(third.embedding.astype(np.float32), axis=1), 1, atol=2e-3
    )
    assert 0.1 < (second.pseudo >= 0).mean() < 0.9
    assert (third.pseudo >= 0).all()  # the last clustering accepts all
    assert third.pseudo.max() < 10


def test_a_resumed_training_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    for epoch in (1, 4, 10000):
        snapshot_file(tmp_path, epoch).write_bytes(b"")
    (tmp_path / "epoch-notes.safetensors").write_bytes(b"")
    remove_later_snapshots(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-0001.safetensors",
        "epoch-0004.safetensors",
        "epoch-notes.safetensors",
    ]
    assert read_snapshots(tmp_path) == []
