"""Transfer: against scikit-learn by hand, the strength chosen inside the training part, metrics,
several labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, balanced_accuracy_score
from sklearn.preprocessing import StandardScaler

from kinfolk.errors import KinfolkError
from kinfolk.evaluation.probes import TRANSFER_STRENGTHS, metric_of, transfer


def blobs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.choice(3, count, p=(0.7, 0.2, 0.1))
    return (
        np.random.default_rng(0).normal(size=(3, 10))[y] + 1.5 * rng.normal(size=(count, 10))
    ).astype(np.float32), y


def test_equals_scikit_learn_by_hand() -> None:
    (x, y), (xt, yt) = blobs(300, 1), blobs(200, 2)
    for strength in (100.0, 0.1):
        found = transfer(x, y, xt, yt, strengths=[strength])
        scaler = StandardScaler().fit(x.astype(np.float64))
        predicted = (
            LogisticRegression(C=1 / strength, max_iter=1000)
            .fit(scaler.transform(x), y)
            .predict(scaler.transform(xt))
        )
        assert found.top1 == pytest.approx((predicted == yt).mean(), abs=0.005)
        assert found.mean_per_class == pytest.approx(
            balanced_accuracy_score(yt, predicted), abs=0.01
        )
        assert math.isnan(found.map)


def test_ten_strengths_chosen_by_the_metric_on_held_out_training_labels() -> None:
    assert pytest.approx(np.logspace(-6, 5, 10)) == TRANSFER_STRENGTHS
    (x, y), (xt, yt) = blobs(150, 1), blobs(200, 2)
    found = transfer(x, y, xt, yt, "mean-per-class")
    assert list(found.held_out) == pytest.approx(sorted(TRANSFER_STRENGTHS, reverse=True))
    assert found.strength == max(
        strength
        for strength, value in found.held_out.items()
        if value == max(found.held_out.values())
    )
    assert found.accuracy == found.mean_per_class
    shuffled = transfer(x, y, xt, np.random.default_rng(3).permutation(yt), "mean-per-class")
    assert (shuffled.strength, shuffled.held_out) == (found.strength, found.held_out)


def test_several_labels_are_ranked_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x, xt = (
        rng.normal(size=(200, 8)).astype(np.float32),
        rng.normal(size=(150, 8)).astype(np.float32),
    )
    directions = rng.normal(size=(8, 3))
    y, yt = (
        ((part @ directions + rng.normal(size=(len(part), 3))) > 0.5).astype(np.int64)
        for part in (x, xt)
    )
    y[:30, 1], yt[0] = -1, -1
    found = transfer(x, y, xt, yt, "map", strengths=[1.0])
    scaler = StandardScaler().fit(x[30:])
    ranker = LogisticRegression(C=1.0).fit(scaler.transform(x[30:]), y[30:, 1])
    second = average_precision_score(yt[1:, 1], ranker.decision_function(scaler.transform(xt[1:])))
    lone = transfer(x, y[:, 1:2], xt, yt[:, 1:2], "map", strengths=[1.0])
    assert lone.map == pytest.approx(second, abs=1e-3)
    assert 0.6 < found.map < 1
    assert 0.6 < found.map_11 < 1
    assert math.isnan(found.top1)
    assert transfer(x, y, xt, yt, "map").held_out
    with pytest.raises(ValueError, match="must be map"):
        transfer(x, y, xt, yt, "top1")
    with pytest.raises(KinfolkError, match="some samples have and others do not"):
        transfer(x, np.ones_like(y), xt, yt, "map")


def test_map_of_single_labels() -> None:
    (x, y), (xt, yt) = blobs(200, 1), blobs(200, 2)
    found = transfer(x, y, xt, yt, "map", strengths=[1.0])
    assert found.accuracy == found.map
    assert 0.4 < found.map < 1


def test_the_metric_goes_by_the_name() -> None:
    for name, metric in [
        ("data/oxford-iiit-pet", "mean-per-class"),
        ("PETS.npz", "mean-per-class"),
        ("caltech-101/", "mean-per-class"),
        ("flowers102", "mean-per-class"),
        ("fgvc_aircraft", "mean-per-class"),
        ("voc/VOC2007.csv", "map"),
        ("voc2007", "map"),
        ("food-101", "top1"),
        ("cifar-10-python.tar.gz", "top1"),
        ("carpets", "top1"),
        ("pets/cifar", "top1"),
    ]:
        assert metric_of(name) == metric


def test_odd_labels_and_wrong_use() -> None:
    (x, y), (xt, yt) = blobs(60, 1), blobs(60, 2)
    with pytest.raises(
        KinfolkError, match=r"at least two classes, .* 60 labelled training samples"
    ):
        transfer(x, np.full(60, 2), xt, yt)
    one_each = np.array([np.flatnonzero(y == label)[0] for label in range(3)])
    few = transfer(x[one_each], y[one_each], xt, yt)
    assert few.held_out == {}
    unlabelled = transfer(np.concatenate((x, xt)), np.concatenate((y, np.full(60, -1))), xt, yt)
    assert unlabelled == transfer(x, y, xt, yt)
    with pytest.raises(ValueError, match="`metric`"):
        transfer(x, y, xt, yt, "top2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`strengths`"):
        transfer(x, y, xt, yt, strengths=[])


def test_every_spelling_of_a_name() -> None:
    for name, metric in [
        *(
            (name, "mean-per-class")
            for name in (
                "oxfordpets",
                "OxfordIIITPet",
                "oxford_iiit_pet.csv",
                "data/Oxford-Pets/",
                "PetImages",
                "pet",
            )
        ),
        *(
            (name, "mean-per-class")
            for name in (
                "oxfordflowers",
                "OxfordFlowers102",
                "102flowers.npz",
                "vggflowers",
                "Flowers102",
                "flower",
            )
        ),
        *(
            (name, "mean-per-class")
            for name in ("FGVCAircraft", "fgvc-aircraft-2013b", "caltech101", "Caltech_101")
        ),
        *(
            (name, "map")
            for name in ("VOCdevkit", "pascalvoc", "PascalVOC2007", "voc07", "VOCDetection")
        ),
        *(
            (name, "top1")
            for name in (
                "carpets",
                "trumpets",
                "pets/cifar10",
                "wildflowersong",
                "advocate",
                "stanford-cars",
                "",
            )
        ),
    ]:
        assert metric_of(name) == metric
