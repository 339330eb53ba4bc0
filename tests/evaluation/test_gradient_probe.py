"""Probes by gradient descent at the papers' settings: as good as L-BFGS on the bundled digits, and
their rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kinfolk.cli.eval import PROBES as OFFERED
from kinfolk.data.open_source import digits
from kinfolk.errors import KinfolkError
from kinfolk.evaluation.gradient_training import (
    PROBES,
    ProbeSettings,
    gradient_probe,
    label_subset,
    rate_factor,
)
from kinfolk.evaluation.probes import linear_probe

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def features() -> Parts:
    """Random convolutional features of the digits: 64 numbers, as an encoder that has not learnt
    would give."""
    source = digits()
    pixels = (
        torch.from_numpy(np.stack([source.load(i) for i in range(len(source.items()))]))
        .float()
        .reshape(-1, 1, 8, 8)
        / 255
    )
    layer = torch.nn.functional.relu(
        torch.nn.functional.conv2d(
            pixels, torch.randn(16, 1, 3, 3, generator=torch.Generator().manual_seed(0))
        )
    )
    x = torch.nn.functional.adaptive_avg_pool2d(layer, 3).flatten(1).numpy()
    y = np.array([item.label for item in source.items()])
    train = np.array([item.split == "train" for item in source.items()])
    return x[train], y[train], x[~train], y[~train]


@pytest.mark.parametrize("name", PROBES)
def test_agrees_with_lbfgs_within_a_point(name: str, features: Parts) -> None:
    fast = linear_probe(*features).accuracy
    assert fast > 0.9
    assert gradient_probe(*features, name).accuracy == pytest.approx(fast, abs=0.01)


def test_a_gradient_probe_agrees_with_lbfgs_on_few_labels(features: Parts) -> None:
    fast = slow = 0.0
    for seed in (0, 1):
        used = label_subset(features[1], 0.1, seed)
        few = features[0][used], features[1][used], *features[2:]
        fast += linear_probe(*few, seed=seed).accuracy / 2
        slow += gradient_probe(*few, "glofnd", fraction=0.1, seed=seed).accuracy / 2
    assert slow == pytest.approx(fast, abs=0.02)


def test_epochs_and_rates_are_those_of_the_papers() -> None:
    assert [PROBES["glofnd"].epochs_of(fraction, 5000) for fraction in (1, 0.1, 0.01, 0.001)] == [
        90,
        285,
        900,
        900,
    ]
    assert [PROBES["ifnd"].epochs_of(fraction, 5000) for fraction in (1, 0.01)] == [100, 100]
    steps = [rate_factor(PROBES["ifnd"].decay, epoch, 100) for epoch in (0, 59, 60, 80)]
    assert steps == pytest.approx([1, 1, 0.1, 0.01])
    assert rate_factor(PROBES["ring"].decay, 99, 100) == 1
    cosine = [rate_factor("cosine", epoch, 20) for epoch in (0, 10, 20)]
    assert cosine == pytest.approx([1, 0.5, 0])
    rcl = PROBES["rcl"]
    assert (rcl.optimizer, rcl.lr, rcl.nesterov, rcl.batch_size, rcl.decay) == (
        "lars",
        1.0,
        True,
        4096,
        "cosine",
    )
    assert [rcl.epochs_of(1, num) for num in (1_281_167, 5000, 100)] == [90, 150, 300], (
        "at least 300 steps"
    )
    assert ("lbfgs", *PROBES) == OFFERED


def test_top5_is_measured_with_more_than_five_classes(features: Parts) -> None:
    train_x, train_y, test_x, test_y = (part[:200] for part in features)
    quick = ProbeSettings("sgd", 1.0, 64, 5, 1.0)
    five, of_five = train_y < 5, test_y < 5
    few = train_x[five], train_y[five], test_x[of_five], test_y[of_five]
    for probe, settings in (
        (linear_probe, {"strengths": (0.1,)}),
        (gradient_probe, {"settings": quick}),
    ):
        found = probe(train_x, train_y, test_x, test_y, **settings)
        assert found.accuracy < found.top5 <= 1
        assert math.isnan(probe(*few, **settings).top5), "of five classes there is none"


def test_a_gradient_probe_is_seeded(features: Parts) -> None:
    train_x, train_y, test_x, test_y = features[0][:80], features[1][:80], features[2], features[3]
    quick = ProbeSettings("sgd", 1.0, 32, 4, "cosine")
    once = gradient_probe(train_x, train_y, test_x, test_y, quick)
    assert gradient_probe(train_x, train_y, test_x, test_y, quick) == once
    assert gradient_probe(train_x, train_y, test_x, test_y, quick, seed=1) != once


def test_unlabelled_samples_and_wrong_use(features: Parts) -> None:
    train_x, train_y, test_x, test_y = (part[:60] for part in features)
    quick = ProbeSettings("sgd", 1.0, 32, 4, 1.0)
    more = np.concatenate((train_x, test_x)), np.concatenate((train_y, np.full(60, -1)))
    assert gradient_probe(*more, test_x, test_y, quick) == gradient_probe(
        train_x, train_y, test_x, test_y, quick
    )
    with pytest.raises(KinfolkError, match="at least two classes"):
        gradient_probe(train_x, np.full(60, 3), test_x, test_y, quick)
    with pytest.raises(ValueError, match=r"`settings` \(='sgd'\)"):
        gradient_probe(train_x, train_y, test_x, test_y, "sgd")
