"""Ring equals algorithm 1, counts exactly, and never leaves an anchor without negatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfolk.detectors import Ring
from kinfolk.detectors.ring import draw_places, floor_index
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.objectives import NTXentLoss, SogCLRLoss
from kinfolk.pairs import ACTIONS, Action, Block, Pairs
from tests.cover import pairwise
from tests.detectors.blocks import dropped, mask, random_block
from tests.reference import ring as reference


def views(seed: int, batch: int = 12, dim: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        2, batch, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def row_block(rows: list[list[float]]) -> Block:
    sim = torch.tensor(rows)
    return Block(
        sim, torch.arange(len(rows)), torch.arange(sim.shape[1]) + 100, 1, (sim > -2).sum(1)
    )


def in_ring(block: Block) -> Tensor:
    """(R, C) True in the ring of 0.3 to 0.8, and where the candidate is the anchor's own."""
    found = Ring(lower=0.3, upper=0.8).find(block)
    return ~(mask(found, block) | dropped(found, block))


def cut(row: list[float], lower: str, upper: str) -> tuple[set[int], set[int]]:
    """The columns too far and too close by algorithm 1, where a sort cuts through equal
    similarities: all those equal to the first of the ring are in it, all those equal to the first
    too close are too close."""
    too_far, ring, too_close = reference.ring(row, lower, upper)
    first, close = ([row[j] for j in part[:1]] for part in (ring + too_close, too_close))
    far = {j for j in too_far if row[j] < first[0]}
    return far, {j for j, s in enumerate(row) if close and s >= close[0]}


@given(
    seed=st.integers(0, 200),
    bounds=st.sampled_from(
        [("0", "1"), ("0.5", "0.9"), ("0", "0.3"), ("0.29", "1"), ("0.7", "0.71"), ("0.1", "0.99")]
    ),
    ties=st.booleans(),
)
def test_equals_the_sorted_row(seed: int, bounds: tuple[str, str], ties: bool) -> None:
    block = random_block(seed, [0, 1, 2, 3, 1, 4, 5])
    if ties:
        block = row_block(((block.sim_RC * 3).round() / 3).tolist())
    require_cut(block, *bounds)


def test_a_whole_queue_equals_the_sorted_row() -> None:
    g = torch.Generator().manual_seed(0)
    # with ties
    block = row_block(
        (torch.randn(3, 5_000, generator=g).clamp(-1, 1) * 400).round().div(400).tolist()
    )
    require_cut(block, "0.9", "0.99")


def require_cut(block: Block, lower: str, upper: str) -> None:
    found = Ring(lower=float(lower), upper=float(upper)).find(block)
    kin, far = mask(found, block), dropped(found, block)
    for i, row in enumerate(block.sim_RC.masked_fill(block.sim_RC < -2, -torch.inf).tolist()):
        columns = [set(each[i].nonzero().flatten().tolist()) for each in (far, kin)]
        assert columns == list(cut(row, lower, upper))


@pytest.mark.parametrize("judged", [False, True])
def test_loss_is_that_of_algorithm_1(judged: bool) -> None:
    g = torch.Generator().manual_seed(1)
    anchors, queue, positives = (
        torch.randn(n, 5, generator=g, dtype=torch.float64) for n in (4, 60, 4)
    )
    anchors, queue, positives = (
        torch.nn.functional.normalize(x, dim=1) for x in (anchors, queue, positives)
    )
    loss_fn = NTXentLoss(temperature=0.2, detector=Ring(lower=0.5, upper=0.9))
    loss_fn.set_eval_labels(torch.zeros(200, dtype=torch.int64) if judged else None)
    loss = loss_fn.on(
        Pairs(anchors, queue, positives.unsqueeze(1), torch.arange(4), torch.arange(60) + 100)
    )
    own, sim = (anchors * positives).sum(1).tolist(), (anchors @ queue.T).tolist()
    slow = [
        reference.moco_ring_loss(s, row, "0.5", "0.9", 0.2) for s, row in zip(own, sim, strict=True)
    ]
    assert loss.item() == pytest.approx(sum(slow) / 4, rel=1e-10)
    assert int(loss_fn.stats.flagged) == 4 * 6


