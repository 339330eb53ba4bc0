"""False negatives over a data set: against slow loops, blocks, levels, unlabelled samples, odd
label sets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import FNC, GloFND, Oracle, PositiveMargin
from kinfolk.errors import KinfolkError
from kinfolk.evaluation import detection
from kinfolk.evaluation.detection import (
    detection_quality,
    kin_similarity,
    mtpr_mtnr,
    threshold_error,
)
from kinfolk.pairs import Block, Kin
from tests.reference import kin as slow


def embedded(num: int = 14, views: int = 2, seed: int = 0) -> Tensor:
    z = torch.randn(
        num, views, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.nn.functional.normalize(z + z[:, :1], dim=2)


LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, -1, -1, 0, 1])


@pytest.mark.parametrize("views", [1, 2, 3])
def test_equal_to_the_slow_loops(views: int) -> None:
    z = embedded(views=views)
    level = slow.thresholds(z.float(), 0.2)
    found = detection_quality(z, LABELS, 0.2)
    assert found.rule is None
    torch.testing.assert_close(found.thresholds, torch.tensor(level), atol=1e-5, rtol=0)
    expected = slow.judged(z, LABELS.tolist(), lambda i, _, similarity: similarity > level[i])
    assert found.exact.metrics() == pytest.approx(expected, abs=1e-6)


def test_a_detector_with_learned_thresholds() -> None:
    z = embedded()
    detector = GloFND(num_samples=len(z), alpha=0.1).eval()
    detector.store.threshold.copy_(torch.linspace(-0.4, 1, len(z)))
    found = detection_quality(z, LABELS, 0.1, detector.find)
    assert found.rule is not None
    own = detector.thresholds.tolist()
    expected = slow.judged(
        z, LABELS.tolist(), lambda i, _, similarity: similarity > own[i] and own[i] < 1
    )
    assert found.rule.metrics() == pytest.approx(expected, abs=1e-6)


def test_the_oracle_and_several_levels() -> None:
    z, oracle = embedded(), Oracle(LABELS).eval()
    right = detection_quality(z, LABELS, 0.1, oracle.find).rule
    assert right is not None
    figures = right.metrics()
    assert [
        figures[name] for name in ("precision", "recall", "f1", "anchor_f1", "mtpr", "mtnr")
    ] == [1.0] * 6
    halved = detection_quality(z, LABELS, 0.1, lambda block: (oracle.find(block), Kin())).rule
    assert halved is not None
    assert halved.rates.mtpr == 1, "of the first level, as in the metrics log"
    assert halved.stats.recall == 0.5
    assert 0.5 < halved.stats.anchor_recall < 1, "of both; a sample alone in its class counts 1"


def test_pseudo_labels_have_the_rates_of_their_counts() -> None:
    pseudo = torch.randint(0, 3, (14,), generator=torch.Generator().manual_seed(1))
    detector = Oracle(pseudo).eval()
    found = detection_quality(embedded(), LABELS, 0.1, detector.find).rule
    assert found is not None
    assert (found.rates.mtpr, found.rates.mtnr) == pytest.approx(mtpr_mtnr(pseudo, LABELS))


def test_quality_in_blocks_and_of_chosen_anchors_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z, detector = embedded(40), FNC(alpha=0.1).eval()
    labels = torch.arange(40) % 3
    whole = detection_quality(z, labels, 0.1, detector.find)
    monkeypatch.setattr(detection, "_BLOCK_ELEMENTS", 1000)
    blocked = detection_quality(z, labels, 0.1, detector.find)
    assert whole.rule is not None
    assert blocked.rule is not None
    assert blocked.rule.metrics() == pytest.approx(whole.rule.metrics())
    assert blocked.exact.metrics() == pytest.approx(whole.exact.metrics())
    chosen = torch.tensor([3, 17, 39])
    torch.testing.assert_close(
        detection_quality(z, labels, 0.1, anchors=chosen).thresholds, whole.thresholds[chosen]
    )


def test_one_class_or_no_kin_or_no_labels_give_nan() -> None:
    z = embedded(5)
    one = detection_quality(z, torch.zeros(5, dtype=torch.int64), 0.3).exact
    assert one.stats.precision == 1
    assert math.isnan(one.rates.mtnr)
    apart = detection_quality(z, torch.arange(5), 0.3).exact
    assert apart.stats.precision == 0
    assert math.isnan(apart.stats.recall)
    assert math.isnan(apart.rates.mtpr)
    unknown = detection_quality(z, torch.full((5,), -1), 0.3).exact
    assert unknown.stats.share > 0
    assert math.isnan(unknown.stats.precision)
    with pytest.raises(KinfolkError, match="at least two"):
        detection_quality(z[:1], torch.zeros(1, dtype=torch.int64), 0.3)
    with pytest.raises(ValueError, match=r"`alpha` \(=0\)"):
        detection_quality(z, torch.arange(5), 0)
    with pytest.raises(ValueError, match="`embeddings`"):
        detection_quality(z[:, 0], torch.arange(5), 0.1)


@pytest.mark.parametrize("views", [1, 2])
def test_similarities_of_kin_and_others_equal_slow_loops(views: int) -> None:
    z = embedded(views=views)
    assert kin_similarity(3 * z, LABELS) == pytest.approx(
        slow.similarities(z, LABELS.tolist()), nan_ok=True
    )
    alone = kin_similarity(z, torch.arange(14))
    assert math.isnan(alone.false_negative)
    assert math.isnan(kin_similarity(z, torch.zeros(14)).true_negative)


def test_threshold_error_has_mae_rmse_and_bias() -> None:
    learned, exact = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.5, 0.5])
    found = threshold_error(learned, exact)
    assert found.mae == pytest.approx(0.5 / 3)
    assert found.rmse == pytest.approx(math.sqrt(0.17 / 3))
    assert found.bias == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one shape"):
        threshold_error(learned, exact[:2])


@pytest.mark.parametrize("views", [1, 2])
def test_a_rule_sees_the_similarity_of_the_positives(views: int) -> None:
    """Of another tower with one view, or of the other view of the same tower."""
    draw = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(6, views, 3, generator=draw), dim=2)
    other = None if views == 2 else torch.randn(6, 1, 3, generator=draw)
    candidates = z if other is None else torch.nn.functional.normalize(other, dim=2)
    seen: list[Block] = []

    def find(block: Block) -> Kin:
        seen.append(block)
        return PositiveMargin(margin=0.2).find(block)

    found = detection_quality(z, torch.arange(6) % 2, 0.1, find, candidates=other)
    positive = (z * candidates.flip(1)).sum(2).flatten()
    shown = [block.pos_RP for block in seen if block.pos_RP is not None]
    torch.testing.assert_close(torch.cat(shown).flatten(), positive)
    sim = z.flatten(0, 1) @ candidates.flatten(0, 1).T
    ids = torch.arange(6).repeat_interleave(views)
    level = positive - 0.2 * positive.abs()
    expected = ((sim > level[:, None]) & (ids[:, None] != ids)).sum()
    assert found.rule is not None
    assert found.rule.stats.flagged == expected > 0
