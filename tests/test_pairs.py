from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.pairs import Pairs, own_columns, two_views


@given(rows=st.lists(st.integers(0, 5), max_size=12), candidates=st.lists(st.integers(0, 5), max_size=12))
def test_own_columns_are_all_equal_keys(rows: list[int], candidates: list[int]) -> None:
    column_BK, count_B = own_columns(torch.tensor(rows, dtype=torch.int64), torch.tensor(candidates, dtype=torch.int64))
    assert count_B.tolist() == [candidates.count(key) for key in rows]
    assert column_BK.shape == (len(rows), max(count_B.tolist(), default=0))
    for key, columns in zip(rows, column_BK.tolist(), strict=True):
        assert set(columns) == {j for j, other in enumerate(candidates) if other == key} or key not in candidates


def test_two_views_are_sample_major() -> None:
    z1, z2 = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    pairs = two_views(z1, z2, torch.tensor([7, 9]))
    assert pairs.anchors.flatten().tolist() == [1, 3, 2, 4]
    assert pairs.positives.flatten().tolist() == [3, 1, 4, 2]
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
        two_views(torch.randn(shape), torch.randn(shape))
