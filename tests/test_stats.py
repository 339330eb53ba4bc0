from __future__ import annotations

import math

import pytest
import torch

from kinfolk.objectives import NTXent
from kinfolk.stats import Stats
from tests.scripted import Scripted, same_class


def slow_counts(labels: list[int], num_classes: int) -> dict[str, int]:
    """Over all (anchor, negative) pairs of the two views; the detector flags ids that agree modulo `num_classes`."""
    counts = dict.fromkeys(("negatives", "flagged", "judged", "hits", "kin"), 0)
    n = len(labels)
    for i in range(2 * n):
        for j in range(2 * n):
            if i % n == j % n:
                continue
            a, b = labels[i % n], labels[j % n]
            flagged, known, same = i % n % num_classes == j % n % num_classes, a >= 0 and b >= 0, a == b
            counts["negatives"] += 1
            counts["flagged"] += flagged
            counts["judged"] += flagged and known
            counts["hits"] += flagged and known and same
            counts["kin"] += known and same
    return counts


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 0, 2, 1], [0, -1, 1, 1, -1, 0, 0], [-1] * 7])
@pytest.mark.parametrize("block_rows", [None, 4])
def test_counts_equal_a_slow_count(labels: list[int], block_rows: int | None) -> None:
    loss_fn = NTXent(0.2, Scripted(same_class(2)), block_rows=block_rows)
    loss_fn.watch(torch.tensor(labels))
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    loss_fn(z[0], z[1], torch.arange(7))
    slow = slow_counts(labels, 2)
    assert {name: int(getattr(loss_fn.stats, name)) for name in slow} == slow


def test_shares_and_sums() -> None:
    stats = Stats.from_counts(torch.tensor([100, 10, 8, 6, 12]))
    assert (stats.share, stats.precision, stats.recall) == (0.1, 0.75, 0.5)
    assert stats.f1 == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert (stats + stats).counts().tolist() == [200, 20, 16, 12, 24]


def test_undefined_is_nan() -> None:
    empty = Stats.empty()
    assert all(math.isnan(x) for x in (empty.share, empty.precision, empty.recall, empty.f1))


def test_labels_never_touch_the_loss() -> None:
    z = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    plain, watched = (NTXent(0.2, Scripted(same_class(2))) for _ in range(2))
    watched.watch(torch.arange(7))
    assert torch.equal(plain(z[0], z[1]), watched(z[0], z[1], torch.arange(7)))
    assert "labels" not in watched.state_dict()