@pytest.mark.parametrize(
    "objective", [NTXentLoss(temperature=0.1), SogCLRLoss(num_samples=20, temperature=0.1)]
)
def test_the_whole_ring_is_the_base_loss_bit_for_bit(objective: NTXentLoss | SogCLRLoss) -> None:
    ringed = (
        NTXentLoss(temperature=0.1, detector=Ring(lower=0, upper=1))
        if isinstance(objective, NTXentLoss)
        else SogCLRLoss(num_samples=20, temperature=0.1, detector=Ring(lower=0, upper=1))
    )
    z = views(2, dtype=torch.float32)
    assert torch.equal(
        ringed(z[0], z[1], torch.arange(12)), objective(z[0], z[1], torch.arange(12))
    )


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("arguments", [{}, {"num_clusters": (2, 3)}, {"draw": 3}])
def test_gradient_equals_finite_differences(action: Action, arguments: dict[str, Any]) -> None:
    detector = Ring(lower=0.3, upper=0.8, num_samples=5, **arguments)
    if detector.due(0):
        detector.refresh(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), 0.0)
    loss_fn = NTXentLoss(temperature=0.5, detector=detector, action=action).double()
    z = views(3, 5, 3)

    def call(x: Tensor) -> Tensor:
        loss_fn.train("draw" in arguments)
        torch.manual_seed(0)
        loss: Tensor = loss_fn(x[0], x[1], torch.arange(5))
        return loss

    assert torch.autograd.gradcheck(call, (z.requires_grad_(),))


