from __future__ import annotations

import pytest
import torch

from kinfolk.detectors.base import Detector, Found
from kinfolk.kinship import Interval, Keys, Mask, Places, Roles
from kinfolk.objectives import NTXent
from kinfolk.pairs import ACTIONS, Action, Block
from tests.scripted import Scripted, same_class


@pytest.mark.parametrize("action", ACTIONS)
def test_kin_as_places_or_keys_are_kin_as_a_mask(action: Action) -> None:
    def places(row: torch.Tensor, col: torch.Tensor) -> Roles:
        listed = torch.arange(9).expand(len(row), 9)
        return Roles(kin=Places(torch.where((listed % 3 == row % 3) & (listed != row), listed, -1), col[0]))

    def keys(row: torch.Tensor, col: torch.Tensor) -> Roles:
        return Roles(kin=Keys(row.T % 3, col % 3))

    z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    masked, *others = (NTXent(0.2, detector=Scripted(say), action=action) for say in (same_class(3), places, keys))
    for other in others:
        assert torch.equal(masked(z[0], z[1]), other(z[0], z[1]))
        assert torch.equal(masked.stats.counts(), other.stats.counts())


def test_a_row_short_of_negatives_is_given_back_its_least_similar() -> None:
    """All others are kin of anchor 0, and none of anchor 1: only the rows of anchor 0 are mended."""
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    detector = Scripted(lambda row, col: Roles(kin=Mask((row == 0) & (col >= 0))))
    loss_fn = NTXent(0.2, detector=detector, min_negatives=3)
    loss_fn(z[0], z[1])
    assert int(loss_fn.stats.flagged) == 2 * (8 - 3)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("min_negatives", [1, 4])
@pytest.mark.parametrize(("low", "high"), [(-0.2, 0.4), (None, 0.1), (-0.2, 2.0), (0.9, 0.95), (-2.0, -0.9), (0.3, 0.30001), (0.2, None)])
def test_levels_are_their_masks(action: Action, min_negatives: int, low: float | None, high: float | None) -> None:
    """Also where a level leaves rows with too few, or with none."""
    z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Levels(Detector):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.masked = masked

        def find(self, block: Block) -> Found:
            sim_RC = block.sim_RC
            high_R, low_R = (None if level is None else sim_RC.new_full((len(sim_RC),), level) for level in (high, low))
            if not self.masked:
                return Found(
                    (Roles(kin=None if high_R is None else Interval(high_R), drop=None if low_R is None else Interval(upper_R=low_R)),)
                )
            drop_RC = None if low is None else (sim_RC < low) & (sim_RC < sim_RC.amax(1, keepdim=True).clamp(max=low))
            return Found((Roles(kin=None if high is None else Mask(sim_RC > high), drop=None if drop_RC is None else Mask(drop_RC)),))

    by_level, by_mask = (
        NTXent(0.2, detector=Levels(masked), action=action, min_negatives=min_negatives, block_rows=6) for masked in (False, True)
    )
    losses = []
    for loss_fn in (by_level, by_mask):
        x = z.clone().requires_grad_()
        loss = loss_fn(x[0], x[1])
        loss.backward()
        losses.append((loss.detach(), x.grad))
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0][0].isfinite()
    assert torch.equal(by_level.stats.counts(), by_mask.stats.counts())
