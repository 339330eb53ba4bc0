"""The maps of several epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kinfolk.report.maps import choose, draw_stages
from kinfolk.training.epoch_end import Snapshot, read_snapshots
from tests.report.synthetic import add_snapshots, images


def test_snapshots_are_drawn_in_order_with_their_pseudo_labels(tmp_path: Path) -> None:
    data = images(classes=["cat", "dog"], num=60)
    add_snapshots(tmp_path, data)
    (tmp_path / "snapshots" / "epoch-0003.safetensors").write_bytes(b"damaged")
    stages = draw_stages(read_snapshots(tmp_path / "snapshots"), np.arange(60), True, seed=0)
    assert stages is not None
    assert [stage.epoch for stage in stages.maps] == [1, 6, 12]
    assert [stage.note for stage in stages.maps] == [
        "before the first clusters",
        "52% with a pseudo-label, 5 clusters",
        "100% with a pseudo-label, 5 clusters",
    ]
    assert stages.place == list(range(0, 45, 2))
    assert stages.clusters == 5
    assert stages.choice


def test_other_samples_than_those_of_the_map_are_not_drawn() -> None:
    snapshot = Snapshot(1, np.asarray([3, 90]), np.ones((2, 4), dtype=np.float16), None)
    assert draw_stages([snapshot], np.arange(60), True, seed=0) is None
    assert draw_stages([], np.arange(60), True, seed=0) is None


def test_the_map_holds_the_samples_of_the_snapshots() -> None:
    wanted = np.asarray([3, 500, 997])
    drawn = choose(1000, seed=0, limit=20, include=wanted)
    assert len(set(drawn.tolist())) == 20
    assert set(wanted.tolist()) <= set(drawn.tolist())
