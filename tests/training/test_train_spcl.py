"""Trainings of spcl: batches go by the clusters of their epoch, heads and momentum begin anew,
several processes, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.embedding import embed
from kinfolk.errors import UsageError
from kinfolk.frameworks import spcl
from kinfolk.frameworks.spcl import reinitialise
from kinfolk.training import epoch_end
from kinfolk.training.checkpoint import read_checkpoint
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run
from kinfolk.training.train import train
from tests.training.children import few_images, run_ranks, training
from tests.training.small import assert_same

SPCL: dict[str, Any] = {
    "method": "spcl",
    "epochs": 2,
    "settings": {"framework.num_clusters": [12], "knn.every": 0},
}
DETECTING: dict[str, Any] = {
    "method": "spcl+glofnd",
    "settings": {"framework.num_clusters": [12, 5]},
}


def test_batches_and_heads_of_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are those of the samples in data-set order, and half of every batch has one of
    them."""
    steps: list[tuple[int, Tensor, Tensor]] = []
    heads: list[tuple[Tensor, bool]] = []
    clustered: list[Tensor] = []
    step, begin = TrainingModule.training_step, epoch_end.Refresh.on_train_epoch_start

    def training_step(self: Any, batch: dict[str, Any], batch_idx: int) -> Tensor:
        steps.append(
            (batch["epoch"], batch["ids"], self.framework.assigned.clusters.labels[0].clone())
        )
        return step(self, batch, batch_idx)

    def renewed(parts: Any, seed: int) -> None:
        before = parts[0][0].weight.clone()
        reinitialise(parts, seed)
        assert len(parts) == 3
        assert not torch.equal(parts[0][0].weight, before)

    def started(self: Any, trainer: Any, module: Any) -> None:
        optimizer, framework = trainer.optimizers[0], module.framework
        assert len(optimizer.state) == (
            0 if trainer.current_epoch == 0 else len(list(framework.parameters()))
        )
        expected = embed(
            framework, self.data, module.views, torch.arange(self.data.num_train), projected=False
        )
        begin(self, trainer, module)
        clustered.append(expected)
        heads.append(
            (framework.head[0].weight.clone(), framework.head[0].weight in optimizer.state)
        )
        assert framework.encoder.training

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    monkeypatch.setattr(spcl, "reinitialise", renewed)
    monkeypatch.setattr(epoch_end.Refresh, "on_train_epoch_start", started)
    rows = train(**training(tmp_path / "run", **SPCL)).epochs()
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(row["loss"] > 0 and "nmi" in row for row in rows)
    assert not torch.equal(heads[0][0], heads[1][0])
    assert not any(known for _, known in heads), (
        "the momentum of a head that begins anew is forgotten"
    )
    for epoch in range(2):
        ids = torch.cat([each[1] for each in steps if each[0] == epoch])
        assert len(ids) == len(set(ids.tolist())) == 1280, (
            "every sample once, but for less than a batch"
        )
        unit = torch.nn.functional.normalize(clustered[epoch], dim=1)
        for _, batch, labels in (each for each in steps if each[0] == epoch):
            counts = labels[batch].bincount(minlength=12).sort(descending=True).values
            assert counts[:2].sum() >= 96, (
                "one or few of twelve clusters hold half of a batch of 256"
            )
        means = torch.stack([unit[labels == k].mean(0) for k in range(12)])
        near = torch.cdist(unit, means).argmin(1)
        assert (near == labels).float().mean() > 0.9, "the labels belong to these samples"


def test_two_ranks_interrupted_and_resumed_are_the_same(tmp_path: Path) -> None:
    whole, out = Run(tmp_path / "whole"), Run(tmp_path / "run")
    given = {**few_images(tmp_path), **DETECTING}
    assert run_ranks(whole.path, "", "", **given) == [0, 0]
    assert run_ranks(out.path, "", "terminate step 7", **given) == [1, 1]
    assert read_checkpoint(out.checkpoint)["kinfolk"]["step"] == 7
    assert run_ranks(out.path, "", "", resume=True, **given) == [0, 0]
    assert_same(out, whole)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"framework.prototypes": "labels", "framework.reinitialise": []},
    {"framework.contrast_weight": 0.0},
    {"framework.metric_weight": 0.0, "framework.every": 2},
    {"framework.prototype_weight": 0.0, "framework.reverse_weight": 0.5},
)


def test_spcl_trains_with_every_option(tmp_path: Path) -> None:
    few = {**few_images(tmp_path), "method": "spcl", "epochs": 1, "batch_size": 80}
    for number, options in enumerate(OPTIONS):
        settings = {"framework.num_clusters": [12], **options, "knn.every": 0}
        run = train(**training(tmp_path / str(number), settings=settings, **few))
        assert run.epochs()[0]["loss"] > 0, options


def test_labels_for_prototypes_need_labels(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (40, 8, 8, 3), dtype=torch.uint8)
    arguments = training(
        tmp_path / "run", method="spcl", batch_size=8, settings={"framework.prototypes": "labels"}
    )
    with pytest.raises(UsageError, match="needs labels and the data has none"):
        train(**{**arguments, "data": pixels})
