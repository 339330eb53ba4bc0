"""The protocols that need the whole method: what `kin` says of frameworks and detectors of every kind, and crops for fine-tuning."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kinfolk.data.arrays import array_source
from kinfolk.data.images import ImageData
from kinfolk.data.prepare import prepare
from kinfolk.errors import UsageError
from kinfolk.evaluation.whole import Augmented, run_kin
from kinfolk.training.assemble import assemble, build_framework, build_views, fit_to_data


def pictures(labelled: bool = True) -> tuple[ImageData, object]:
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    images = (60 * labels[:, None, None, None] + rng.integers(0, 60, (24, 16, 16, 3))).astype(np.uint8)
    source = array_source({"train": (images, labels if labelled else None)}, name="pictures")
    return prepare(source, image_size=16, workers=0, progress=False), source


@pytest.mark.parametrize(
    ("method", "judged"),
    [("simclr", False), ("simclr+fnc", True), ("sogclr+glofnd", True), ("simclr+oracle", True), ("moco+ring", True), ("simclr+ifnd", True),
     ("cmc+glofnd", False), ("la", True)],
)  # fmt: skip
def test_every_kind_of_method_is_asked(method: str, judged: bool) -> None:
    data, source = pictures()
    small = {"model.name": "resnet10", "model.width": 4, "head.hidden_size": 8, "head.out_size": 8}
    more = {"framework.queue_size": 16} if method.startswith("moco") else {}
    config = fit_to_data(assemble(None, None, {"method": method, "batch_size": 8}, {**small, **more}), source)  # type: ignore[arg-type]
    framework = build_framework(config, data).eval()
    found = run_kin(framework, data, build_views(config), seed=0, alpha=0.1)
    assert ("f1" in found) == judged
    assert found["exact"]["flagged"] == pytest.approx(0.1, abs=0.02)
    assert (found["anchors"], found["samples"], found["views"]) == (24, 24, 2)
    if method == "simclr+oracle":
        assert found["precision"] == found["recall"] == 1
    few = run_kin(framework, data, build_views(config), seed=0, alpha=0.1, most_anchors=5)
    assert few["anchors"] == 5
    assert "5 anchors" in few["measured_on"]
    assert few["fn_similarity"] == pytest.approx(found["fn_similarity"])


def test_labels_are_needed() -> None:
    data, source = pictures(labelled=False)
    config = fit_to_data(assemble(None, None, {"method": "simclr"}, {"model.name": "resnet10", "model.width": 4}), source)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="have no labels"):
        run_kin(build_framework(config, data), data, build_views(config), seed=0)


def test_versions_are_drawn_by_seed_and_number() -> None:
    data, source = pictures()
    views = build_views(fit_to_data(assemble(None, None, {"method": "simclr"}, {}), source))  # type: ignore[arg-type]
    pixels = data.pixels(torch.arange(4))
    first, again = (Augmented(views, 0, 0) for _ in range(2))
    one = first.evaluate(pixels)
    assert torch.equal(again.evaluate(pixels), one)
    assert not torch.equal(first.evaluate(pixels), one), "another batch"
    assert not torch.equal(Augmented(views, 0, 1).evaluate(pixels), one)
    assert not torch.equal(Augmented(views, 1, 0).evaluate(pixels), one)
