"""SPCL as in the authors' code: whitening, halves contrasted apart; and batches of exactly one
prototype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kinfolk.frameworks.spcl import one_prototype_batches, pca_whiten
from kinfolk.objectives import NTXentLoss
from kinfolk.objectives.siamese import draw_partners
from kinfolk.training.settings import load_recipe
from kinfolk.training.train import train
from tests.frameworks.test_spcl import T, batch, features, made
from tests.training.small import BARE


def test_whitened_features_have_unit_covariance() -> None:
    given = torch.randn(200, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64) + 3
    white = pca_whiten(given, 4)
    torch.testing.assert_close(white.T @ white / 200, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(
        white.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0
    )
    axes = torch.linalg.svd(given - given.mean(0), full_matrices=False).U[:, :4] * 200**0.5
    torch.testing.assert_close(white.abs(), axes.abs())


def test_clusters_are_those_of_the_whitened_features() -> None:
    stretched = features() * torch.tensor([50.0] + [1.0] * 9)
    framework = made(num_clusters=(6,), whiten=5)
    framework.refresh(stretched, 0.0)
    assert framework.assigned.clusters is not None
    assert framework.assigned.clusters.centroids.shape == (6, 5)
    framework.refresh(stretched, 0.0)  # goes on without a warm start


def test_each_half_of_the_batch_is_contrasted_alone() -> None:
    views, ids = batch(0)
    framework = made(contrast_apart=True, decoupled=False, metric_weight=0, prototype_weight=0)
    framework.refresh(features(), 0.0)
    anchors = draw_partners(framework.assigned.first(ids), 1, torch.Generator()).anchors_A
    assert 2 <= int(anchors.sum()) <= 6
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    plain = NTXentLoss(temperature=T)
    halves = [(half, plain(z1[half], z2[half], ids[half])) for half in (anchors, ~anchors)]
    want = sum(half.double().mean() * loss for half, loss in halves)
    torch.testing.assert_close(framework(views, ids), want)
    sizes = [int(half.sum()) for half, _ in halves]
    assert int(framework.stats.negatives) == sum(2 * size * 2 * (size - 1) for size in sizes)


@pytest.mark.parametrize("sizes", [(20, 20), (30, 9, 1), (13, 13, 14)])
def test_every_batch_is_half_of_one_prototype(sizes: tuple[int, ...]) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(40)]
    met = set()
    for seed in range(20):
        for order in one_prototype_batches(labels, 8, torch.Generator().manual_seed(seed)).view(
            5, 8
        ):
            ids, counts = torch.unique(labels[order], return_counts=True)
            half = ids[counts == 4].tolist()
            assert half, "four of the eight are of one prototype, and no other of it"
            met |= set(half)
            anchors = [id for id in order.tolist() if labels[id] == half[0]]
            if len(half) == 1 and sizes[half[0]] >= 4:
                assert len(set(anchors)) == 4
    assert met == set(range(len(sizes)))


def test_samples_of_a_batch_repeat_only_where_there_are_too_few() -> None:
    """Of samples without a prototype, none is half a batch of itself."""
    labels = torch.cat((torch.tensor([0, 1]).repeat_interleave(12), -1 - torch.arange(16)))
    for seed in range(20):
        for order in one_prototype_batches(labels, 20, torch.Generator().manual_seed(seed)).view(
            2, 20
        ):
            assert len(order.unique()) == 20
            assert 10 in [int((labels[order] == p).sum()) for p in (0, 1)]
    few = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    for order in one_prototype_batches(few, 8, torch.Generator().manual_seed(0)).view(1, 8):
        # the two of the small prototype twice, be they the anchors or the others
        assert sorted(torch.unique(order, return_counts=True)[1].tolist()) == [1, 1, 1, 1, 2, 2]


def test_the_recipe_of_the_code_has_every_difference() -> None:
    framework = load_recipe("spcl-cifar10-code").framework
    assert {
        name: framework[name]
        for name in ("whiten", "contrast_apart", "decoupled", "reinitialise", "log_zero")
    } == {
        "whiten": 256,
        "contrast_apart": True,
        "decoupled": False,
        "reinitialise": ["prototype"],
        "log_zero": -9.2,
    }
    assert framework["prototype_weight"] == 0.1
    assert framework["prototype_weight"] * framework["reverse_weight"] == 1.0


def test_a_training_with_all_of_it_ends(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 8, 8, 3)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images, y_train=np.arange(64) % 4)
    own = {
        "num_clusters": [6],
        "whiten": 4,
        "contrast_apart": True,
        "batch_mode": "one_prototype",
        "decoupled": False,
    }
    settings = {**BARE, **{f"framework.{name}": value for name, value in own.items()}}
    run = train(
        data=tmp_path / "images.npz",
        out=tmp_path / "run",
        method="spcl",
        epochs=2,
        batch_size=16,
        settings=settings,
        progress=False,
    )
    assert all(np.isfinite(row["loss"]) for row in run.epochs())
