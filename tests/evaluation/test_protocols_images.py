"""The protocols that need the whole method: what `kin` says of frameworks and detectors of every
kind, and crops for fine-tuning."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.data.arrays import ArraySource
from kinfolk.data.images import ImageData
from kinfolk.data.prepare import prepare
from kinfolk.embedding import take_parts
from kinfolk.errors import UsageError
from kinfolk.evaluation.gradient_training import TrainedResult
from kinfolk.evaluation.protocols import Augmented, run_finetune, run_kin
from kinfolk.training.build import build_framework, build_views
from kinfolk.training.defaults import assemble, fit_to_data
from kinfolk.training.epoch_end import ClusterQuality


def three_classes(labelled: bool = True) -> tuple[ImageData, object]:
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    images = (60 * labels[:, None, None, None] + rng.integers(0, 60, (24, 16, 16, 3))).astype(
        np.uint8
    )
    source = ArraySource({"train": (images, labels if labelled else None)}, name="made up")
    return prepare(source, image_size=16, workers=0, progress=False), source


@pytest.mark.parametrize(
    ("method", "judged"),
    [("simclr", False), ("simclr+fnc", True), ("sogclr+glofnd", True), ("simclr+oracle", True), ("moco+ring", True), ("simclr+ifnd", True),  # noqa: E501
     ("cmc+glofnd", False), ("la", True)],
)  # fmt: skip
def test_the_detector_is_measured_with_every_kind_of_method(method: str, judged: bool) -> None:
    data, source = three_classes()
    small = {"model.name": "resnet10", "model.width": 4, "head.hidden_size": 8, "head.out_size": 8}
    more = {"framework.queue_size": 16} if method.startswith("moco") else {}
    config = fit_to_data(
        assemble(None, None, {"method": method, "batch_size": 8}, {**small, **more}),
        source,  # type: ignore[arg-type]
    )
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


def test_rates_are_those_of_the_metrics_log() -> None:
    """MTPR and MTNR of a method with several levels: of the first, in the epoch's line as in the
    result."""
    data, source = three_classes()
    more = {
        "model.name": "resnet10",
        "model.width": 4,
        "head.hidden_size": 8,
        "head.out_size": 8,
        "detector.num_clusters": [3, 9],
    }
    config = fit_to_data(
        assemble(None, None, {"method": "simclr+ifnd", "batch_size": 8}, more),
        source,  # type: ignore[arg-type]
    )
    framework = build_framework(config, data).eval()
    (detector,) = framework.detectors
    detector.refresh(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)), 0.8)
    in_training = ClusterQuality(data)(SimpleNamespace(framework=framework), 1)  # type: ignore[arg-type]
    found = run_kin(framework, data, build_views(config), seed=0)
    assert 0 < in_training["mtpr"] < 1
    assert (found["mtpr"], found["mtnr"]) == pytest.approx(
        (in_training["mtpr"], in_training["mtnr"])
    )
    assert found["mtpr"] != pytest.approx(found["recall"], abs=0.02), "over both levels"


def test_fine_tuning_of_the_papers_on_drawn_and_listed_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[dict[str, Any]] = []

    def fake(*_: Any, **settings: Any) -> TrainedResult:
        received.append(settings)
        return TrainedResult(0.5, math.nan, 1, 1, 0.0)

    monkeypatch.setattr(sys.modules["kinfolk.evaluation.gradient_training"], "finetune", fake)
    data, source = three_classes()
    config = fit_to_data(
        assemble(None, None, {"method": "simclr"}, {"model.name": "resnet10", "model.width": 4}),
        source,  # type: ignore[arg-type]
    )
    parts = take_parts(data, np.zeros((24, 2), dtype=np.float32))
    chosen = tmp_path / "few.txt"
    chosen.write_text("\n".join(data.samples.keys))
    arguments: Any = (torch.nn.Identity(), data, build_views(config), parts, 0)
    found = run_finetune(*arguments, fractions=(0.1, 0.01), lists=[chosen], settings="rcl")
    assert [each["fraction"] for each in received] == [0.1, 0.01, 1.0]
    assert found["finetuning"] == "rcl"
    listed = found["fractions"][2]
    assert (listed["subset"], listed["labels"]) == ("few", found["train"])
    assert "top5" not in found["fractions"][0], "of three classes there is none"


def test_labels_are_needed() -> None:
    data, source = three_classes(labelled=False)
    config = fit_to_data(
        assemble(None, None, {"method": "simclr"}, {"model.name": "resnet10", "model.width": 4}),
        source,  # type: ignore[arg-type]
    )
    with pytest.raises(UsageError, match="share a label"):
        run_kin(build_framework(config, data), data, build_views(config), seed=0)


def test_versions_are_drawn_by_seed_and_number() -> None:
    data, source = three_classes()
    views = build_views(fit_to_data(assemble(None, None, {"method": "simclr"}, {}), source))  # type: ignore[arg-type]
    pixels = data.pixels(torch.arange(4))
    first, again = (Augmented(views, 0, 0) for _ in range(2))
    one = first.evaluate(pixels)
    assert torch.equal(again.evaluate(pixels), one)
    assert not torch.equal(first.evaluate(pixels), one), "another batch"
    assert not torch.equal(Augmented(views, 0, 1).evaluate(pixels), one)
    assert not torch.equal(Augmented(views, 1, 0).evaluate(pixels), one)
