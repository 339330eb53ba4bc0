"""`kinfolk eval --protocol kin` of a run with captions: both directions, against labels or caption
groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from kinfolk.cli import main
from kinfolk.detectors import GloFND
from kinfolk.evaluation.detection import detection_quality
from kinfolk.training.load_run import open_run, restore
from kinfolk.training.train import train
from tests.training.pairs_of import SMALL, write_pairs


def test_candidates_may_be_of_another_kind() -> None:
    """Precision and recall of the exact quantile, counted by a loop over images and captions."""
    g = torch.Generator().manual_seed(0)
    one, two = (torch.randn(12, 1, 4, generator=g) for _ in range(2))
    labels = torch.arange(12) % 3
    found = detection_quality(one, labels, 0.2, candidates=two)
    sim = F.normalize(one[:, 0], dim=1) @ F.normalize(two[:, 0], dim=1).T
    flagged = hits = kin = 0
    for i in range(12):
        for j in range(12):
            if i != j:
                is_kin, is_flagged = (
                    bool(labels[i] == labels[j]),
                    bool(sim[i, j] > found.thresholds[i]),
                )
                flagged, hits, kin = (
                    flagged + is_flagged,
                    hits + (is_kin and is_flagged),
                    kin + is_kin,
                )
    assert 0 < hits < flagged
    assert found.exact.stats.precision == pytest.approx(hits / flagged)
    assert found.exact.stats.recall == pytest.approx(hits / kin)


def test_a_run_with_captions_is_measured_in_both_directions(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "d", 32)
    settings = {**SMALL, "detector.alpha": 0.1}
    train(
        data,
        tmp_path / "run",
        progress=False,
        method="clip+glofnd",
        epochs=2,
        batch_size=12,
        settings=settings,
    )
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(tmp_path / "run"), "--protocol", "kin"])
    result = json.loads((tmp_path / "run" / "eval" / "kin.json").read_text())
    assert result["truth"] in ("labels", "caption groups")
    for direction in ("image_to_text", "text_to_image"):
        assert {"precision", "recall", "exact", "threshold"} <= result[direction].keys()
    errors = [result[way]["threshold"]["mae"] for way in ("image_to_text", "text_to_image")]
    assert result["threshold"]["mae"] == pytest.approx(sum(errors) / 2)
    opened = open_run(tmp_path / "run")
    images = opened.data()
    framework = restore(opened.path, opened.config, images)
    thresholds = [cast(GloFND, each.inner).thresholds for each in framework.detectors]
    assert not torch.equal(*thresholds), "each direction has thresholds of its own"


def test_a_loss_of_one_direction_is_measured_in_it(tmp_path: Path) -> None:
    """SigLIP judges each pair once: its detector has images as anchors."""
    run = train(
        write_pairs(tmp_path / "d", 32),
        tmp_path / "run",
        progress=False,
        method="siglip+fnc",
        epochs=1,
        batch_size=12,
        settings={**SMALL, "detector.top_k": 1},
    )
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(run.path), "--protocol", "kin"])
    result = json.loads((run.path / "eval" / "kin.json").read_text())
    one, two = result["image_to_text"], result["text_to_image"]
    assert result["precision"] == one["precision"]
    assert "precision" not in two
    assert result["exact"]["recall"] == pytest.approx(
        (one["exact"]["recall"] + two["exact"]["recall"]) / 2
    )
