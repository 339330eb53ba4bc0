"""FNC equals a sort of each row; ties, caps and degenerate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.detectors import FNC
from kinfolk.pairs import OUT, Block
from tests.detectors.blocks import kin, random_block
from tests.reference import detection


@given(
    seed=st.integers(0, 100),
    top_k=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_top_k_equals_the_sorted_row(seed: int, top_k: int, dtype: torch.dtype) -> None:
    block = random_block(seed, [0, 1, 2, 3, 1], dtype=dtype)
    found = kin(FNC(top_k=top_k), block)
    rows = block.sim_RC.masked_fill(block.sim_RC < -2, -torch.inf).tolist()
    for row, flags in zip(rows, found, strict=True):
        assert set(flags.nonzero().flatten().tolist()) == detection.fnc(row, top_k)


@pytest.mark.filterwarnings("ignore:.*flags most of the negatives")
@pytest.mark.parametrize(("alpha", "k"), [(0.01, 1), (0.2, 3), (0.26, 4), (0.99, 14)])
def test_alpha_is_a_share_of_the_row_s_negatives_and_at_least_one(alpha: float, k: int) -> None:
    block = random_block(3, list(range(8)))  # 14 negatives
    assert kin(FNC(alpha=alpha), block).sum(1).tolist() == [k] * 16


def test_each_row_counts_its_own_negatives() -> None:
    block = random_block(3, [0, 0, 0, 1, 2])  # sample 0 has 4 negatives, the others 8
    assert kin(FNC(alpha=0.5), block).sum(1).tolist() == [2] * 6 + [4] * 4


def test_min_similarity_alone_and_together_with_top_k() -> None:
    block = random_block(4, list(range(6)))
    above, first = block.sim_RC > 0.4, kin(FNC(top_k=3), block)
    assert torch.equal(kin(FNC(min_similarity=0.4), block), above)
    assert torch.equal(kin(FNC(top_k=3, min_similarity=0.4), block), above & first)


def test_ties_with_the_last_are_kin_too_and_own_candidates_never() -> None:
    sim = torch.tensor([[OUT, 0.5, 0.2, 0.5, 0.5]])
    block = Block(sim, torch.tensor([0]), torch.arange(5), 1, torch.tensor([4]))
    assert kin(FNC(top_k=2), block).tolist() == [[False, True, False, True, True]]


def test_a_row_without_negatives_flags_nothing() -> None:
    block = Block(
        torch.full((1, 3), OUT),
        torch.tensor([0]),
        torch.zeros(3, dtype=torch.int64),
        1,
        torch.tensor([0]),
    )
    assert not kin(FNC(alpha=0.5), block).any()
    assert not kin(FNC(top_k=2), block).any()


def test_the_order_of_candidates_changes_nothing_and_similarities_stay() -> None:
    block, order = random_block(5, list(range(6)), dtype=torch.bfloat16), torch.randperm(12)
    before = block.sim_RC.clone()
    moved = Block(
        block.sim_RC[:, order], block.ids, block.candidate_ids[order], 2, block.num_negatives_b
    )
    assert torch.equal(kin(FNC(alpha=0.3), block)[:, order], kin(FNC(alpha=0.3), moved))
    assert torch.equal(block.sim_RC, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "at least one of"),
        ({"alpha": 0.1, "top_k": 2}, "exclude each other"),
        ({"alpha": 1.0}, r"`alpha` \(=1.0\) must be in \(0, 1\)"),
        ({"top_k": 0}, r"`top_k` \(=0\) must be at least 1"),
        ({"min_similarity": 1.5}, r"`min_similarity` \(=1.5\) must be in \[-1, 1\]"),
    ],
)
def test_wrong_arguments_are_refused_with_name_value_and_rule(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FNC(**arguments)


def test_repr_is_the_call() -> None:
    assert (
        repr(eval(repr(FNC(alpha=0.01, min_similarity=0.3))))
        == "FNC(alpha=0.01, min_similarity=0.3)"
    )
