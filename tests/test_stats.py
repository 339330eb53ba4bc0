from __future__ import annotations

import math

import pytest
import torch

from kinfolk.objectives import NTXentLoss, RelativeContrastLoss
from kinfolk.pairs import Pairs
from kinfolk.stats import UNIT, Stats
from tests.cover import pairwise
from tests.scripted import Scripted, everybody, same_class


def slow_counts(labels: list[int], num_classes: int) -> dict[str, int]:
    """Over all (anchor, negative) pairs of the two views; the detector flags ids that agree modulo
    `num_classes`."""
    counts = dict.fromkeys(("negatives", "flagged", "labelled", "hits", "kin"), 0)
    n = len(labels)
    for i in range(2 * n):
        for j in range(2 * n):
            if i % n == j % n:
                continue
            a, b = labels[i % n], labels[j % n]
            flagged, known, same = (
                i % n % num_classes == j % n % num_classes,
                a >= 0 and b >= 0,
                a == b,
            )
            counts["negatives"] += 1
            counts["flagged"] += flagged
            counts["labelled"] += flagged and known
            counts["hits"] += flagged and known and same
            counts["kin"] += known and same
    return counts


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 0, 2, 1], [0, -1, 1, 1, -1, 0, 0], [-1] * 7])
@pytest.mark.parametrize("block_rows", [None, 4])
def test_counts_equal_a_slow_count(labels: list[int], block_rows: int | None) -> None:
    loss_fn = NTXentLoss(temperature=0.2, detector=Scripted(same_class(2)), block_rows=block_rows)
    loss_fn.set_eval_labels(torch.tensor(labels))
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    loss_fn(z[0], z[1], torch.arange(7))
    slow = slow_counts(labels, 2)
    assert {name: int(getattr(loss_fn.stats, name)) for name in slow} == slow


def slow_anchors(labels: list[int], num_classes: int) -> tuple[float, float]:
    """Mean precision and recall of the samples, each over both its views, as GloFND's released code
    has them."""
    n, precision, recall = len(labels), [], []
    for sample in (i for i in range(n) if labels[i] >= 0):
        hits = labelled = kin = 0
        for _ in range(2):
            for j in (j for j in range(2 * n) if j % n != sample and labels[j % n] >= 0):
                flagged, same = (
                    sample % num_classes == j % n % num_classes,
                    labels[sample] == labels[j % n],
                )
                hits, labelled, kin = hits + (flagged and same), labelled + flagged, kin + same
        precision.append((hits + 1e-9) / (labelled + 1e-9))
        recall.append((hits + 1e-9) / (kin + 1e-9))
    return sum(precision) / len(precision), sum(recall) / len(recall)


@pytest.mark.parametrize(
    ("labels", "num_classes", "block_rows"),
    pairwise(
        [[0, 0, 1, 1, 0, 2, 1], [0, -1, 1, 1, -1, 0, 0], [0, 1, 2, 2, -1, 3, 4]], [2, 5], [None, 4]
    ),
)
def test_rates_of_the_anchors_equal_the_released_definition(
    labels: list[int], num_classes: int, block_rows: int | None
) -> None:
    """With five groups of seven ids, some anchors have nothing flagged; the labels leave some
    without false negatives."""
    loss_fn = NTXentLoss(
        temperature=0.2, detector=Scripted(same_class(num_classes)), block_rows=block_rows
    )
    loss_fn.set_eval_labels(torch.tensor(labels))
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    loss_fn(z[0], z[1], torch.arange(7))
    precision, recall = slow_anchors(labels, num_classes)
    stats = loss_fn.stats
    assert int(stats.anchors) == sum(label >= 0 for label in labels)
    assert stats.anchor_precision == pytest.approx(precision, abs=1e-5)
    assert stats.anchor_recall == pytest.approx(recall, abs=1e-5)
    assert stats.anchor_f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-5)


def test_the_harmonic_mean_of_the_means_is_the_papers_f1() -> None:
    """Table 1 of GloFND: precision 48.40, recall 58.81, F1 53.10."""
    stats = Stats(
        torch.tensor([1, 1, 1, 1, 1, 0, 10, round(4.840 * UNIT), round(5.881 * UNIT), 0, 0])
    )
    assert stats.anchor_f1 == pytest.approx(0.5310, abs=5e-5)


def test_rates_of_the_anchors_before_anything_is_flagged() -> None:
    """Every anchor would have precision 1; there is none to speak of."""
    loss_fn = NTXentLoss(temperature=0.2)
    loss_fn.set_eval_labels(torch.tensor([0, 0, 1, 1]))
    z = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    loss_fn(z[0], z[1], torch.arange(4))
    assert math.isnan(loss_fn.stats.anchor_precision)
    assert math.isnan(loss_fn.stats.anchor_f1)
    assert loss_fn.stats.anchor_recall == 0


