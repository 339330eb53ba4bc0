"""GloFND: the paper's rules against a loop, and what "tracking" promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kinfolk.detectors import GloFND
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Block
from tests.detectors.blocks import block_of, kin, random_block, step
from tests.reference import detection

RULES = ("tracking", "adam", "sgd")
SHARED = [*((rule, False) for rule in RULES), ("adam", True), ("sgd", True)]
LR = {"adam": 0.05, "sgd": 0.5}


def batches(
    number: int, num_samples: int = 12, size: int = 5, seed: int = 0, num_views: int = 2
) -> list[Block]:
    g = torch.Generator().manual_seed(seed)
    return [
        random_block(seed + i, torch.randperm(num_samples, generator=g)[:size].tolist(), num_views)
        for i in range(number)
    ]


def made(rule: str = "tracking", alpha: float = 0.2, **more: Any) -> GloFND:
    return GloFND(num_samples=12, alpha=alpha, rule=rule, lr=LR.get(rule), **more)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*flags most of the negatives")
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
            want = loop[i].visit(
                block.sim_RC[rows].double(),
                alpha,
                LR[rule],
                (0.9, 0.98) if rule == "adam" else None,
            )
            assert detector.thresholds[i].item() == pytest.approx(loop[i].value, abs=1e-6)
            assert [set(row.nonzero().flatten().tolist()) for row in flagged[rows]] == want


def drawn(
    detector: GloFND,
    visits: int,
    n: int,
    mean: float,
    spread: float,
    jump: float = 0.0,
    fixed: bool = False,
) -> list[float]:
    """The share flagged at each visit, in units of α, of normal similarities that jump half way;
    the samples' own means differ."""
    g, number, shares = torch.Generator().manual_seed(0), detector.num_samples, []
    own, still = 0.5 * torch.randn(number, 1, generator=g), torch.randn(number, n, generator=g)
    for visit in range(visits):
        noise = (
            still + 0.1 * torch.randn(number, n, generator=g)
            if fixed
            else torch.randn(number, n, generator=g)
        )
        sim = mean + spread * (own + noise) + (jump if visit >= visits // 2 else 0.0)
        block = Block(
            sim, torch.arange(number), torch.arange(n) + number, 1, torch.full((number,), n)
        )
        shares.append(step(detector, block).sum().item() / (number * n * detector.alpha))
    return shares


@pytest.mark.parametrize(
    ("n", "alpha", "within"),
    [(127, 0.01, 0.15), (127, 0.2, 0.05), (400, 0.00025, 0.5), (400, 0.00075, 0.5)],
)
def test_the_share_is_held_wherever_similarities_lie(n: int, alpha: float, within: float) -> None:
    """With αn < 1, within a factor of 1.5."""
    shares = drawn(GloFND(num_samples=400, alpha=alpha, init="quantile"), 30, n, 0.8, 0.02)[10:]
    assert 1 / (1 + within) < sum(shares) / len(shares) < 1 + within


def test_fixed_candidates_do_not_make_it_diverge() -> None:
    """1,024 candidates that stay the same, α = 0.02, standard deviation 0.024."""
    shares = drawn(
        GloFND(num_samples=32, alpha=0.02, init="quantile"), 40, 1024, 0.3, 0.024, fixed=True
    )
    assert all(abs(share - 1) < 0.1 for share in shares[5:])


@pytest.mark.parametrize("jump", [0.5, -0.5])
@pytest.mark.parametrize(
    ("alpha", "spread"), [(0.01, 0.005), (0.01, 0.1), (0.1, 0.005), (0.1, 0.1)]
)
def test_a_jump_of_all_similarities_is_followed_in_a_few_visits(
    jump: float, alpha: float, spread: float
) -> None:
    shares = drawn(
        GloFND(num_samples=256, alpha=alpha, init="quantile"), 40, 127, 0.0, spread, jump
    )
    assert abs(sum(shares[10:20]) / 10 - 1) < 0.1
    assert abs(sum(shares[28:31]) / 3 - 1) < 0.25
    assert abs(sum(shares[30:]) / 10 - 1) < 0.1


@pytest.mark.parametrize(("stretch", "shift"), [(0.01, 0.95), (0.3, -0.5), (0.5, 0.0)])
@pytest.mark.parametrize("alpha", [0.003, 0.03, 0.3])
def test_a_shift_and_a_stretch_change_the_thresholds_alone(
    stretch: float, shift: float, alpha: float
) -> None:
    g = torch.Generator().manual_seed(0)
    one, other = (GloFND(num_samples=16, alpha=alpha, init="quantile").double() for _ in range(2))
    for visit in range(25):
        sim = (
            0.2 * torch.randn(16, 100, generator=g, dtype=torch.float64)
            + (0.3 if visit > 12 else 0.0)
        ).clamp(-1, 1)
        parts = (torch.arange(16), torch.arange(100) + 16, 1, torch.full((16,), 100))
        flagged = step(one, Block(sim, *parts))
        assert torch.equal(flagged, step(other, Block(stretch * sim + shift, *parts)))
    torch.testing.assert_close(
        other.thresholds, stretch * one.thresholds + shift, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("init", ["quantile", "one"])
def test_concentrated_features_in_small_batches_stay_near_alpha(init: str) -> None:
    """512 features with similarities of 0.963 ± 0.0095, batches of 128 with two views, α = 0.1, in
    all of 30 epochs."""
    g = torch.Generator().manual_seed(0)
    x, centre = torch.randn(512, 32, generator=g) / 32**0.5, torch.randn(1, 32, generator=g)
    x = torch.nn.functional.normalize(x + 5 * torch.nn.functional.normalize(centre, dim=1), dim=1)
    loss_fn = NTXentLoss(temperature=0.1, detector=GloFND(num_samples=512, alpha=0.1, init=init))  # type: ignore[arg-type]
    for epoch in range(30):
        flagged = negatives = 0
        for ids in torch.randperm(512, generator=g).split(128):  # type: ignore[no-untyped-call]
            with torch.no_grad():
                loss_fn(*(x[ids] + 0.01 * torch.randn(128, 32, generator=g) for _ in range(2)), ids)
            flagged, negatives = (
                flagged + int(loss_fn.stats.flagged),
                negatives + int(loss_fn.stats.negatives),
            )
        low, high = (0.07, 0.13) if epoch < 2 else (0.085, 0.115)
        assert low < flagged / negatives < high or (epoch == 0 and init == "one" and not flagged)


def test_a_drift_of_all_similarities_is_followed() -> None:
    """The tail shrinks by 3 % with each visit, and the mean stays: each sample learns it from the
    whole batch."""
    detector = GloFND(num_samples=400, alpha=0.005, init="quantile")
    drawn(detector, 20, 100, 0.0, 0.1)
    g, shares = torch.Generator().manual_seed(1), []
    for visit in range(20):
        sim = 0.1 * 0.97**visit * torch.randn(400, 100, generator=g)
        block = Block(sim, torch.arange(400), torch.arange(100) + 400, 1, torch.full((400,), 100))
        shares.append(step(detector, block).sum().item() / (400 * 100 * 0.005))
    assert sum(shares[10:]) / 10 == pytest.approx(1, abs=0.35)


def test_a_spread_that_changes_is_followed_sample_by_sample() -> None:
    """One of 4,096 is to be flagged. Half of the samples spread by 2.5 % more with each visit, the
    others by 2.5 % less."""
    n, number, g = 4096, 32, torch.Generator().manual_seed(0)
    detector, way = (
        GloFND(num_samples=number, alpha=1 / n, init="quantile"),
        1 - 2 * (torch.arange(number) % 2),
    )
    for visit in range(30):
        spread = 0.05 * torch.exp(0.025 * (visit - 15) * way)
        sim = 0.3 + spread.unsqueeze(1) * torch.randn(number, n, generator=g)
        step(
            detector,
            Block(sim, torch.arange(number), torch.arange(n) + number, 1, torch.full((number,), n)),
        )
    level = -torch.special.ndtri(torch.tensor(1 / n))
    assert ((detector.thresholds - 0.3) / spread - level).abs().mean() < 0.25


def test_the_share_is_alpha_where_a_batch_expects_a_few_flags_and_a_sample_almost_none() -> None:
    """1,000 samples with 100 negatives each and α = 0.0001: ten flags in a batch, 0.01 for a
    sample."""
    shares = drawn(GloFND(num_samples=1000, alpha=0.0001, init="quantile"), 80, 100, 0.2, 0.1)[20:]
    assert sum(shares) / len(shares) == pytest.approx(1, abs=0.25)


def test_heavy_tails_and_two_modes_do_not_change_the_share() -> None:
    """After many visits: the start is far off."""
    g = torch.Generator().manual_seed(0)
    for modes in (False, True):
        detector, shares = GloFND(num_samples=256, alpha=0.02, init="quantile"), []
        for _ in range(90):
            sim, other = (
                0.02 * torch.randn(256, 200, generator=g),
                torch.rand(256, 200, generator=g),
            )
            sim = sim + 0.5 * (other < 0.03) if modes else sim / other.clamp(min=0.05)
            block = Block(
                sim, torch.arange(256), torch.arange(200) + 256, 1, torch.full((256,), 200)
            )
            shares.append(step(detector, block).sum().item() / (256 * 200 * 0.02))
        assert sum(shares[70:]) / 20 == pytest.approx(1, abs=0.1)


def test_a_step_whose_loss_is_not_finite_changes_nothing() -> None:
    detector = made(init="quantile")
    for block in batches(10):
        step(detector, block)
    before, block = {k: v.clone() for k, v in detector.state_dict().items()}, batches(1, seed=7)[0]
    update = detector.find(block).update
    detector.observe(block.ids, update, torch.tensor(False))
    assert all(torch.equal(before[k], v) for k, v in detector.state_dict().items())
    detector.observe(block.ids, update, torch.tensor(True))
    assert not torch.equal(before["drift"], detector.state_dict()["drift"])


@pytest.mark.parametrize(("rule", "shared"), SHARED)
@pytest.mark.parametrize("init", ["one", "quantile"])
def test_a_step_never_reads_a_value_on_the_host(rule: str, init: str, shared: bool) -> None:
    """Tensors without values raise where one is read."""
    detector = GloFND(num_samples=12, alpha=0.2, rule=rule, init=init, shared=shared).to("meta")  # type: ignore[arg-type]
    block = batches(1)[0]
    rows, columns = block.sim_RC.to("meta"), block.candidate_ids.to("meta")
    block = Block(rows, block.ids.to("meta"), columns, 2, block.num_negatives_b.to("meta"))
    found = detector.find(block)
    detector.observe(block.ids, found.update, torch.empty((), dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_kin_are_above_the_new_threshold_not_the_old(rule: str) -> None:
    detector = made(rule, init="quantile")
    for block in batches(30):
        found = detector.find(block)
        level = found.update["state"][:, 0]
        level = level.clamp(-1, 1).masked_fill(level >= 1, torch.inf)
        above = block.sim_RC > level.repeat_interleave(block.num_views).unsqueeze(1)
        assert torch.equal(kin(detector, block), above)
        detector.observe(block.ids, found.update)


def test_tracking_flags_with_the_level_it_counts_at() -> None:
    """So that what a sample flags, and not only its threshold, is right on average: one candidate
    in a thousand, visits of 100."""
    shares = drawn(GloFND(num_samples=1000, alpha=0.001, init="quantile"), 60, 100, 0.2, 0.1)[10:]
    assert sum(shares) / len(shares) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize(("rule", "shared"), SHARED)
def test_find_reads_and_observe_writes(rule: str, shared: bool) -> None:
    detector, block = made(rule, shared=shared), batches(1)[0]
    before, sim = {k: v.clone() for k, v in detector.state_dict().items()}, block.sim_RC.clone()
    found = detector.find(block)
    assert all(torch.equal(before[k], v) for k, v in detector.state_dict().items())
    assert torch.equal(block.sim_RC, sim)
    assert all(len(rows) == len(block.ids) for rows in found.update.values())
    detector.observe(block.ids, found.update)
    assert (detector.thresholds[block.ids] < 1).all() or rule == "sgd"


@pytest.mark.parametrize(("rule", "shared"), SHARED)
def test_eval_flags_with_the_stored_threshold(rule: str, shared: bool) -> None:
    detector = made(rule, init="quantile", shared=shared)
    for block in batches(20):
        step(detector, block)
    detector.eval()
    state, block = {k: v.clone() for k, v in detector.state_dict().items()}, batches(1, seed=9)[0]
    assert torch.equal(
        step(detector, block), block.sim_RC > detector.thresholds[block.row_ids].unsqueeze(1)
    )
    assert not detector.find(block).update
    assert all(torch.equal(state[k], v) for k, v in detector.state_dict().items())


@pytest.mark.parametrize(("rule", "shared"), SHARED)
def test_alpha_zero_says_nothing_at_all(rule: str, shared: bool) -> None:
    detector = made(rule, alpha=0.0, init="quantile", shared=shared)
    found = detector.find(batches(1)[0])
    assert found.degree is None
    assert not found.update


def test_a_threshold_of_one_flags_nothing_even_where_rounding_goes_over_one() -> None:
    sim = torch.full((1, 3), 1.0000001)
    block = Block(sim, torch.tensor([0]), torch.arange(3), 1, torch.tensor([3]))
    assert (sim > 1).all()
    assert not kin(GloFND(num_samples=1, alpha=0.5).eval(), block).any()


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_the_first_visit_with_quantile_sets_the_normal_quantile_of_that_visit(rule: str) -> None:
    detector = made(rule, init="quantile")
    block = batches(1)[0]
    step(detector, block)
    for place, i in enumerate(block.ids.tolist()):
        row = block.sim_RC[2 * place : 2 * place + 2].flatten().tolist()
        want = detection.normal_quantile(row, 0.2)
        assert detector.thresholds[i].item() == pytest.approx(want, abs=1e-5)
    assert (detector.thresholds < 1).sum() == len(block.ids)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_the_start_by_quantile_is_near_the_exact_quantile(rule: str) -> None:
    """Normal similarities, 500 to a visit: the share flagged at the first visit is α."""
    for alpha in (0.01, 0.1):
        detector = GloFND(num_samples=200, alpha=alpha, rule=rule, init="quantile")  # type: ignore[arg-type]
        assert drawn(detector, 1, 500, 0.2, 0.1)[0] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("rule", "shared"), SHARED)
def test_no_visit_sorts_or_selects(rule: str, shared: bool) -> None:
    """An order statistic costs more than the rest of a step, and only the first visit would need
    it."""
    detector, called = made(rule, init="quantile", shared=shared), list[str]()

    class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    for block in batches(2):
        with Record():  # type: ignore[no-untyped-call]
            detector.find(block)
        step(detector, block)
    assert "sum" in called
    assert not {"topk", "sort", "kthvalue", "argsort", "quantile", "median"} & set(called)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("init", ["one", "quantile"])
def test_a_sample_without_negatives_is_left_as_it_is(rule: str, init: str) -> None:
    detector = made(rule, init=init)
    flagged = step(detector, random_block(0, [3, 3]))
    assert not flagged.any()
    assert all(
        torch.equal(v, made(rule, init=init).state_dict()[k])
        for k, v in detector.state_dict().items()
    )


@pytest.mark.parametrize("rule", RULES)
def test_duplicates_store_the_mean_of_their_proposals(rule: str) -> None:
    detector = made(rule, init="quantile")
    for block in batches(10):
        step(detector, block)
    block = random_block(77, [4, 1, 4, 2, 5])
    update = detector.find(block).update
    detector.observe(block.ids, update)
    assert detector.store.threshold[4].item() == pytest.approx(
        update["state"][[0, 2], 0].mean().item(), abs=1e-6
    )
    assert detector.store.threshold[1] == update["state"][1, 0]


@pytest.mark.parametrize(("rule", "shared"), SHARED)
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
    with pytest.raises(RuntimeError, match=r"has the size .* use the same data set"):
        GloFND(
            num_samples=13 if not shared else 12,
            alpha=0.2,
            rule=rule,  # type: ignore[arg-type]
            shared=False,
        ).load_state_dict(made(rule, shared=shared).state_dict())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_order_of_candidates_changes_nothing(rule: str, dtype: torch.dtype) -> None:
    one, other = made(rule, init="quantile"), made(rule, init="quantile")
    for seed in range(20):
        block, order = (
            random_block(seed, [0, 3, 5, 7], dtype=dtype),
            torch.randperm(8, generator=torch.Generator().manual_seed(seed)),
        )
        moved = Block(
            block.sim_RC[:, order], block.ids, block.candidate_ids[order], 2, block.num_negatives_b
        )
        step(one, block)
        step(other, moved)
    assert torch.allclose(one.thresholds, other.thresholds, atol=1e-5)
    assert one.thresholds.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*flags most of the negatives")
@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 1000), alpha=st.floats(0.001, 1), constant=st.booleans())
@settings(max_examples=15, deadline=None)
def test_thresholds_stay_in_range_whatever_comes(
    rule: str, seed: int, alpha: float, constant: bool
) -> None:
    detector = made(rule, alpha, init="quantile" if seed % 2 else "one")
    for block in batches(12, seed=seed):
        if constant:
            block = block_of(
                torch.ones(10, 3) + 0.1 * (seed % 3) * torch.randn(10, 3), block.ids, 2
            )
        step(detector, block)
        for value in detector.state_dict().values():
            assert value.isfinite().all()
        assert detector.thresholds.abs().max() <= 1


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_one_shared_threshold_learns_the_share_of_all(rule: str) -> None:
    detector, g = (
        GloFND(num_samples=40, alpha=0.2, rule=rule, lr=LR.get(rule, 1) / 2, shared=True),  # type: ignore[arg-type]
        torch.Generator().manual_seed(0),
    )
    shares = []
    for _ in range(150):
        block = block_of(torch.randn(20, 6, generator=g), torch.randperm(40, generator=g)[:20])
        shares.append(
            step(detector, block).sum().item() / block.per_row(block.num_negatives_b).sum().item()
        )
    assert sum(shares[-50:]) / 50 == pytest.approx(0.2, rel=0.1)
    assert detector.thresholds.shape == (40,)
    assert len(detector.thresholds.unique()) == 1  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("init", "turn"), [("one", 0.0), ("quantile", 0.02)])
