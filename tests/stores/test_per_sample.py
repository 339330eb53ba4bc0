"""The store: one rule for duplicates, any order, strict loading, clear errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.stores import PerSample


def store(num_samples: int = 5) -> PerSample:
    return PerSample(num_samples, threshold=1.0, count=0)


def test_fields_start_at_their_value_and_are_columns_of_one_tensor() -> None:
    made = store()
    assert made.rows.tolist() == [[1.0, 0.0]] * 5
    made.threshold.fill_(0.5)
    assert made.rows[torch.tensor([2])].tolist() == [[0.5, 0.0]]


def test_a_write_changes_only_its_rows_and_fields() -> None:
    made = store()
    made.write(torch.tensor([3, 1]), {"threshold": torch.tensor([0.3, 0.1])})
    made.write(torch.tensor([3]), {"count": torch.tensor([3])})
    assert made.threshold.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.3, 1.0])
    assert made.count.tolist() == [0, 0, 0, 3, 0]


def test_where_a_value_is_nan_the_old_one_stays() -> None:
    made = store()
    made.write_rows(torch.tensor([3, 1]), torch.tensor([[0.3, 2.0], [torch.nan, torch.nan]]))
    assert made.rows.tolist() == [
        [1.0, 0.0],
        [1.0, 0.0],
        [1.0, 0.0],
        [pytest.approx(0.3), 2.0],
        [1.0, 0.0],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-1, 1)), min_size=1, max_size=20), st.randoms()
)
def test_duplicates_are_stored_as_their_mean_in_any_order(
    rows: list[tuple[int, float]], random: object
) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for order in (rows, shuffled):
        made = store().double()
        made.write(
            torch.tensor([i for i, _ in order]),
            {"threshold": torch.tensor([x for _, x in order], dtype=torch.float64)},
        )
        for i in range(5):
            mine = [x for j, x in rows if j == i]
            assert made.threshold[i].item() == pytest.approx(
                sum(mine) / len(mine) if mine else 1.0, abs=1e-12
            )


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_out_of_range_are_named(bad: int) -> None:
    made = store()
    with pytest.raises(ValueError, match=rf"`ids` \(={bad}\) must be in \[0, 5\)"):
        made.write(torch.tensor([0, bad]), {"threshold": torch.zeros(2)})


def test_state_dict_holds_every_field_and_loads_strictly() -> None:
    made, other = store(), store()
    made.write(torch.tensor([1]), {"threshold": torch.tensor([0.5]), "count": torch.tensor([2])})
    assert set(made.state_dict()) == {"threshold", "count"}
    other.load_state_dict(made.state_dict())
    assert all(torch.equal(getattr(made, name), getattr(other, name)) for name in made.state_dict())
    with pytest.raises(RuntimeError, match="has the size 5, but `num_samples` is 6"):
        store(6).load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        store().load_state_dict({"threshold": made.threshold})


def test_a_store_needs_samples() -> None:
    with pytest.raises(ValueError, match=r"`num_samples` \(=0\) must be at least 1"):
        store(0)
