from __future__ import annotations

import pytest
import torch

from kinfolk.stores import Draw
from kinfolk.stores.memory_bank import distinct


def test_a_draw_stays_until_it_advances_and_never_repeats_a_sample() -> None:
    draw = Draw(50, 20)
    first = draw.ids()
    assert torch.equal(draw.ids(), first), "reading changes nothing"
    assert len(set(first.tolist())) == 20
    draw.advance()
    assert not torch.equal(draw.ids(), first)


def test_the_same_after_a_resume_whatever_was_drawn_since() -> None:
    draw, other = Draw(50, 20), Draw(50, 20)
    draw.advance()
    other.load_state_dict(draw.state_dict())
    torch.rand(3)
    assert torch.equal(other.ids(), draw.ids())


def test_everything_is_drawn_if_the_number_is_not_smaller() -> None:
    for number in (None, 50, 60):
        draw = Draw(50, number)
        assert draw.everything
        assert torch.equal(draw.ids(), torch.arange(50))
    assert not Draw(50, 49).everything
    with pytest.raises(ValueError, match=r"`num_negatives` \(=0\) must be at least 1"):
        Draw(50, 0)


def test_the_cost_does_not_depend_on_the_number_of_samples() -> None:
    """No machine has the memory for a permutation of so many."""
    draw = Draw(10**15, 4096)
    ids = draw.ids()
    assert len(set(ids.tolist())) == 4096
    assert ids.min() >= 0
    assert ids.max() < 10**15


@pytest.mark.parametrize("number", [1, 3, 5, 6, 9])
def test_every_sample_is_drawn_equally_often_and_every_place_alike(number: int) -> None:
    """Five standard deviations of a binomial."""
    turns, generator = 4000, torch.Generator().manual_seed(0)
    drawn = torch.stack([distinct(10, number, generator) for _ in range(turns)])
    assert all(len(set(row)) == number for row in drawn.tolist())
    often = torch.bincount(drawn.flatten(), minlength=10).double()
    share = number / 10
    assert (often - share * turns).abs().max() < 5 * (turns * share * (1 - share)) ** 0.5
    first = torch.bincount(drawn[:, 0], minlength=10).double()
    assert (first - turns / 10).abs().max() < 5 * (turns * 0.09) ** 0.5