def test_the_order_of_candidates_changes_nothing() -> None:
    g = torch.Generator().manual_seed(1)
    anchors, queue, positives = (
        torch.randn(n, 5, generator=g, dtype=torch.float64) for n in (4, 60, 4)
    )
    order, ids = torch.randperm(60, generator=g), torch.arange(60)
    one, other = (
        NTXentLoss(temperature=0.2, detector=Ring(lower=0.5, upper=0.9)).double() for _ in range(2)
    )
    first = one.on(Pairs(anchors, queue, positives.unsqueeze(1), torch.arange(4), ids))
    second = other.on(
        Pairs(anchors, queue[order], positives.unsqueeze(1), torch.arange(4), ids[order])
    )
    assert first.item() == pytest.approx(second.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arguments", [{}, {"draw": 2}])
def test_cold_and_coarse_stay_finite(dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    loss_fn = NTXentLoss(
        temperature=0.01, detector=Ring(lower=0.5, upper=0.9, num_samples=12, **arguments)
    ).to(dtype)
    z = views(4, dtype=dtype).requires_grad_()
    for _ in range(3):
        loss = loss_fn(z[0], z[1], torch.arange(12))
        loss.backward()
    assert loss.isfinite()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert all(
        value.dtype not in (torch.bfloat16, torch.float16)
        for value in loss_fn.state_dict().values()
    )


@pytest.mark.parametrize(
    ("action", "arguments", "bounds"),
    pairwise(
        ACTIONS,
        [{}, {"num_clusters": 1}, {"draw": 1}],
        [(0.0, 0.001), (0.5, 0.5001), (0.99, 1.0), (0.999, 0.9999)],
    ),
)
def test_no_anchor_is_left_without_negatives(
    bounds: tuple[float, float], arguments: dict[str, Any], action: Action
) -> None:
    for batch in (2, 3, 5):
        detector = Ring(lower=bounds[0], upper=bounds[1], num_samples=5, **arguments)
        if detector.due(0):
            detector.refresh(torch.randn(5, 3), 0.0)
        loss_fn = NTXentLoss(temperature=0.1, detector=detector, action=action, decoupled=True)
        z = views(5, batch).requires_grad_()
        for _ in range(2):
            loss = loss_fn(z[0], z[1], torch.arange(batch))
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.isfinite()
        # every anchor has a positive and something to be pushed from
        assert (gradient != 0).any(2).all()


def test_too_few_for_a_ring_keeps_the_farthest_of_the_close() -> None:
    sim = [[0.1, 0.4, 0.3]]
    found = Ring(lower=0.4, upper=0.6).find(row_block(sim))  # both bounds at index 1
    assert mask(found, row_block(sim)).tolist() == [[False, True, True]]
    assert dropped(found, row_block(sim)).tolist() == [[True, False, False]]
    anchors, queue = (
        torch.eye(3)[:1],
        torch.nn.functional.normalize(
            torch.tensor([[0.1, 1, 0], [0.4, 0.9, 0], [0.3, 0, 0.9]]), dim=1
        ),
    )
    pairs = Pairs(anchors, queue, anchors.unsqueeze(1), torch.tensor([9]), torch.arange(3))
    loss, s = (
        NTXentLoss(temperature=0.5, detector=Ring(lower=0.4, upper=0.6)).on(pairs),
        float((anchors @ queue.T)[0, 2]),
    )
    assert loss.item() == pytest.approx(math.log(1 + math.exp((s - 1) / 0.5)), rel=1e-5)


@given(percent=st.integers(0, 100), n=st.integers(0, 100_000))
def test_bounds_are_counted_as_they_are_written(percent: int, n: int) -> None:
    share = torch.tensor(percent / 100, dtype=torch.float64)
    assert floor_index(share, torch.tensor([n])).item() == percent * n // 100


def test_draws_are_of_the_ring_uniform_and_seeded() -> None:
    ring_RC = torch.rand(50, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    ring_RC[0] = False
    ring_RC[1, 3:] = False
    torch.manual_seed(1)
    total = torch.zeros(50, 40)
    for _ in range(200):
        kept = draw_places(ring_RC, 5)
        assert not (kept & ~ring_RC).any()
        assert torch.equal(kept.sum(1), ring_RC.sum(1).clamp(max=5))
        total += kept
    often = (
        (total / 200)[ring_RC]
        * ring_RC.sum(1).clamp(min=5).unsqueeze(1).expand(50, 40)[ring_RC]
        / 5
    )
    assert (often - 1).abs().max() < 0.75  # each about as often as any other
    torch.manual_seed(2)
    first = draw_places(ring_RC, 5)
    torch.manual_seed(2)
    assert torch.equal(first, draw_places(ring_RC, 5))


def test_a_draw_leaves_out_the_others_and_evaluation_takes_the_ring_whole() -> None:
    block, detector = random_block(0, list(range(10))), Ring(lower=0.2, upper=0.9, draw=4)
    found = detector.find(block)
    assert (
        block.per_row(block.num_negatives_b)
        - dropped(found, block).sum(1)
        - mask(found, block).sum(1)
    ).tolist() == [4] * 20
    whole = detector.eval().find(block)
    assert torch.equal(
        dropped(whole, block), dropped(Ring(lower=0.2, upper=0.9).find(block), block)
    )
    assert torch.equal(mask(whole, block), mask(found, block))


def test_members_of_a_cluster_are_kin_wherever_they_are() -> None:
    block, detector = (
        random_block(0, list(range(10))),
        Ring(lower=0.3, upper=0.8, num_samples=10, num_clusters=(2, 2)),
    )
    before = detector.find(block)
    # no clusters yet: the ring alone, and what is too close is not kin
    assert not mask(before, block).any()
    assert torch.equal(dropped(before, block), ~in_ring(block))
    detector.refresh(torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), 0.0)
    assert detector.clusters is not None
    labels = detector.clusters.labels[:, block.row_ids]
    member = (labels.unsqueeze(2) == labels.unsqueeze(1)).any(0) & (block.sim_RC > -2)
    found = detector.find(block)
    assert torch.equal(mask(found, block), member)
    assert torch.equal(dropped(found, block), ~in_ring(block) & ~member)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lower": -0.1, "upper": 1}, r"`lower` \(=-0.1\) must be in \[0, 1\]"),
    ({"lower": 0, "upper": 1.5}, r"`upper` \(=1.5\) must be in \[0, 1\]"),
    ({"lower": 0.5, "upper": 0.5}, r"`lower` \(=0.5\) must be below `upper` \(=0.5\)"),
    ({"lower": 0, "upper": 1, "draw": 0}, r"`draw` \(=0\) must be at least 1"),
    (
        {"lower": 0, "upper": 1, "anneal": "cosine"},
        r"`anneal` \(='cosine'\) must be one of none, linear",
    ),
    (
        {"lower": 0.2, "upper": 1, "start_lower": 0.5},
        r"`start_lower` \(=0.5\) must be in \[0, 0.2\]",
    ),
    (
        {"lower": 0.2, "upper": 1, "start_upper": 0.5},
        r"`start_upper` \(=0.5\) must be None with `anneal` \(='none'\)",
    ),
    (
        {"lower": 0.5, "upper": 1, "start_lower": 0.3, "start_upper": 0.3, "anneal": "step"},
        r"`start_upper` \(=0.3\) must be above",
    ),
    (
        {"lower": 0.5, "upper": 1, "start_upper": 1.1, "anneal": "step"},
        r"`start_upper` \(=1.1\) must be above .* and at most 1",
    ),
    (
        {"lower": 0, "upper": 1, "anneal_epochs": 0},
        r"`anneal_epochs` \(=0\) must be at least 1",
    ),
    ({"lower": 0, "upper": 1, "anneal_jumps": 0}, r"`anneal_jumps` \(=0\) must be at least 1"),
    ({"lower": 0, "upper": 1, "num_clusters": 3}, "`num_samples` must be given"),
    (
        {"lower": 0, "upper": 1, "num_clusters": 9, "num_samples": 4},
        r"`num_clusters` \(=9\) must be at least 1 and below",
    ),
    ({"lower": 0, "upper": 1, "every": 0}, r"`every` \(=0\) must be at least 1"),
]


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    for arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            Ring(**arguments)


def test_ids_are_needed_where_state_is_kept_by_them() -> None:
    z = views(0)
    ring = Ring(lower=0.1, upper=0.9, num_samples=20, num_clusters=2)
    with pytest.raises(ValueError, match="`ids` must be given"):
        NTXentLoss(temperature=0.1, detector=ring)(z[0], z[1])


def test_the_grammar_knows_it() -> None:
    made = build_detector(parse("simclr+ring"), Context(30), {})
    assert repr(made) == "Ring(num_samples=30, lower=0.9, upper=0.99, anneal='linear')"


def test_an_annealed_ring_logs_its_lower_end() -> None:
    ring = Ring(lower=0.8, upper=1.0, anneal="linear", anneal_epochs=4)
    ring.on_metric("epoch", 2.0)
    assert ring.metrics == {"ring_lower": ring.lower}
    assert 0 < ring.lower < 0.8
    assert Ring(lower=0.8, upper=1.0).metrics == {}


def test_rows_without_negatives() -> None:
    """A single sample, a batch of one group, and one of two rows whose candidates are all its
    own."""
    g = torch.Generator().manual_seed(0)
    (one, other), ids = torch.randn(2, 4, 8, generator=g), torch.arange(4)
    loss_fn = NTXentLoss(temperature=0.1, detector=Ring(lower=0.1, upper=0.9))
    assert loss_fn(one[:1], other[:1], ids[:1]) == 0
    second = Pairs(one[1:2], one[2:], other[1:2].unsqueeze(1), ids[1:2], torch.tensor([0, 0]))
    both = Pairs(one[:2], one[2:], other[:2].unsqueeze(1), ids[:2], torch.tensor([0, 0]))
    torch.testing.assert_close(2 * loss_fn.on(both), loss_fn.on(second))
    loss_fn.set_groups(torch.zeros(4, dtype=torch.int64))
    assert loss_fn(one, other, ids) == 0


def test_an_empty_ring_around_other_clusters_drops_nothing() -> None:
    block = random_block(0, [0, 1, 2, 3, 4, 5])
    features = torch.eye(2)[torch.arange(6) % 2]
    for bounds, drops in (((0.3, 0.8), True), ((0.5, 0.5001), False)):
        detector = Ring(lower=bounds[0], upper=bounds[1], num_samples=6, num_clusters=2)
        detector.refresh(features, 0.0)
        assert bool(dropped(detector.find(block), block).any()) is drops
