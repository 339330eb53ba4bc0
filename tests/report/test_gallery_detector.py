"""Whom the gallery shows, and the thresholds of its samples, against slow loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kinfolk as kf
from kinfolk.data.views import Views
from kinfolk.embedding import embed
from kinfolk.report.gallery import (
    Compared,
    batch_levels,
    bounds_of,
    build_gallery,
    embed_samples,
    exact_level,
    level_panels,
)
from tests.report.synthetic import images, method

NUM = 40


def compared(detector: kf.Detector | None, num: int = NUM) -> Compared:
    embedding = F.normalize(torch.randn(num, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    ids = torch.arange(num) * 2
    return Compared(
        np.arange(num) + 5, ids, embedding, None if detector is None else detector.eval()
    )


def test_kin_are_those_above_the_anchors_own_threshold() -> None:
    detector = kf.GloFND(num_samples=2 * NUM, alpha=0.1)
    detector.store.threshold.copy_(torch.linspace(0.2, 0.9, 2 * NUM))
    found = compared(detector)
    labels = torch.arange(2 * NUM) % 3
    labels[:10] = -1
    gallery = build_gallery(found, labels, detector.thresholds[found.ids])
    sim = found.embedding @ found.embedding.T
    assert gallery.flagged is not None
    assert gallery.right is not None
    for i in range(NUM):
        kin = [j for j in range(NUM) if j != i and sim[i, j] > detector.thresholds[2 * i]]
        kin.sort(key=lambda j: -float(sim[i, j]))
        assert gallery.kin[i].tolist() == ([j + 5 for j in kin] + [-1] * 10)[:10]
        assert gallery.flagged[i] == len(kin)
        assert gallery.right[i] == sum(
            bool(labels[2 * i] == labels[2 * j]) and labels[2 * i] >= 0 for j in kin
        )
    text = gallery.as_json()
    assert sorted(text["anchors"]) == list(range(5, NUM + 5))
    assert [text["flagged"][at] for at in np.argsort(text["anchors"])] == gallery.flagged.tolist()
    assert [len(kin) for kin in text["kin"]] == [min(10, number) for number in text["flagged"]]


def test_without_a_detector_the_nearest_are_shown() -> None:
    gallery = build_gallery(compared(None), None)
    assert (gallery.kin >= 0).all()
    assert [gallery.flagged, gallery.right, gallery.thresholds] == [None] * 3
    assert gallery.title == "Nearest neighbours"
    assert (np.diff(gallery.similarity, axis=1) <= 0).all()


def test_nearest_neighbours_are_of_clean_features() -> None:
    data = images(classes=["cat", "dog"])
    plain = method(data)
    plain.objective.detector = None
    views, ids = Views("simclr", 16), np.arange(30)
    found = embed_samples(plain, data, views, ids, seed=3)
    features = F.normalize(embed(plain, data, views, torch.arange(30)), dim=1)
    torch.testing.assert_close(found.embedding, features)
    gallery = build_gallery(found, torch.arange(60) % 2)
    assert "augmented" not in gallery.intro


def test_only_training_samples_are_compared_and_each_run_of_the_report_alike() -> None:
    data = images(classes=["cat", "dog"])
    ids = np.arange(0, 80, 3)
    first, second = (
        embed_samples(method(data), data, Views("simclr", 16), ids, seed=3) for _ in range(2)
    )
    assert first.ids.tolist() == [i for i in range(0, 80, 3) if i < 60]
    assert first.places.tolist() == list(range(20))
    assert torch.equal(first.embedding, second.embedding)


@pytest.mark.parametrize(
    ("detector", "names"),
    [
        (kf.GloFND(num_samples=2 * NUM, alpha=0.1), ["learned", "exact", "FNC"]),
        (
            kf.StartAt(kf.GloFND(num_samples=2 * NUM, alpha=0.1), epoch=2),
            ["learned", "exact", "FNC"],
        ),
        (kf.FNC(alpha=0.1), ["exact", "FNC"]),
        (kf.Ring(lower=0.3, upper=0.9), ["lower, exact", "upper, exact"]),
        (kf.Ring(lower=0.0, upper=0.9), ["upper, exact"]),
        (kf.FNC(top_k=3), None),
        (kf.GloFND(num_samples=2 * NUM, alpha=0.0), None),
        (None, None),
    ],
)
def test_which_thresholds_are_drawn(detector: Any, names: list[str] | None) -> None:
    panels = level_panels(compared(detector), batch_size=16, seed=0)
    assert [[trace["name"] for trace in panel.figure["data"]] for panel in panels] == (
        [] if names is None else [names]
    )


def test_exact_levels_are_quantiles_and_batch_levels_those_of_fnc() -> None:
    found = compared(kf.GloFND(num_samples=2 * NUM, alpha=0.1))
    sim = (found.embedding @ found.embedding.T).double()
    level = exact_level(found, bounds_of(found)[0])
    others = sim[~torch.eye(NUM, dtype=torch.bool)].view(NUM, NUM - 1)
    torch.testing.assert_close(level, others.quantile(0.9, dim=1))
    whole = batch_levels(found, 0.1, batch_size=NUM, seed=0)
    torch.testing.assert_close(whole.double(), others.topk(4, dim=1).values[:, -1])
    parts = batch_levels(found, 0.1, batch_size=15, seed=0)
    nearest = (others - parts.double().unsqueeze(1)).abs().argmin(1)
    # a similarity of the anchor
    torch.testing.assert_close(parts.double(), others[torch.arange(NUM), nearest])
    assert bool((parts.double() > others.mean(1)).all()), "one of the largest of its batch"
