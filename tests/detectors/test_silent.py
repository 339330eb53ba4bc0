"""A detector that can flag nothing in a training says why before the first step."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch

from kinfolk.detectors import (
    DETECTORS,
    FNC,
    IFND,
    Cave,
    Components,
    Detector,
    GloFND,
    Guide,
    Hierarchy,
    Known,
    Neighbours,
    Oracle,
    PositiveMargin,
    Ring,
    StartAt,
    Teacher,
)
from kinfolk.errors import KinfolkWarning
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.objectives import NTXentLoss

LABELS, PAIRS, NONE = (
    torch.arange(8) % 2,
    torch.tensor([[0, 1]]),
    torch.zeros(0, 2, dtype=torch.int64),
)
EPOCHS = 20
SILENT: list[tuple[Callable[[], Detector], str]] = [
    (lambda: StartAt(FNC(top_k=1), epoch=20), "starts in epoch 20, counted from 0, of 20"),
    (lambda: StartAt(GloFND(num_samples=8, alpha=0.0), epoch=3), r"`alpha` \(=0\)"),
    (
        lambda: StartAt(Hierarchy(num_samples=8, warmup_epochs=20), epoch=3),
        r"`warmup_epochs` \(=20\) must be below the number of epochs \(=20\)",
    ),
    (lambda: Hierarchy(num_samples=8, warmup_epochs=25), r"`warmup_epochs` \(=25\)"),
    (lambda: Hierarchy(num_samples=8, level=1), r"`level` \(=1\)"),
    (lambda: GloFND(num_samples=8, alpha=0.0), r"`alpha` \(=0\)"),
    (lambda: StartAt(GloFND(num_samples=8, alpha=0.1), epoch=19), "only in the last of 20 epochs"),
    (lambda: IFND(num_samples=8, every=20), r"`every` \(=20\)"),
    (lambda: IFND(num_samples=8, every=200), "no clustering is due in 20 epochs"),
    (
        lambda: IFND(num_samples=8, schedule="constant", source="bank", every=20),
        "no clustering is due",
    ),
    (lambda: IFND(num_samples=8, schedule="step", step_at=1.0, every=3), "no clustering is due"),
    (lambda: IFND(num_samples=8, final_rate=0.0), r"`final_rate` \(=0\.0\)"),
    (lambda: IFND(num_samples=8, final_rate=0.1), "fewer than two of 8 labels"),
    (lambda: Ring(lower=0, upper=1), "holds all negatives"),
    (lambda: Ring(lower=0, upper=1, anneal="linear"), "holds all negatives"),
    (lambda: Known(num_samples=8, pairs=NONE), "lists no pair"),
    (lambda: Known(num_samples=8, pairs=torch.tensor([[3, 3]])), "lists no pair"),
    (lambda: FNC(top_k=2, min_similarity=1.0), r"`min_similarity` \(=1\.0\)"),
    (lambda: Oracle(torch.arange(8)), "no two samples"),
    (lambda: Oracle(torch.full((8,), -1)), "no two samples"),
    (lambda: Cave(num_samples=8, num_clusters=(1, 3)), r"`num_clusters` \(=1\)"),
]
HEARD: list[Callable[[], Detector]] = [
    lambda: StartAt(FNC(top_k=1), epoch=19),
    lambda: StartAt(Hierarchy(num_samples=8, warmup_epochs=10), epoch=15),
    lambda: Hierarchy(num_samples=8, warmup_epochs=19),
    lambda: PositiveMargin(margin=0.1),
    lambda: GloFND(num_samples=8, alpha=0.01),
    lambda: StartAt(GloFND(num_samples=8, alpha=0.1), epoch=19, update_from=18),
    lambda: StartAt(GloFND(num_samples=8, alpha=0.1, init="quantile"), epoch=19),
    lambda: StartAt(GloFND(num_samples=8, alpha=0.1, rule="adam"), epoch=19),
    lambda: IFND(num_samples=8, every=19),
    lambda: IFND(num_samples=8, schedule="constant", every=200),
    lambda: IFND(num_samples=8, schedule="constant", source="bank", every=19),
    lambda: Ring(lower=0, upper=1, draw=2),
    lambda: Ring(lower=0.5, upper=1),
    lambda: Ring(lower=0, upper=0.9),
    lambda: Ring(lower=0, upper=1, num_samples=8, num_clusters=2),
    lambda: Known(num_samples=8, pairs=PAIRS),
    lambda: FNC(min_similarity=0.9),
    lambda: Guide(torch.eye(8), alpha=0.1),
    Teacher,
    Components,
    lambda: Oracle(LABELS),
    lambda: Cave(num_samples=8, num_clusters=3, every=30),
    lambda: Neighbours(num_samples=8, num_clusters=3, every=30),
]


def by_default(name: str) -> Detector:
    made = build_detector(parse(f"simclr+{name}"), Context(8, LABELS), {})
    assert made is not None
    return made


_listed = {type(make()) for make in HEARD}
HEARD += [
    functools.partial(by_default, name) for name, kind in DETECTORS.items() if kind not in _listed
]


def test_a_detector_that_can_flag_nothing_has_a_reason() -> None:
    for make, words in SILENT:
        detector = make()
        detector.set_progress(0, EPOCHS)
        reason = detector.silent_reason()
        assert reason is not None, f"{detector}: {words}"
        assert re.search(words, reason), detector


def test_a_detector_that_can_flag_has_no_reason() -> None:
    for make in HEARD:
        detector = make()
        detector.set_progress(0, EPOCHS)
        assert detector.silent_reason() is None, detector


@pytest.mark.parametrize(
    ("detector", "silent"),
    [
        (GloFND(num_samples=8, alpha=0.5), True),
        (GloFND(num_samples=8, alpha=0.5, init="quantile"), False),
    ],
)
def test_thresholds_that_only_learn_at_the_first_visit_need_two_epochs(
    detector: GloFND, silent: bool
) -> None:
    detector.set_progress(0, 1)
    assert (detector.silent_reason() is not None) is silent
    z1, z2 = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    loss_fn = NTXentLoss(temperature=0.5, detector=detector)
    for ids in torch.split(torch.arange(8), 4):
        loss_fn(z1[ids], z2[ids], ids)
    flagged = int(loss_fn.stats.flagged)
    assert (flagged == 0) is silent


@pytest.mark.parametrize(
    "make",
    [
        lambda alpha: FNC(alpha=alpha),
        lambda alpha: GloFND(num_samples=8, alpha=alpha),
        lambda alpha: Guide(torch.eye(8), alpha=alpha),
        lambda alpha: NTXentLoss(detector=FNC(alpha=alpha)),
    ],
)
def test_an_alpha_that_flags_most_negatives_warns_once(make: Callable[[float], object]) -> None:
    make(0.5)
    with pytest.warns(KinfolkWarning) as warned:
        make(0.75)
    (only,) = warned
    assert "`alpha` (=0.75) flags most of the negatives" in str(only.message)
    assert only.filename == __file__
