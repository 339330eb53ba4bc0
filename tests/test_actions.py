from __future__ import annotations

import pytest
import torch

from kinfolk.actions import ACTIONS, Action
from kinfolk.objectives import NTXent
from kinfolk.pairs import Roles
from tests.scripted import Scripted, same_class


@pytest.mark.parametrize("action", ACTIONS)
def test_kin_as_places_are_kin_as_a_mask(action: Action) -> None:
    def places(row: torch.Tensor, col: torch.Tensor) -> Roles:
        kin_RC = same_class(3)(row, col).kin_RC
        assert kin_RC is not None
        rows, cols = (kin_RC & (row != col)).nonzero(as_tuple=True)
        return Roles(kin=(rows, cols))

    z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    masked, placed = (NTXent(0.2, Scripted(say), action) for say in (same_class(3), places))
    assert torch.equal(masked(z[0], z[1]), placed(z[0], z[1]))
    assert torch.equal(masked.stats.counts(), placed.stats.counts())


def test_a_row_short_of_negatives_is_given_back_its_least_similar() -> None:
    """Anchor 0 has all others for kin, anchor 1 nobody: only the rows of anchor 0 are mended."""
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    detector = Scripted(lambda row, col: Roles(kin_RC=(row == 0) & (col >= 0)))
    loss_fn = NTXent(0.2, detector, min_negatives=3)
    loss_fn(z[0], z[1])
    assert int(loss_fn.stats.flagged) == 2 * (8 - 3)
