"""What is done about kin: weights, targets and kept negatives equal a slow loop, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.contrast import Policy, weigh
from kinfolk.detectors.base import Detector
from kinfolk.objectives import NTXentLoss, SogCLRLoss
from kinfolk.pairs import ACTIONS, OUT, Action, Block, Kin, above, check_answer, same_key
from tests.cover import pairwise
from tests.detectors.blocks import random_block
from tests.reference import weights
from tests.scripted import Scripted, everybody, same_class

LEVELS = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]
"""Few, so that similarities tie."""


@given(data=st.data())
@pytest.mark.parametrize(
    ("action", "attracted_stay", "graded"), pairwise(ACTIONS, [True, False], [False, True])
)
def test_weights_and_targets_equal_a_slow_loop(
    action: Action, attracted_stay: bool, graded: bool, data: st.DataObject
) -> None:
    """With own, ignored and tied candidates, rows in which all are kin, and rows without
    negatives."""
    columns = data.draw(st.integers(1, 9))
    row = st.tuples(
        st.sampled_from(LEVELS),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0] if graded else [0.0, 1.0]),
    )
    rows = data.draw(
        st.lists(st.lists(row, min_size=columns, max_size=columns), min_size=1, max_size=3)
    )
    least, kin_weight = data.draw(st.integers(1, 10)), data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    sim, own, ignored, degree = torch.tensor(rows, dtype=torch.float64).unbind(2)
    kin = Kin(degree if graded else degree > 0, ignored > 0)
    log_w, y, kin_mask = weigh(
        torch.where(own > 0, OUT, sim),
        own > 0,
        kin,
        Policy(action, kin_weight, least, attracted_stay),
    )
    taken = degree if graded or action != "reweight" else degree * (1 - kin_weight)
    for i in range(len(rows)):
        out = ((own[i] + ignored[i]) > 0).tolist()
        slow = weights.row(sim[i].tolist(), out, taken[i].tolist(), action, least, attracted_stay)
        if not graded and action == "reweight" and kin_weight == 1:  # kin, though nothing is taken
            slow.kin[:] = ((degree[i] > 0) & ~torch.tensor(out)).tolist()
        torch.testing.assert_close(log_w[i].exp().tolist(), slow.w, rtol=0, atol=1e-14)
        assert kin_mask is not None
        assert kin_mask[i].tolist() == slow.kin
        assert (y is None) == (action != "attract")
        assert y is None or y[i].tolist() == slow.y


def test_without_kin_only_own_and_ignored_are_left_out() -> None:
    own, ignored = torch.tensor([[True, False, False]]), torch.tensor([[False, False, True]])
    log_w, y, kin = weigh(torch.zeros(1, 3), own, Kin(ignore=ignored), Policy())
    assert log_w.tolist() == [[pytest.approx(OUT), 0.0, pytest.approx(OUT)]]
    assert y is None
    assert kin is None


@pytest.mark.parametrize(
    ("dtype", "min_negatives", "make"),
    pairwise(
        [torch.float32, torch.float64],
        [1, 3],
        [lambda **given: NTXentLoss(**given), lambda **given: SogCLRLoss(num_samples=12, **given)],
    ),
)
def test_the_order_of_candidates_does_not_decide_which_negatives_are_kept(
    make: type[NTXentLoss], min_negatives: int, dtype: torch.dtype
) -> None:
    """All are kin, and most are copies of each other: their similarities tie up to rounding."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 12, 5, generator=g, dtype=torch.float64)
    z[:, 3:] = z[:, 3:4]
    order = torch.randperm(12, generator=g)
    found = []
    for ids in (torch.arange(12), order):
        views = z[:, ids].to(dtype).requires_grad_()
        loss_fn = make(
            temperature=0.2,
            detector=Scripted(everybody),
            min_negatives=min_negatives,
            block_rows=10,
        )
        loss = loss_fn(views[0], views[1], ids)
        (gradient,) = torch.autograd.grad(loss, views)
        found.append((loss, gradient[:, ids.argsort()], loss_fn.stats.counts))
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert torch.equal(found[0][2], found[1][2])


def test_a_row_short_of_negatives_is_given_back_its_least_similar() -> None:
    """All others are kin of anchor 0, and none of anchor 1: only the rows of anchor 0 change."""
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    loss_fn = NTXentLoss(
        temperature=0.2,
        detector=Scripted(lambda row, col: Kin((row == 0) & (col >= 0))),
        min_negatives=3,
    )
    loss_fn(z[0], z[1])
    assert int(loss_fn.stats.flagged) == 2 * (8 - 3)


