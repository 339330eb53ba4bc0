"""The verdict: what was measured, what is worth a try, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.auditing import verdict as rules
from kinfolk.auditing.verdict import Provenance, verdict
from kinfolk.frameworks.registry import parse
from tests.auditing.test_run_audit import clustered

OWN = Provenance("photos/", encoder="the encoder of the run runs/x", same_samples=True)
FOREIGN = Provenance("photos/", encoder="timm/x", guide="timm/x")


def features(noise: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(400) % 10
    return np.eye(10)[labels] + noise * random.normal(size=(400, 10)), labels


def method_of(command: str) -> str:
    return command.split("--method ")[1].split()[0]


def test_the_source_quotes_no_study() -> None:
    source = Path(rules.__file__).read_text(encoding="utf-8")
    assert not re.search(r"GTSRB|gained|points|seeds|do not use", source)


def test_with_labels_the_share_is_theirs() -> None:
    x, labels = clustered(600, dim=24, clusters=10)
    found = kf.audit(x, 0.02, labels)
    decided = verdict(found)
    (line,) = [line for line in found.batches if line.batch_size == 256]
    assert (
        f"Each anchor has {line.per_anchor:.1f} false negatives among its 510 negatives"
        in decided.amount
    )
    assert "by the labels)" in decided.amount
    assert "CIFAR-10 has 10.0%" in decided.amount
    assert (
        decided.alpha
        == f"Suggested α: {found.best_alpha:g}, where F1 is highest with these labels."
    )
    assert (
        decided.precision
        == f"At α = 0.02, {found.precision:.0%} of the flagged pairs are right by the labels."
    )


def test_labels_of_a_part_give_an_interval() -> None:
    x, labels = clustered(600, dim=24, clusters=10)
    labels[np.random.default_rng(0).permutation(600)[200:]] = -1
    found = kf.audit(x, 0.02, labels)
    low, high = found.kin_share_range
    assert (
        f"of 200 samples; if these are a random part, the 95% interval is {low:.2%} to {high:.2%}"
        in verdict(found).amount
    )


def test_without_labels_no_share_of_false_negatives_is_claimed() -> None:
    x, _ = clustered(800, dim=24, clusters=20)
    found = kf.audit(x, 0.02)
    decided = verdict(found, FOREIGN)
    assert decided.amount.startswith(
        f"At least {found.outstanding.share:.2%} of all pairs stand out"
    )
    assert "How many negatives are false is unknown without labels" in decided.amount
    assert (
        decided.alpha
        == f"Suggested α: {found.suggested_alpha:g}, the share of pairs that stands out."
    )
    assert (
        f"at least {found.outstanding.at(0.02):.0%} of the flagged pairs stand out"
        in decided.precision
    )
    assert "interval" not in " ".join(decided.sentences)


def test_noise_is_called_noise() -> None:
    found = kf.audit(np.random.default_rng(0).normal(size=(1000, 64)), 0.01)
    decided = verdict(found, FOREIGN)
    assert decided.amount.startswith("No pairs stand out clearly from unrelated ones")
    assert decided.alpha == "No α is suggested, because no pairs stand out clearly."
    assert "hardly more than chance explains" in decided.precision
    assert "these features tell little" in decided.advice
    assert not any("detector.alpha" in command for _, command in decided.commands)


def test_two_or_three_methods_are_worth_a_try_and_nothing_is_promised() -> None:
    x, labels = features(0.3)
    decided = verdict(
        kf.audit(x, 0.02, labels), Provenance("my photos/", encoder="timm/x", guide="timm/x")
    )
    assert [method_of(command) for _, command in decided.commands] == [
        "simclr",
        "simclr+glofnd",
        "simclr+guide:attract",
    ]
    assert all(
        command.startswith("kinfolk train --data 'my photos/' ") for _, command in decided.commands
    )
    assert "--guide timm/x --set detector.alpha=" in decided.commands[2][1]
    assert "has not been measured" in decided.advice
    assert {parse(method_of(command)).framework for _, command in decided.commands} == {"simclr"}


def test_own_features_are_named_and_patches_are_offered_instead_of_them() -> None:
    x, labels = features(0.1)
    decided = verdict(kf.audit(x, 0.02, labels), OWN)
    assert "trained on the same samples" in decided.advice
    assert decided.commands[2][1].endswith("--method simclr+guide:attract --guide patches")


def test_features_of_unknown_origin_are_named_as_such() -> None:
    x, labels = features(0.1)
    decided = verdict(kf.audit(x, 0.02, labels))
    assert decided.advice.startswith("The origin of these features is unknown.")
    assert "--guide FEATURES.npy" in decided.commands[2][1]


def test_labels_of_the_data_are_offered_as_pairs() -> None:
    x, labels = features(0.1)
    origin = Provenance("photos/", labels_from_folders=True, has_labels=True, same_samples=True)
    _, command = verdict(kf.audit(x, 0.02, labels), origin).commands[-1]
    assert (
        command
        == "kinfolk train --data photos/ --labels-from-folders --out runs/supervised --method"
        " simclr+oracle:attract"
    )


def test_features_that_do_not_know_the_labels_are_weak() -> None:
    x, _ = features(0.1)
    labels = np.random.default_rng(9).integers(0, 10, 400)
    decided = verdict(kf.audit(x, 0.02, labels), Provenance("photos/", encoder="timm/x"))
    assert "hardly better than chance" in decided.advice
    assert any("kinfolk advise photos/ --guide" in command for _, command in decided.commands)


def test_image_and_text_get_their_own_methods_and_negatives() -> None:
    x, labels = features(0.2)
    origin = Provenance(
        "train.csv",
        encoder="the encoder of the run runs/clip",
        same_samples=True,
        framework="fastclip",
        captions=True,
    )
    decided = verdict(kf.audit(x, 0.02, labels, views=1), origin)
    assert "among its 255 negatives" in decided.amount
    assert [method_of(command) for _, command in decided.commands] == [
        "fastclip",
        "fastclip+glofnd",
        "fastclip+fnc",
    ]
    assert "patches" not in " ".join(command for _, command in decided.commands)
    settings = [
        command.partition("--set detector.")[2].partition("=")[0]
        for _, command in decided.commands[1:]
    ]
    assert settings == ["alpha", "alpha"]


@pytest.mark.parametrize(
    ("alpha", "warns"), [(0.01, False), (0.4, False), (0.5, True), (0.9, True)]
)
def test_an_alpha_that_flags_most_negatives_warns(alpha: float, warns: bool) -> None:
    x, _ = features(0.2)
    assert ("flags most negatives" in verdict(kf.audit(x, alpha)).alpha) == warns


def test_no_alpha_is_suggested_at_which_most_flags_are_wrong() -> None:
    x, labels = features(0.45)
    limited = kf.audit(x, 0.02, labels)
    assert limited.best_alpha is not None
    at = {point.alpha: point for point in limited.curve.points}
    highest = max(at.values(), key=lambda point: point.f1)
    assert highest.precision < 0.5 <= at[limited.best_alpha].precision
    assert limited.best_alpha == max(alpha for alpha, point in at.items() if point.precision >= 0.5)
    decided = verdict(limited, FOREIGN)
    assert (
        f"Suggested α: {limited.best_alpha:g}, the largest at which at least half" in decided.alpha
    )
    assert f"detector.alpha={limited.best_alpha:g}" in decided.commands[1][1]

    x, labels = features(0.6)
    weak = kf.audit(x, 0.02, labels)
    assert weak.precision < 0.5
    assert weak.best_alpha is None
    decided = verdict(weak, FOREIGN)
    assert decided.alpha.startswith("No α is suggested, because at every α most")
    assert [method_of(command) for _, command in decided.commands] == [
        "simclr",
        "simclr+guide:attract",
    ]
    assert not any("detector.alpha" in command for _, command in decided.commands)