def test_shares_and_sums() -> None:
    stats = Stats(torch.tensor([100, 10, 8, 6, 12, 3 * UNIT, 2, UNIT, UNIT // 2, 4, 3 * UNIT]))
    assert (stats.anchor_precision, stats.anchor_recall) == (0.5, 0.25)
    assert stats.anchor_f1 == pytest.approx(1 / 3)
    assert (stats.share, stats.precision, stats.recall) == (0.1, 0.75, 0.5)
    assert stats.f1 == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert (stats.tp_similarity, stats.fn_similarity) == (0.75, 0.25)
    assert (stats + stats).counts.tolist() == [2 * x for x in stats.counts.tolist()]


def test_undefined_is_nan() -> None:
    empty = Stats.empty()
    assert all(
        math.isnan(x)
        for x in (*empty.detection().values(), empty.tp_similarity, empty.fn_similarity)
    )


def slow_similarities(pairs: Pairs, labels: list[int]) -> tuple[float, float]:
    """Over all anchors, their own positives, and the negatives of their label."""
    unit = [row / row.norm() for row in pairs.anchors]
    others = [row / row.norm() for row in pairs.candidates]
    ids = pairs.ids.repeat_interleave(pairs.num_views).tolist()
    own, alike = [], []
    for i, anchor in enumerate(unit):
        own += [float(anchor @ (row / row.norm())) for row in pairs.positives[i]]
        for j in range(len(others)):
            other = int(pairs.candidate_ids[j])
            if other != ids[i] and labels[ids[i]] >= 0 and labels[ids[i]] == labels[other]:
                alike.append(float(anchor @ others[j]))
    return sum(own) / len(own), sum(alike) / len(alike) if alike else math.nan


@pytest.mark.parametrize(
    "labels", [[0, 0, 1, 1, 0, 2, 1, 3], [0, -1, 1, 1, -1, 0, 0, -1], [-1] * 8]
)
def test_similarities_equal_slow_ones(labels: list[int]) -> None:
    """On a queue that holds old keys of the anchors too."""
    g = torch.Generator().manual_seed(0)
    anchors, positives, queue = (
        torch.randn(*shape, 4, generator=g).double() for shape in ((10,), (10, 3), (11,))
    )
    pairs = Pairs(
        anchors, queue, positives, torch.tensor([1, 2, 3, 7, 5]), torch.arange(11) % 8, num_views=2
    )
    loss_fn = NTXentLoss(temperature=0.2)
    loss_fn.set_eval_labels(torch.tensor(labels))
    loss_fn.on(pairs)
    tp, fn = slow_similarities(pairs, labels)
    assert loss_fn.stats.tp_similarity == pytest.approx(tp, abs=1e-6)
    assert loss_fn.stats.fn_similarity == pytest.approx(fn, abs=1e-6, nan_ok=True)
    assert int(loss_fn.stats.positives) == 30


def test_of_keys_with_degrees_the_other_view_s_alone_counts() -> None:
    z = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    degree = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, -1.0]] * 2)
    loss_fn = RelativeContrastLoss(temperature=0.2)
    loss_fn.on(
        Pairs(
            z[0],
            z[1],
            torch.stack((z[1], z[2]), 1),
            torch.arange(6),
            torch.arange(6),
            degree=degree,
        )
    )
    assert int(loss_fn.stats.positives) == 6
    assert loss_fn.stats.tp_similarity == pytest.approx(
        torch.cosine_similarity(z[0], z[1]).mean().item(), abs=1e-5
    )


def test_similarities_of_two_views_and_without_labels() -> None:
    z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    loss_fn = NTXentLoss(temperature=0.2, block_rows=4)
    loss_fn(z[0], z[1])
    expected = torch.nn.functional.cosine_similarity(z[0], z[1]).mean().item()
    assert loss_fn.stats.tp_similarity == pytest.approx(expected, abs=1e-5)
    assert math.isnan(loss_fn.stats.fn_similarity)
    loss_fn.set_eval_labels(torch.tensor([0, 0, 1, 1, 2, 2]))
    loss_fn(z[0], z[1], torch.arange(6))
    unit = torch.nn.functional.normalize(z, dim=2)
    pairs = [(unit[:, i] @ unit[:, i + 1].T).mean().item() for i in (0, 2, 4)]
    assert loss_fn.stats.fn_similarity == pytest.approx(sum(pairs) / 3, abs=1e-5)
    assert int(loss_fn.stats.kin) == 24
    whole = loss_fn.stats
    halves = Stats.empty()
    for part in ([0, 1, 2, 3], [4, 5]):
        loss_fn(z[0, part], z[1, part], torch.tensor(part))
        halves += loss_fn.stats
    assert halves.fn_similarity == whole.fn_similarity, "sums are whole numbers"


@pytest.mark.parametrize("block_rows", [None, 4])
def test_levels_of_a_detector_add_up_and_positives_count_once(block_rows: int | None) -> None:
    z, labels = (
        torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 0, 1, 1, 0, -1, 1]),
    )
    found = []
    for classes in ((2,), (3,), (2, 3)):
        loss_fn = NTXentLoss(
            temperature=0.2, detector=Scripted(*map(same_class, classes)), block_rows=block_rows
        )
        loss_fn.set_eval_labels(labels)
        loss_fn(z[0], z[1], torch.arange(7))
        found.append(loss_fn.stats)
    one, two, both = found
    expected = (one + two).counts
    expected[9:11] = one.counts[9:11]
    assert torch.equal(both.counts, expected)
    assert int(both.positives) == 14


def test_what_stays_a_negative_for_want_of_others_is_not_flagged() -> None:
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    for action, kept in (("eliminate", 3), ("reweight", 0), ("attract", 0)):
        loss_fn = NTXentLoss(
            temperature=0.2,
            detector=Scripted(everybody),
            action=action,  # type: ignore[arg-type]
            min_negatives=3,
        )
        loss_fn(z[0], z[1])
        assert int(loss_fn.stats.flagged) == 10 * (8 - kept), action


def test_labels_never_touch_the_loss() -> None:
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    plain, watched = (
        NTXentLoss(temperature=0.2, detector=Scripted(same_class(2))) for _ in range(2)
    )
    watched.set_eval_labels(torch.arange(7))
    assert torch.equal(plain(z[0], z[1]), watched(z[0], z[1], torch.arange(7)))
    assert "labels" not in watched.state_dict()
