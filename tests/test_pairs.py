"""Anchors, candidates and positives: their order, their keys, and wrong shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Pairs, two_views


def test_two_views_are_sample_major() -> None:
    z1, z2 = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[-3.0, 0.0], [0.0, -4.0]])
    pairs = two_views(z1, z2, torch.tensor([7, 9]))
    assert pairs.anchors.tolist() == [[1, 0], [-1, 0], [0, 1], [0, -1]]
    assert pairs.positives.tolist() == [[[-1, 0]], [[1, 0]], [[0, -1]], [[0, 1]]]
    assert pairs.candidate_ids.tolist() == [7, 7, 9, 9]
    assert pairs.anchors is pairs.candidates


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": torch.arange(3)}, "`anchors`"),
        ({"candidate_ids": torch.arange(3)}, "`candidate_ids`"),
        ({"positives": torch.ones(4, 2)}, "`positives`"),
        ({"groups": torch.arange(2)}, "together"),
        ({"groups": torch.arange(3), "candidate_groups": torch.arange(5)}, "`groups`"),
        ({"groups": torch.arange(2), "candidate_groups": torch.arange(2)}, "`candidate_groups`"),
        ({"candidates": torch.ones(0, 2), "candidate_ids": torch.arange(0)}, "at least one row"),
        ({"positives": torch.ones(4, 0, 2)}, "at least one row"),
        ({"candidates": torch.ones(5, 3)}, "`candidates`"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, torch.Tensor], words: str) -> None:
    right: dict[str, Any] = {
        "anchors": torch.ones(4, 2),
        "candidates": torch.ones(5, 2),
        "positives": torch.ones(4, 1, 2),
        "ids": torch.arange(2),
        "candidate_ids": torch.arange(5),
    }
    with pytest.raises(ValueError, match=words):
        Pairs(**{**right, **change}, num_views=2)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing_to_compare_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="neither of them 0"):
        two_views(torch.randn(shape), torch.randn(shape), torch.arange(shape[0]))


def test_a_candidate_with_the_key_of_the_anchor_is_never_its_negative() -> None:
    """Keys are the ids, or the groups if there are any; each key of the anchor several times or not
    at all."""
    g = torch.Generator().manual_seed(0)
    anchors, queue = torch.randn(6, 4, generator=g), torch.randn(12, 4, generator=g)
    ids, queue_ids = torch.tensor([1, 4, 1]), torch.randint(0, 6, (12,), generator=g)
    groups, queue_groups = torch.tensor([3, 0, 3]), torch.randint(0, 5, (12,), generator=g)
    for keys, others, given in (
        (ids, queue_ids, {}),
        (groups, queue_groups, {"groups": groups, "candidate_groups": queue_groups}),
    ):
        loss_fn = NTXentLoss(temperature=0.3, block_rows=2)
        loss = loss_fn.on(
            Pairs(anchors, queue, anchors.unsqueeze(1), ids, queue_ids, num_views=2, **given)  # type: ignore[arg-type]
        )
        unit, number = [torch.nn.functional.normalize(x, dim=1) for x in (anchors, queue)], 0
        rows = []
        for i in range(6):
            kept = [j for j in range(12) if others[j] != keys[i // 2]]
            number += len(kept)
            logits = torch.cat((torch.ones(1), unit[1][kept] @ unit[0][i])) / 0.3
            rows.append(logits.logsumexp(0) - logits[0])
        torch.testing.assert_close(loss, torch.stack(rows).mean())
        assert int(loss_fn.stats.negatives) == number


@pytest.mark.parametrize("ids", [[0, 1], torch.tensor([0.0, 1.0]), torch.tensor([True, False])])
def test_ids_are_integer_tensors(ids: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"`ids` \(=.*\) must be an integer tensor"):
        two_views(torch.ones(2, 3), torch.ones(2, 3), ids)