@pytest.mark.parametrize(
    ("action", "min_negatives", "levels"),
    pairwise(
        ACTIONS,
        [1, 4],
        [(-0.2, 0.4), (None, 0.1), (-0.2, 2.0), (0.9, 0.95), (-2.0, -0.9), (0.2, None)],
    ),
)
def test_kin_above_a_level_and_ignored_below_another(
    action: Action, min_negatives: int, levels: tuple[float | None, float | None]
) -> None:
    """Also where the levels leave rows with too few negatives, or with none."""
    low, high = levels
    z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Levels(Detector):
        def find(self, block: Block) -> Kin:
            return Kin(
                None
                if high is None
                else above(block, block.sim_RC.new_full((len(block.sim_RC),), high)),
                None if low is None else block.sim_RC < low,
            )

    found = []
    for block_rows in (None, 6):
        x = z.clone().requires_grad_()
        loss_fn = NTXentLoss(
            temperature=0.2,
            detector=Levels(),
            action=action,
            min_negatives=min_negatives,
            block_rows=block_rows,
        )
        loss = loss_fn(x[0], x[1])
        (gradient,) = torch.autograd.grad(loss, x)
        found.append((loss, gradient, loss_fn.stats.counts))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0].isfinite()
    unit = torch.nn.functional.normalize(torch.stack((z[0], z[1]), 1).flatten(0, 1), dim=1)
    sim, losses, flagged = unit @ unit.T, [], 0
    for i in range(18):
        others = [j for j in range(18) if j // 2 != i // 2]
        similarity = [float(sim[i, j]) for j in others]
        out = [low is not None and s < low for s in similarity]
        degree = [
            (0.5 if action == "reweight" else 1.0) * (high is not None and s > high)
            for s in similarity
        ]
        row = weights.row(similarity, out, degree, action, min_negatives)
        own = sim[i, i ^ 1]
        total = torch.exp(own / 0.2) + sum(
            w * torch.exp(sim[i, j] / 0.2) for w, j in zip(row.w, others, strict=True)
        )
        pull = (own + sum(y * sim[i, j] for y, j in zip(row.y, others, strict=True))) / (
            1 + sum(row.y)
        )
        losses.append(total.log() - pull / 0.2)
        flagged += sum(row.kin)
    torch.testing.assert_close(found[0][0].detach(), torch.stack(losses).mean())
    assert int(found[0][2][1]) == flagged


def test_equal_keys_are_kin_and_negative_keys_are_none() -> None:
    found = same_key(torch.tensor([0, 1, -1]), torch.tensor([1, 0, -1, 0]))
    assert found.int().tolist() == [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("action", ACTIONS)
def test_kin_by_keys_or_by_a_list_are_kin_as_a_mask(action: Action) -> None:
    def listed(row: Tensor, col: Tensor) -> Kin:
        kin = torch.zeros(len(row), 9, dtype=torch.bool)
        for i, sample in enumerate(row[:, 0].tolist()):
            kin[i, [j for j in range(9) if j % 3 == sample % 3]] = True
        return Kin(kin[:, col[0]])

    z = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    says = (same_class(3), listed, lambda row, col: Kin(same_key(row[:, 0] % 3, col[0] % 3)))
    masked, *others = (
        NTXentLoss(temperature=0.2, detector=Scripted(say), action=action) for say in says
    )
    for other in others:
        assert torch.equal(masked(z[0], z[1]), other(z[0], z[1]))
        assert torch.equal(masked.stats.counts, other.stats.counts)


def test_wrong_answers_of_a_detector_are_refused() -> None:
    block = random_block(0, [4, 7, 9])
    with pytest.raises(TypeError, match="`find` must return a `Kin`, or a tuple of them"):
        check_answer(torch.zeros(6, 6), block)
    with pytest.raises(ValueError, match=r"`degree` of `Kin` .* shape"):
        check_answer(Kin(torch.zeros(3, 6)), block)
    with pytest.raises(ValueError, match=r"`ignore` of `Kin` .* shape"):
        check_answer((Kin(), Kin(ignore=torch.zeros(6, 3, dtype=torch.bool))), block)
    with pytest.raises(ValueError, match=r"the update 'threshold' .* must have 3"):
        check_answer(Kin(update={"threshold": torch.zeros(6)}), block)
