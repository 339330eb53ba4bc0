"""The verdict: amount, advice and commands follow from the audit and from the study."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.auditing import verdict as rules
from kinfolk.auditing.verdict import STUDY, Measured, Provenance, recommend, standing_out, verdict
from kinfolk.frameworks.registry import parse
from tests.auditing.test_run_audit import clustered

OWN = Provenance("photos/", encoder="the encoder of the run runs/x", own=True)
RESULTS = Path(__file__).parents[2] / "docs" / "results.md"
ROWS = {
    ("labels", "attract"): "simclr+oracle:attract",
    ("labels", "eliminate"): "simclr+oracle",
    ("another model", "attract"): r"simclr\+known:attract \(guide, [^)]*\)",
    ("patches", "attract"): r"simclr\+guide:attract \(patches, 10 %\)",
    ("own encoder", "attract"): r"simclr\+known:attract \(own, [^)]*\)",
    ("own encoder", "eliminate"): "simclr+ifnd",
}


def features(noise: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(400) % 10
    return np.eye(10)[labels] + noise * random.normal(size=(400, 10)), labels


def method_of(command: str) -> str:
    return command.split("--method ")[1].split()[0]


@pytest.mark.parametrize("row", STUDY, ids=lambda row: f"{row.source}, {row.action}, {row.data}, {row.precision}")
def test_the_figures_are_those_of_the_results_page(row: Measured) -> None:
    """Up to the noise between seeds, so that a few more seeds in the study need no new table here."""
    section = RESULTS.read_text(encoding="utf-8").split(f"<!-- table {row.data.lower().replace('-', '')} -->")[1].split("<!-- end -->")[0]
    name = ROWS[row.source, row.action]
    wanted = name if "\\" in name else re.escape(name)
    found = [line.split("|") for line in section.splitlines() if re.match(rf"\| `{wanted}` \|", line)]
    figures = [
        (float(cells[7].replace("−", "-")), *(float(cell) / 100 for cell in cells[11:13])) for cells in found if cells[12].strip() != "–"
    ]
    near = [gain for gain, precision, recall in figures if abs(precision - row.precision) < 0.02 and abs(recall - row.recall) < 0.05]
    assert near, figures
    assert min(abs(gain - row.gain) for gain in near) <= 2


@pytest.mark.parametrize(
    ("source", "share", "precision", "measured", "action"),
    [
        ("another model", 0.036, 0.14, True, "attract"),  # as on GTSRB with the nearest tenth
        ("another model", 0.1, 0.15, True, "other pairs"),  # hardly above chance
        ("another model", 0.01, 0.08, True, "other pairs"),  # below all that was measured
        ("another model", 0.05, 0.9, False, "attract"),
        ("another model", 0.05, 0.2, False, "other pairs"),
        ("own encoder", 0.05, 0.95, True, "other pairs"),
        ("labels", 0.05, 0.05, True, "attract"),
        ("another model", 0.001, 0.9, True, "none"),
    ],
)
def test_the_rule(source: rules.Source, share: float, precision: float, measured: bool, action: str) -> None:
    assert recommend(source, share, precision, measured) == action


def test_the_rule_agrees_with_the_study() -> None:
    """Whatever it advises to attract gained, and what it advises against gained less than a point."""
    for row in STUDY:
        if row.action == "attract":
            advised = recommend(row.source, 0.036 if row.data == "GTSRB" else 0.1, row.precision, True) == "attract"
            assert (row.gain > 1) == advised, row


def test_the_pairs_of_another_model_are_attracted_as_far_as_the_study_goes(tmp_path: Path) -> None:
    x, labels = features(0.3)
    path = tmp_path / "features.npy"
    np.save(path, x)
    decided = verdict(kf.audit(x, 0.02, labels), Provenance("my photos/", guide=str(path), encoder="timm/resnet50"))
    assert decided.action == "attract"
    purpose, command = decided.commands[0]
    assert purpose == "Next"
    assert command.startswith(f"kinfolk train --data 'my photos/' --out runs/guided --method simclr+guide:attract --guide {path} --set ")
    assert command.endswith("detector.alpha=0.1")
    assert "17.1 points on GTSRB and 4.5 points on CIFAR-10" in decided.advice
    (other,) = (command for _, command in decided.commands if "framework.prior=" in command)
    assert float(other.rpartition("=")[2]) == pytest.approx(0.098, abs=0.003), "a prior is suggested beside a good guide"
    assert {parse(method_of(command)).framework for _, command in decided.commands} == {"simclr"}


def test_features_of_unknown_origin_are_taken_for_another_models_with_a_condition() -> None:
    x, labels = features(0.1)
    decided = verdict(kf.audit(x, 0.02, labels))
    assert decided.action == "attract"
    assert "if these features come from a model that was not trained on these images" in decided.advice
    assert "--guide FEATURES.npy" in decided.commands[0][1]


def test_own_pairs_are_not_used_however_precise() -> None:
    x, labels = features(0.1)
    found = kf.audit(x, 0.02, labels)
    assert found.precision > 0.9
    decided = verdict(found, OWN)
    assert decided.action == "other pairs"
    assert "gained nothing" in decided.advice
    assert decided.commands[0][1].endswith("--method simclr+guide:attract --guide patches")
    assert any("kinfolk advise photos/ --guide" in command for _, command in decided.commands)


def test_labels_of_the_data_are_offered_as_pairs() -> None:
    x, labels = features(0.1)
    origin = Provenance("photos/", labels_from_folders=True, has_labels=True, own=True)
    purpose, command = verdict(kf.audit(x, 0.02, labels), origin).commands[-1]
    assert "27.3 points on GTSRB" in purpose
    assert command == "kinfolk train --data photos/ --labels-from-folders --out runs/supervised --method simclr+oracle:attract"


def test_weak_features_are_no_guide() -> None:
    x, _ = features(0.1)
    labels = np.random.default_rng(9).integers(0, 10, 400)
    decided = verdict(kf.audit(x, 0.02, labels), Provenance("photos/", encoder="timm/x"))
    assert decided.action == "other pairs"
    assert "hardly better than chance" in decided.advice


def test_amount_and_alpha() -> None:
    x, labels = clustered(600, dim=24, clusters=10)
    found = kf.audit(x, 0.02, labels)
    decided = verdict(found)
    (line,) = [line for line in found.batches if line.batch_size == 256]
    assert f"each anchor has {line.per_anchor:.1f} false negatives among 510 negatives" in decided.amount
    assert "many, about as in CIFAR-10" in decided.amount
    low, high = found.suggested_range
    assert low <= found.suggested_alpha <= high
    assert f"interval {low:g} to {high:g}" in decided.alpha
    assert decided.precision == f"At α = 0.02, {found.precision:.0%} of the flagged pairs are right by the labels."


def test_few_false_negatives_need_no_detector() -> None:
    x = np.random.default_rng(0).normal(size=(600, 24))
    decided = verdict(kf.audit(x, 0.01, np.arange(600) // 2))
    assert "few, about as in ImageNet-1k" in decided.amount
    assert decided.action == "none"
    assert [command.endswith("--method simclr") for _, command in decided.commands] == [True]


@pytest.mark.parametrize(
    ("alpha", "level", "expected"), [(0.5, 0.0, 0.0), (0.16, 1.0, 1 - 0.158655 / 0.16), (0.1, 6.0, 1.0), (0.01, 1.0, 0.0)]
)
def test_what_stands_out_is_the_excess_over_a_normal_distribution(alpha: float, level: float, expected: float) -> None:
    assert standing_out(alpha, level) == pytest.approx(expected, abs=1e-5)


def test_without_labels_no_precision_is_claimed() -> None:
    x, _ = clustered(800, dim=24, clusters=20)
    clear, noise = kf.audit(x, 0.02), kf.audit(np.random.default_rng(0).normal(size=(800, 24)), 0.02)
    assert standing_out(0.02, clear.survey.level) > 0.8 > 0.5 > standing_out(0.02, noise.survey.level)
    decided = verdict(clear, Provenance("photos/", encoder="timm/x", guide="timm/x"))
    assert "How many are right is unknown without labels" in decided.precision
    assert decided.action == "attract"
    assert f"--guide timm/x --set detector.alpha={min(clear.suggested_alpha, 0.1):.2g}" in decided.commands[0][1]
    assert verdict(noise, OWN).action in ("none", "other pairs")


@pytest.mark.parametrize(("noise", "action"), [(0.2, "attract"), (3.0, "other pairs")])
def test_pairs_of_patches_are_judged_by_their_own_rows(noise: float, action: str) -> None:
    x, labels = features(noise)
    found = verdict(kf.audit(x, 0.05, labels), Provenance("photos/", encoder="k-means of patches of these images", guide="patches"))
    assert found.action == action
    assert "another model gained" not in found.advice
    if action == "attract":
        assert "Attracting the pairs of patches gained up to 13.3 points on GTSRB" in found.advice
        assert "--guide patches --set detector.alpha=" in found.commands[0][1]
    else:
        assert found.advice.endswith("Attract those of another model.")
        assert not any("--guide patches" in command for _, command in found.commands)
