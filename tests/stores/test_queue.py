"""The queue: first in, first out, whatever the sizes; strict loading; exact under casts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfolk.stores import Queue


def rows(first: int, number: int, dim: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(first, first + number)
    return ids.float().unsqueeze(1).repeat(1, dim), ids


@given(st.integers(1, 7), st.lists(st.integers(0, 11), max_size=6))
def test_it_holds_the_last_rows_at_their_places(size: int, pushes: list[int]) -> None:
    """Pushes that do not divide the queue, or are larger than it, wrap as if the rows came one by
    one."""
    queue, slow, pushed = Queue(size, 2), [-1] * size, 0
    for number in pushes:
        queue.push(*rows(pushed, number))
        for i in range(pushed, pushed + number):
            slow[i % size] = i
        pushed += number
    filled = min(pushed, size)
    features, ids = queue.entries()
    assert len(queue) == int(queue.filled) == filled == len(features)
    assert int(queue.pointer) == pushed % size
    assert queue.ids.tolist() == slow
    assert features[:, 0].tolist() == ids.tolist() == slow[:filled]


def test_what_is_pushed_keeps_no_gradient() -> None:
    queue = Queue(4, 2)
    features, ids = rows(0, 3)
    queue.push(features.requires_grad_() * 2, ids)
    assert not queue.entries()[0].requires_grad
    assert queue.entries()[0][:, 0].tolist() == [0, 2, 4]


def test_state_dict_holds_everything_and_loads_strictly() -> None:
    queue, other = Queue(4, 2), Queue(4, 2)
    queue.push(*rows(0, 6))
    assert set(queue.state_dict()) == {"features", "ids", "pointer", "filled"}
    other.load_state_dict(queue.state_dict())
    for each in (queue, other):
        each.push(*rows(6, 3))
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in queue.state_dict().items()
    )
    with pytest.raises(RuntimeError, match="has the size 4 × 2, but `size` × `dim` is 5 × 2"):
        Queue(5, 2).load_state_dict(queue.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        Queue(4, 2).load_state_dict({"features": queue.features})


def test_a_cast_to_16_bits_leaves_it_exact() -> None:
    queue = Queue(4, 2)
    queue.push(torch.full((1, 2), 1 / 3), torch.tensor([5]))
    assert queue.bfloat16().features.dtype == queue.half().features.dtype == torch.float32
    assert queue.features[0, 0] == torch.tensor(1 / 3)
    queue.push(torch.full((1, 2), 0.5, dtype=torch.bfloat16), torch.tensor([6]))
    assert queue.double().features[1].tolist() == [0.5, 0.5]


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"`size` \(=0\) must be at least 1"):
        Queue(0, 2)
    with pytest.raises(ValueError, match=r"must be of the shape \(\d, 2\): a row for"):
        Queue(4, 2).push(torch.zeros(2, 3), torch.arange(2))
    with pytest.raises(ValueError, match=r"must be of the shape \(\d, 2\): a row for"):
        Queue(4, 2).push(torch.zeros(2, 2), torch.arange(3))
    assert repr(Queue(4, 2)) == "Queue(size=4, dim=2)"


def test_the_first_rows_stand_in_for_an_empty_queue() -> None:
    queue, rows, ids = Queue(4, 2), torch.eye(2, requires_grad=True), torch.tensor([5, 6])
    features, found = queue.candidates(rows, ids)
    assert torch.equal(features, rows)
    assert not features.requires_grad
    assert torch.equal(found, ids)
    queue.push(rows.flip(0), ids.flip(0))
    features, found = queue.candidates(rows, ids)
    assert found.tolist() == [6, 5]
