"""The recipes of the frameworks with queues and banks."""

from __future__ import annotations

import pytest

from kinfolk.detectors import Ring
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.training.settings import load_recipe


@pytest.mark.parametrize(
    "name", ["moco-resnet18", "moco-ring-resnet18", "ir-resnet18", "ir-ring-resnet18"]
)
def test_the_ring_paper_s_settings(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.method == name.removesuffix("-resnet18").replace("-", "+")
    assert (recipe.epochs, recipe.batch_size, recipe.model.name, recipe.head.out_size) == (
        300,
        256,
        "resnet18",
        128,
    )
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.lr_scaling, optimizer.momentum, optimizer.weight_decay) == (
        0.03,
        "none",
        0.9,
        1e-4,
    )
    assert (optimizer.schedule, optimizer.milestones, optimizer.factor) == (
        "steps",
        (200, 250),
        0.1,
    )
    assert recipe.framework["temperature"] == 0.07
    negatives = {**recipe.framework, **recipe.detector}
    if "ring" in name:
        ring = build_detector(parse(recipe.method), Context(1000), recipe.detector)
        assert isinstance(ring, Ring)
        bounds = []
        for epoch in (0.0, 50.0, 100.0, 300.0):
            ring.on_metric("epoch", epoch)
            bounds += [ring.lower, ring.upper]
        assert bounds == pytest.approx([0, 0.9, 0.45, 0.945, 0.9, 0.99, 0.9, 0.99]), (
            "the closest tenth of the ball is excluded"
        )
    assert 4096 in (
        negatives.get("queue_size"),
        negatives.get("num_negatives"),
        negatives.get("draw"),
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [("ir-cave-resnet18", "ir+cave"), ("ir-ring-close-resnet18", "ir+ring:attract")],
)
def test_the_recipes_with_clusters_are_those_without(name: str, method: str) -> None:
    recipe, ring = load_recipe(name), load_recipe("ir-ring-resnet18")
    assert recipe.method == method
    assert recipe.detector["num_clusters"] == 100
    assert recipe.framework["num_negatives"] is None, "clusters are of the whole bank"
    same = ("epochs", "batch_size", "views", "model", "head", "optimizer")
    assert all(getattr(recipe, part) == getattr(ring, part) for part in same)
    pooled = {"pool_kin": True} if name == "ir-ring-close-resnet18" else {}
    assert recipe.framework == {**ring.framework, **pooled}, (
        "its positives stand inside the logarithm: equation 5"
    )