def test_tracking_learns_the_quantile_and_holds_the_share(init: str, turn: float) -> None:
    """The benchmark in small: 1,024 samples, batches of 64, α = 0.05, 40 visits; frozen, and
    turning."""
    g = torch.Generator().manual_seed(0)
    here, there = (
        torch.nn.functional.normalize(torch.randn(1024, 16, generator=g), dim=1) for _ in range(2)
    )
    detector, shares = GloFND(num_samples=1024, alpha=0.05, init=init), []  # type: ignore[arg-type]
    for visit in range(40):
        z = torch.nn.functional.normalize(here + turn * visit * there, dim=1)
        flagged = 0
        for ids in torch.randperm(1024, generator=g).view(-1, 64):
            flagged += int(step(detector, block_of(z[ids], ids)).sum())
        shares.append(flagged / (1024 * 63) / 0.05)
    sim = (z @ z.T).fill_diagonal_(-torch.inf)
    exact = quantiles(sim, 0.05)
    assert (detector.thresholds - exact).abs().mean() < 0.10 * sim.triu(1)[sim.triu(1) != 0].std()
    assert sum(shares[-10:]) / 10 == pytest.approx(1, abs=0.06)
    assert all(abs(share - 1) < 0.15 for share in shares[20:])


def quantiles(sim: torch.Tensor, alpha: float) -> torch.Tensor:
    k = round(alpha * (len(sim) - 1))
    return sim.topk(k + 1, 1).values[:, k - 1 :].mean(1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": 0, "alpha": 0.1}, r"`num_samples` \(=0\) must be at least 1"),
    ({"num_samples": 3, "alpha": 1.3}, r"`alpha` \(=1.3\) must be in \[0, 1\]"),
    ({"num_samples": 2, "alpha": 0.1, "shared": True}, r"`rule` \(='tracking'\) must be 'adam'"),
    (
        {"num_samples": 3, "alpha": 0.1, "rule": "rprop"},
        r"`rule` \(='rprop'\) must be one of tracking, adam, sgd",
    ),
    (
        {"num_samples": 3, "alpha": 0.1, "init": "zero"},
        r"`init` \(='zero'\) must be one of one, quantile",
    ),
    ({"num_samples": 3, "alpha": 0.1, "lr": 0.0}, r"`lr` \(=0.0\) must be above 0"),
    ({"num_samples": 3, "alpha": 0.1, "betas": (0.9, 1.0)}, r"`betas` \(=\(0.9, 1.0\)\)"),
]


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    for arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            GloFND(**arguments)


@pytest.mark.parametrize("rule", RULES)
def test_the_default_rate_moves_thresholds(rule: str) -> None:
    """From 1 to similarities around 0 in 200 visits at α = 0.01."""
    detector = GloFND(num_samples=64, alpha=0.01, rule=rule)  # type: ignore[arg-type]
    shares = drawn(detector, 200, 127, 0.0, 0.1)
    assert 0.5 < sum(shares[150:]) / 50 < 1.5
    assert detector.thresholds.max() < 0.6
