"""GloFND: the paper's steps, the order of things, and what must never happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfolk.detectors import GloFND
from kinfolk.pairs import Block
from tests.detectors.blocks import block_of, kin, random_block, step
from tests.reference import detection

RULES = ("tracking", "adam", "sgd")
LR = {"tracking": 0.05, "adam": 0.05, "sgd": 0.5}


def batches(number: int, num_samples: int = 12, size: int = 5, seed: int = 0, num_views: int = 2) -> list[Block]:
    g = torch.Generator().manual_seed(seed)
    return [random_block(seed + i, torch.randperm(num_samples, generator=g)[:size].tolist(), num_views) for i in range(number)]


def made(rule: str = "tracking", alpha: float = 0.2, **more: Any) -> GloFND:
    return GloFND(12, alpha, rule=rule, lr=LR[rule], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@given(seed=st.integers(0, 30), alpha=st.sampled_from([0.05, 0.2, 0.6]))
@settings(max_examples=15, deadline=None)
def test_adam_and_sgd_equal_the_loop(rule: str, seed: int, alpha: float) -> None:
    detector = made(rule, alpha).double()
    loop = {i: detection.Threshold() for i in range(12)}
    for block in batches(40, seed=100 * seed):
        flagged = step(detector, block)
        for place, i in enumerate(block.ids.tolist()):
            rows = slice(2 * place, 2 * place + 2)
            want = loop[i].visit(block.sim_RC[rows].double(), alpha, LR[rule], (0.9, 0.98) if rule == "adam" else None)
            assert detector.thresholds[i].item() == pytest.approx(loop[i].value, abs=1e-6)
            assert [set(row.nonzero().flatten().tolist()) for row in flagged[rows]] == want


@given(seed=st.integers(0, 30), alpha=st.sampled_from([0.05, 0.2, 0.6]))
@settings(max_examples=15, deadline=None)
def test_tracking_equals_the_loop(seed: int, alpha: float) -> None:
    detector = made("tracking", alpha).double()
    assert detector.drift is not None
    loop = {i: detection.Tracked() for i in range(12)}
    for block in batches(60, seed=100 * seed, num_views=1):
        detector.drift.zero_()
        step(detector, block)
        for row, i in zip(block.sim_RC.tolist(), block.ids.tolist(), strict=True):
            loop[i].visit(row, alpha, 0.05)
            assert detector.thresholds[i].item() == pytest.approx(loop[i].value, abs=1e-5)
            assert detector.store.scale[i].item() == pytest.approx(loop[i].scale, rel=1e-3)
            assert detector.store.evidence[i].item() == pytest.approx(loop[i].evidence, abs=1e-5)


def test_what_is_measured_is_the_mean_over_the_views() -> None:
    block, rule = random_block(0, list(range(12))), made().rule
    state = {"threshold": torch.linspace(-0.5, 0.5, 12), "scale": torch.full((12,), 0.1)}
    joined = rule.measure(block, state)
    for view in range(2):
        rows = slice(view, None, 2)
        alone = rule.measure(Block(block.sim_RC[rows], block.ids, block.candidate_ids, 1, block.num_negatives_R[rows]), state)
        rest = rule.measure(Block(block.sim_RC[1 - view :: 2], block.ids, block.candidate_ids, 1, block.num_negatives_R[rows]), state)
        torch.testing.assert_close(joined.share, (alone.share + rest.share) / 2)
        torch.testing.assert_close(joined.height, (alone.height + rest.height) / 2)
        torch.testing.assert_close(joined.n, alone.n)


def test_drift_moves_settled_thresholds_by_their_scale_and_no_others() -> None:
    still, moving, block = made(), made(), batches(1)[0]
    for detector in (still, moving):
        detector.store.write(torch.arange(12), {"threshold": torch.full((12,), 0.9), "evidence": torch.arange(12) % 2 * 32.0})
    assert still.drift is not None
    assert moving.drift is not None
    moving.drift.fill_(-0.5)
    moved = moving.find(block).update["threshold"] - still.find(block).update["threshold"]
    known = block.ids % 2 == 1
    assert (moved[known] < -0.02).all()
    assert (moved[~known] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_kin_are_above_the_new_threshold_not_the_old(rule: str) -> None:
    detector = made(rule, init="quantile")
    for block in batches(30):
        flagged = step(detector, block)
        new = detector.thresholds[block.row_ids].unsqueeze(1)
        assert torch.equal(flagged, block.sim_RC > new)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shared", [False, True])
def test_find_reads_and_observe_writes(rule: str, shared: bool) -> None:
    detector, block = made(rule, shared=shared), batches(1)[0]
    before, sim = {k: v.clone() for k, v in detector.state_dict().items()}, block.sim_RC.clone()
    if detector.surveys:
        detector.settle(detector.survey(block))
    found = detector.find(block)
    assert all(torch.equal(before[k], v) for k, v in detector.state_dict().items())
    assert torch.equal(block.sim_RC, sim)
    assert all(len(rows) == len(block.ids) for rows in found.update.values())
    detector.observe(block.ids, found.update)
    assert (detector.thresholds[block.ids] < 1).all() or rule == "sgd"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shared", [False, True])
def test_eval_flags_with_the_stored_threshold(rule: str, shared: bool) -> None:
    detector = made(rule, init="quantile", shared=shared)
    for block in batches(20):
        step(detector, block)
    detector.eval()
    state, block = {k: v.clone() for k, v in detector.state_dict().items()}, batches(1, seed=9)[0]
    assert torch.equal(step(detector, block), block.sim_RC > detector.thresholds[block.row_ids].unsqueeze(1))
    assert not detector.find(block).update
    assert all(torch.equal(state[k], v) for k, v in detector.state_dict().items())


@pytest.mark.parametrize("shared", [False, True])
def test_alpha_zero_says_nothing_at_all(shared: bool) -> None:
    detector = made(alpha=0.0, init="quantile", shared=shared)
    found = detector.find(batches(1)[0])
    assert found.levels[0].kin is None
    assert not found.update
    assert not detector.surveys


def test_a_threshold_of_one_flags_nobody_even_where_rounding_goes_over_one() -> None:
    sim = torch.full((1, 3), 1.0000001)
    block = Block(sim, torch.tensor([0]), torch.arange(3), 1, torch.tensor([3]))
    assert (sim > 1).all()
    assert not kin(GloFND(1, 0.5).eval(), block).any()


@pytest.mark.parametrize("rule", RULES)
def test_the_first_visit_with_quantile_sets_the_threshold_to_the_quantile_of_that_visit(rule: str) -> None:
    detector, block = made(rule, init="quantile"), batches(1)[0]
    step(detector, block)
    for place, i in enumerate(block.ids.tolist()):
        row = block.sim_RC[2 * place : 2 * place + 2].flatten().tolist()
        assert detector.thresholds[i].item() == pytest.approx(detection.quantile(row, 0.2), abs=1e-6)
    assert (detector.thresholds < 1).sum() == len(block.ids)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("init", ["one", "quantile"])
def test_a_sample_without_negatives_is_left_as_it_is(rule: str, init: str) -> None:
    detector = made(rule, init=init)
    flagged = step(detector, random_block(0, [3, 3]))
    assert not flagged.any()
    assert all(torch.equal(v, made(rule, init=init).state_dict()[k]) for k, v in detector.state_dict().items())


@pytest.mark.parametrize("rule", RULES)
def test_duplicates_store_the_mean_of_their_proposals(rule: str) -> None:
    detector = made(rule, init="quantile")
    for block in batches(10):
        step(detector, block)
    block = random_block(77, [4, 1, 4, 2, 5])
    update = detector.find(block).update
    detector.observe(block.ids, update)
    assert detector.thresholds[4].item() == pytest.approx(update["threshold"][[0, 2]].mean().item(), abs=1e-6)
    assert detector.thresholds[1] == update["threshold"][1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shared", [False, True])
def test_saved_loaded_and_continued_is_uninterrupted_bit_for_bit(rule: str, shared: bool) -> None:
    whole, first, second = (made(rule, init="quantile", shared=shared) for _ in range(3))
    work = batches(24)
    for block in work:
        step(whole, block)
    for block in work[:11]:
        step(first, block)
    second.load_state_dict(first.state_dict())
    for block in work[11:]:
        step(second, block)
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in whole.state_dict().items())
    with pytest.raises(RuntimeError, match="holds"):
        GloFND(13 if not shared else 12, 0.2, rule=rule, shared=False).load_state_dict(  # type: ignore[arg-type]
            {**made(rule, shared=shared).state_dict(), **({"drift": torch.tensor(0.0)} if shared and rule == "tracking" else {})}
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_order_of_candidates_changes_nothing(rule: str, dtype: torch.dtype) -> None:
    one, other = made(rule, init="quantile"), made(rule, init="quantile")
    for seed in range(20):
        block, order = random_block(seed, [0, 3, 5, 7], dtype=dtype), torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        moved = Block(block.sim_RC[:, order], block.ids, block.candidate_ids[order], 2, block.num_negatives_R[:])
        step(one, block)
        step(other, moved)
    assert torch.allclose(one.thresholds, other.thresholds, atol=1e-5)
    assert one.thresholds.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 1000), alpha=st.floats(0.001, 1), constant=st.booleans())
@settings(max_examples=25, deadline=None)
def test_thresholds_stay_in_range_whatever_comes(rule: str, seed: int, alpha: float, constant: bool) -> None:
    detector = made(rule, alpha, init="quantile" if seed % 2 else "one")
    for block in batches(30, seed=seed):
        if constant:
            block = block_of(torch.ones(10, 3) + 0.1 * (seed % 3) * torch.randn(10, 3), block.ids, 2)
        step(detector, block)
        for value in detector.state_dict().values():
            assert value.isfinite().all()
        assert detector.thresholds.abs().max() <= 1


@pytest.mark.parametrize("rule", RULES)
def test_one_shared_threshold_learns_the_share_of_all(rule: str) -> None:
    detector, g = GloFND(40, 0.2, rule=rule, lr=LR[rule] / 2, shared=True), torch.Generator().manual_seed(0)  # type: ignore[arg-type]
    shares = []
    for _ in range(150):
        block = block_of(torch.randn(20, 6, generator=g), torch.randperm(40, generator=g)[:20])
        shares.append(step(detector, block).sum().item() / block.num_negatives_R.sum().item())
    assert sum(shares[-50:]) / 50 == pytest.approx(0.2, rel=0.1)
    assert detector.thresholds.shape == (40,)
    assert len(detector.thresholds.unique()) == 1  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("init", ["one", "quantile"])
@pytest.mark.parametrize("turn", [0.0, 0.02])
def test_tracking_learns_the_quantile_and_holds_the_share(init: str, turn: float) -> None:
    """The benchmark in small: 1,024 samples, batches of 64, α = 0.05, 60 visits; frozen, and turning."""
    g = torch.Generator().manual_seed(0)
    here, there = (torch.nn.functional.normalize(torch.randn(1024, 16, generator=g), dim=1) for _ in range(2))
    detector, shares = GloFND(1024, 0.05, init=init), []  # type: ignore[arg-type]
    for visit in range(60):
        z = torch.nn.functional.normalize(here + turn * visit * there, dim=1)
        flagged = 0
        for ids in torch.randperm(1024, generator=g).view(-1, 64):
            flagged += int(step(detector, block_of(z[ids], ids)).sum())
        shares.append(flagged / (1024 * 63) / 0.05)
    sim = (z @ z.T).fill_diagonal_(-torch.inf)
    exact = quantiles(sim, 0.05)
    assert (detector.thresholds - exact).abs().mean() < (0.012 if turn == 0 else 0.03)
    assert sum(shares[-10:]) / 10 == pytest.approx(1, abs=0.06)
    assert all(abs(share - 1) < 0.15 for share in shares[30:])


def quantiles(sim: torch.Tensor, alpha: float) -> torch.Tensor:
    k = round(alpha * (len(sim) - 1))
    return sim.topk(k + 1, 1).values[:, k - 1 :].mean(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "alpha": 0.1}, r"`num_samples` \(=0\) must be at least 1"),
        ({"num_samples": 3, "alpha": 1.3}, r"`alpha` \(=1.3\) must be in \[0, 1\]"),
        ({"num_samples": 3, "alpha": 0.1, "rule": "rprop"}, r"`rule` \(='rprop'\) must be one of tracking, adam, sgd"),
        ({"num_samples": 3, "alpha": 0.1, "init": "zero"}, r"`init` \(='zero'\) must be one of one, quantile"),
        ({"num_samples": 3, "alpha": 0.1, "lr": 0.0}, r"`lr` \(=0.0\) must be above 0"),
        ({"num_samples": 3, "alpha": 0.1, "betas": (0.9, 1.0)}, r"`betas` \(=\(0.9, 1.0\)\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GloFND(**arguments)


def test_an_id_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"`ids` \(=12\) must be in \[0, 12\)"):
        made().find(random_block(0, [0, 12]))


def test_repr_is_the_call() -> None:
    detector = GloFND(7, alpha=0.01, rule="adam", init="quantile")
    want = "GloFND(num_samples=7, alpha=0.01, rule='adam', lr=0.05, betas=(0.9, 0.98), init='quantile', shared=False)"
    assert repr(detector) == repr(eval(repr(detector))) == want
