"""A training with RCL: the paper's head by default, what is logged for each criterion, and warnings
in the log and the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.report.page import write_report
from kinfolk.training.defaults import assemble
from kinfolk.training.documents import first_warnings, row_warnings
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.small import SMALL


@pytest.mark.parametrize(
    ("method", "layers", "last_norm"), [("rcl", 3, True), ("nnclr", 3, True), ("simclr", 2, False)]
)
def test_the_method_brings_its_head(method: str, layers: int, last_norm: bool) -> None:
    head = assemble(None, None, {"method": method}, []).head
    assert (head.layers, head.last_norm) == (layers, last_norm)
    other = assemble(None, None, {"method": method}, ["head.layers=1", "head.last_norm=false"]).head
    assert (other.layers, other.last_norm) == (1, False)


def test_suspicious_metrics_are_warnings() -> None:
    assert row_warnings({"epoch": 1, "tp_similarity": -0.003}) == {}, (
        "as with an untrained predictor"
    )
    assert row_warnings({"epoch": 2, "clustered": 0.3, "with_key": 0.9, "tp_similarity": 0.2}) == {}
    found = row_warnings({"epoch": 2, "clustered": 0.003, "with_key": 0.4, "tp_similarity": -0.28})
    assert list(found) == ["clustered", "with_key", "tp_similarity"]
    assert "0.3%" in found["clustered"]
    assert "60%" in found["with_key"]
    assert "-0.28" in found["tp_similarity"]
    assert "fewer keys" in found["tp_similarity"]
    without_keys = row_warnings({"tp_similarity": -0.28})["tp_similarity"]
    assert "the encoder has learned nothing so far" in without_keys
    assert (
        "epoch 4"
        in first_warnings(
            [{"epoch": 3}, {"epoch": 4, "clustered": 0}, {"epoch": 5, "clustered": 0}]
        )["clustered"]
    )


def test_rcl_logs_each_criterion_and_warns_in_log_and_report(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    labels = np.arange(96) % 4
    images = (40 * labels[:, None, None, None] + g.integers(0, 40, (96, 8, 8, 3))).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images, y_train=labels)
    settings = {
        **SMALL,
        "framework.queue_size": 32,
        "framework.predictor_size": 8,
        "framework.warmup_epochs": 1,
        "framework.radii": [1e-4, 2e-4],  # nothing is that near
        "framework.merge_similarity": 1.0,
        "framework.momentum": 0.5,
        "trainer.loggers": [],
    }
    train(
        data=tmp_path / "images.npz",
        out=tmp_path / "run",
        method="rcl",
        epochs=3,
        batch_size=16,
        settings=settings,
        progress=False,
    )
    last = Run(tmp_path / "run").epochs()[-1]
    for h in (2, 3):
        assert {f"mtpr_{h}", f"mtnr_{h}", f"nmi_{h}"} <= last.keys()
    assert last["clustered"] == last["with_key"] == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("the hierarchy is empty") == 1
    assert log.count("of the anchors had no retrieved key") == 1
    page = write_report(tmp_path / "run").read_text()
    assert "the hierarchy is empty in epoch 2" in page
    assert "of the anchors had no retrieved key" in page


def test_rcl_logs_the_precision_of_retrieved_keys(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    labels = np.arange(96) % 4
    images = (60 * labels[:, None, None, None] + g.integers(0, 4, (96, 8, 8, 3))).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images, y_train=labels)
    settings = {
        **SMALL,
        "framework.queue_size": 64,
        "framework.predictor_size": 8,
        "framework.warmup_epochs": 1,
        "framework.hierarchy": "kmeans",
        "framework.num_clusters": [12, 4],
        "framework.momentum": 0.5,
        "trainer.loggers": [],
    }
    file = tmp_path / "images.npz"
    train(
        data=file,
        out=tmp_path / "run",
        method="rcl",
        epochs=2,
        batch_size=16,
        settings=settings,
        progress=False,
    )
    first, last = Run(tmp_path / "run").epochs()
    names = {"with_key", "key_precision"}
    assert not names & first.keys(), "before the first clustering there are no keys"
    assert names <= last.keys()
    assert 0 < last["with_key"] <= 1
    assert 0 <= last["key_precision"] <= 1


def test_a_similarity_below_zero_is_in_the_report(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x_train=g.integers(0, 255, (32, 8, 8, 3)).astype(np.uint8))
    settings = {**SMALL, "trainer.loggers": []}
    file = tmp_path / "images.npz"
    train(
        data=file,
        out=tmp_path / "run",
        method="simclr",
        epochs=1,
        batch_size=16,
        settings=settings,
        progress=False,
    )
    with (tmp_path / "run" / "metrics.jsonl").open("a") as lines:
        lines.write('{"epoch": 2, "step": 4, "loss": 1.0, "tp_similarity": -0.28}\n')
    assert "positives is -0.28 in epoch 2" in write_report(tmp_path / "run").read_text()
