from __future__ import annotations

import pytest
import torch

from kinfolk.stores import Draw


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


def test_everything() -> None:
    for number in (None, 50, 60):
        draw = Draw(50, number)
        assert draw.everything
        assert torch.equal(draw.ids(), torch.arange(50))
    assert not Draw(50, 49).everything
    with pytest.raises(ValueError, match=r"`num_negatives` \(=0\) must be at least 1"):
        Draw(50, 0)
