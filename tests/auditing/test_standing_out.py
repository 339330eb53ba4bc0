"""What stands out: nothing in noise, a lower bound in clusters; the share of equal labels has an
interval that covers it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kinfolk as kf
from kinfolk.auditing.similarities import CLEAR, kin_share, kin_share_range
from kinfolk.auditing.verdict import verdict
from tests.auditing.test_run_audit import clustered

Array = np.ndarray[Any, Any]
random = np.random.default_rng(0)
NOISE = random.normal(size=(1000, 64))


def principal(x: Array, number: int) -> Array:
    centred = x - x.mean(0)
    return np.asarray(centred @ np.linalg.svd(centred, full_matrices=False)[2][:number].T)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(NOISE, id="normal"),
        pytest.param(NOISE + 3, id="far from the origin"),
        pytest.param(NOISE * np.geomspace(1, 0.01, 64), id="anisotropic"),
        pytest.param(principal(NOISE * np.geomspace(1, 0.01, 64), 16), id="after PCA"),
        pytest.param(np.maximum(NOISE, 0), id="ReLU"),
        pytest.param(random.standard_t(3, size=(1000, 64)), id="heavy tails"),
        pytest.param(random.normal(size=(300, 2048)), id="more dimensions than samples"),
        pytest.param(random.normal(size=(60, 8)), id="few samples"),
    ],
)
def test_nothing_stands_out_of_noise(x: Array) -> None:
    found = kf.audit(x, 0.02)
    assert found.outstanding.share < 1e-3
    assert found.suggested_alpha is None
    assert found.outstanding.at(0.02) < 0.05


@pytest.mark.parametrize(("clusters", "dim"), [(20, 32), (50, 48), (10, 16)])
def test_at_least_some_of_the_kin_in_clusters_stand_out(clusters: int, dim: int) -> None:
    x, labels = clustered(1500, dim=dim, clusters=clusters)
    found = kf.audit(x, 0.01, labels)
    assert 0.25 * found.kin_share < found.outstanding.share <= found.kin_share


@pytest.mark.parametrize("alpha", [0.003, 0.04, 0.4])
def test_the_suggested_share_is_never_below_what_stands_out_of_the_flagged_pairs(
    alpha: float,
) -> None:
    x, _ = clustered(900, dim=24, clusters=20)
    found = kf.audit(x, alpha).outstanding
    assert max(found.stands) >= CLEAR
    assert alpha * found.at(alpha) <= 1.1 * found.share, "rounded down to two digits"


CORRELATED = NOISE * np.geomspace(1, 0.05, 64) @ np.linalg.qr(random.normal(size=(64, 64)))[0]
HIDDEN = np.maximum(NOISE @ random.normal(size=(64, 256)), 0)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.maximum(CORRELATED, 0), id="ReLU of correlated values"),
        pytest.param(HIDDEN, id="wide layer"),
        pytest.param(np.maximum(HIDDEN @ random.normal(size=(256, 64)), 0), id="two layers"),
        pytest.param(
            np.maximum(NOISE @ random.normal(size=(64, 1024)), 0),
            id="wider than decoys are made for",
        ),
    ],
)
def test_activations_of_noise_have_no_share(x: Array) -> None:
    found = kf.audit(x, 0.01)
    assert found.outstanding.share == 0
    assert max(found.outstanding.stands) < 0.35, "well below what is clear"
    assert "cannot tell" in verdict(found).amount


def test_the_amount_and_the_suggested_alpha_agree() -> None:
    x, _ = clustered(900, dim=24, clusters=20)
    for features in (x, NOISE, HIDDEN):
        found = kf.audit(features, 0.01)
        words = verdict(found)
        said = re.search(r"At least ([\d.]+)% of all pairs", words.amount)
        if said is None:
            assert found.suggested_alpha is None
            assert "No α is suggested" in words.alpha
        else:
            assert found.suggested_alpha == pytest.approx(float(said[1]) / 100)
            assert f"Suggested α: {found.suggested_alpha:g}," in words.alpha


@pytest.mark.parametrize("labelled", [False, True])
def test_the_advice_does_not_depend_on_the_alpha_of_the_audit(labelled: bool) -> None:
    x, labels = clustered(900, dim=24, clusters=20)
    given = labels if labelled else None
    decided = [verdict(kf.audit(x, alpha, given)) for alpha in (0.01, 0.4)]
    assert decided[0].advice == decided[1].advice
    assert decided[0].commands == decided[1].commands
    assert len(decided[0].commands) > 2
    assert "tell little" in verdict(kf.audit(NOISE, 0.01, labels=[*range(20)] * 50)).advice


def test_a_part_of_the_labels_gives_an_interval_that_covers_the_share() -> None:
    draw = np.random.default_rng(0)
    sizes = np.geomspace(1, 30, 43)
    labels = draw.choice(43, 3000, p=sizes / sizes.sum())
    covered = 0
    for _ in range(200):
        part = np.full(3000, -1)
        chosen = draw.choice(3000, 200, replace=False)
        part[chosen] = labels[chosen]
        low, high = kin_share_range(part)
        covered += low <= kin_share(labels) <= high
        assert high / low < 3
    assert covered / 200 >= 0.92
    assert kin_share_range(labels) == pytest.approx((kin_share(labels),) * 2)


def test_labels_that_all_differ_bound_the_share_from_above() -> None:
    low, high = kin_share_range(np.asarray([*range(100), *[-1] * 900]))
    assert low == 0
    assert high == pytest.approx(3.69 / 4950, rel=0.01)
