"""Learned boundaries come to the exact quantiles on frozen features, unbiased by few candidates,
follow a target that moves, and leave other samples alone."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import Graded, Ring
from kinfolk.detectors.ring_learned import Boundaries, first_visit, visit
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import OUT, Block
from tests.detectors.blocks import dropped, levels, mask


def features(num: int, dim: int = 8, seed: int = 0) -> Tensor:
    """Clusters of unequal size, so that rows differ and are not normal."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, dim, generator=g)
    which = torch.multinomial(
        torch.tensor([8.0, 4, 2, 1, 1, 1]), num, replacement=True, generator=g
    )
    return torch.nn.functional.normalize(
        centres[which] + 0.8 * torch.randn(num, dim, generator=g), dim=1
    )


def batches(z: Tensor, size: int, epochs: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        part
        for _ in range(epochs)
        for part in torch.split(torch.randperm(len(z), generator=g), size)
    ]


def block_of(z: Tensor, ids: Tensor, columns: Tensor) -> Block:
    sim = (z[ids] @ z[columns].T).masked_fill(ids.unsqueeze(1) == columns, OUT)
    return Block(sim, ids, columns, 1, (sim > -2).sum(1))


def shares_below(z: Tensor, level: Tensor) -> Tensor:
    """(N,) the share of all other samples less similar than the level."""
    sim = (z @ z.T).fill_diagonal_(torch.inf)
    return (sim < level.unsqueeze(1)).sum(1) / (len(z) - 1)


def test_batches_teach_the_quantiles_of_the_data_set() -> None:
    """510 candidates a visit; the error of a boundary, in shares, is well below that of one batch's
    own quantile."""
    z = features(1024)
    detector, single = (
        Ring(lower=0.8, upper=0.98, num_samples=1024, boundaries="learned"),
        torch.zeros(2, 1024),
    )
    assert detector.boundaries is not None
    store = detector.boundaries.store
    for ids in batches(z, 256, 40):
        block = block_of(z, ids, ids)
        detector.observe(ids, detector.find(block).update)
        order = block.sim_RC.sort(1).values
        single[0, ids], single[1, ids] = order[:, 1 + int(0.8 * 255)], order[:, 1 + int(0.98 * 255)]
    for i, (name, wanted) in enumerate((("lower", 0.8), ("upper", 0.98))):
        learned = (shares_below(z, getattr(store, f"{name}_level")) - wanted).abs()
        alone = (shares_below(z, single[i]) - wanted).abs()
        assert learned.mean() < 0.6 * alone.mean(), (name, learned.mean(), alone.mean())
        assert learned.mean() < (0.012 if name == "lower" else 0.005)
        assert learned.max() < 0.1


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("end", ["lower", "upper"])
def test_few_candidates_do_not_bias_the_share(size: int, end: str) -> None:
    """Wanted 1 %, of as few as 31 candidates: excluded in the steps of twenty epochs, and by the
    thresholds at the end."""
    z, found, of = features(512), 0.0, 0.0
    bounds = (0.01, 1.0) if end == "lower" else (0.0, 0.99)
    detector = Ring(lower=bounds[0], upper=bounds[1], num_samples=512, boundaries="learned")
    assert detector.boundaries is not None
    for step, ids in enumerate(batches(z, size, 30)):
        block = block_of(z, ids, ids)
        answer = detector.find(block)
        detector.observe(ids, answer.update)
        if step >= 10 * 512 // size:
            excluded = dropped(answer, block) if end == "lower" else mask(answer, block)
            found, of = (
                found + float(excluded.sum()),
                of + float(block.per_row(block.num_negatives_b).sum()),
            )
    assert found / of == pytest.approx(0.01, rel=0.1)
    below = shares_below(z, getattr(detector.boundaries.store, f"{end}_level")).mean()
    assert float(below if end == "lower" else 1 - below) == pytest.approx(0.01, rel=0.1)


def test_two_views_that_are_alike_do_not_bias_the_share() -> None:
    z, size, found, of = features(256), 32, 0.0, 0.0
    detector, g = (
        Ring(lower=0.0, upper=0.99, num_samples=256, boundaries="learned"),
        torch.Generator().manual_seed(0),
    )
    loss_fn = NTXentLoss(temperature=0.1, detector=detector)
    for epoch in range(40):
        for ids in torch.randperm(256, generator=g).split(size):  # type: ignore[no-untyped-call]
            with torch.no_grad():
                loss_fn(
                    *(z[ids] + 0.02 * torch.randn(size, z.shape[1], generator=g) for _ in range(2)),
                    ids,
                )
            if epoch >= 15:
                found, of = (
                    found + float(loss_fn.stats.flagged),
                    of + float(loss_fn.stats.negatives),
                )
    assert found / of == pytest.approx(0.01, rel=0.1)


def test_a_shift_and_a_stretch_of_all_similarities_move_the_thresholds_alone() -> None:
    g, states, share = torch.Generator().manual_seed(0), [], torch.tensor(0.95, dtype=torch.float64)
    visits = [torch.randn(5, 1, 60, generator=g, dtype=torch.float64) * 0.1 for _ in range(40)]
    for shift, stretch in ((0.0, 1.0), (0.4, 0.2)):
        state = {
            name: torch.zeros(5, dtype=torch.float64)
            for name in ("level", "scale", "evidence", "aim")
        }
        for sim in visits:
            state, _ = visit(
                shift + stretch * sim, torch.full((5,), 60.0, dtype=torch.float64), state, share
            )
        states.append((state["level"] - shift) / stretch)
    torch.testing.assert_close(*states)


def test_the_quantiles_of_a_large_bank_are_learned() -> None:
    z = features(12_000, seed=1)
    detector, ids, columns = (
        Ring(lower=0.9, upper=0.99, num_samples=12_000, boundaries="learned"),
        torch.arange(40),
        torch.arange(12_000),
    )
    assert detector.boundaries is not None
    block = block_of(z, ids, columns)
    for _ in range(30):
        detector.observe(ids, detector.find(block).update)
    store = detector.boundaries.store
    for name, wanted in (("lower", 0.9), ("upper", 0.99)):
        share = (block.sim_RC < getattr(store, f"{name}_level")[ids].unsqueeze(1)).float().mean(1)
        assert (share - wanted).abs().mean() < (0.004 if name == "lower" else 0.0015)


def test_it_follows_an_annealed_bound() -> None:
    z = features(1024)
    detector = Ring(
        lower=0.9,
        upper=0.99,
        num_samples=1024,
        boundaries="learned",
        anneal="linear",
        anneal_epochs=20,
    )
    assert detector.boundaries is not None
    for epoch in range(30):
        detector.on_metric("epoch", float(epoch))
        for ids in batches(z, 256, 1, epoch):
            detector.observe(ids, detector.find(block_of(z, ids, ids)).update)
        if epoch == 0:
            assert (detector.boundaries.store.lower_level == -torch.inf).all()
        else:
            off = (shares_below(z, detector.boundaries.store.lower_level) - detector.lower).abs()
            assert off.mean() < 0.02, epoch


def test_it_follows_features_that_change() -> None:
    z, other = features(512), features(512, seed=9)
    detector = Ring(lower=0.5, upper=0.9, num_samples=512, boundaries="learned")
    assert detector.boundaries is not None
    for data in (z, other):
        for ids in batches(data, 256, 30):
            detector.observe(ids, detector.find(block_of(data, ids, ids)).update)
        for name, wanted in (("lower", 0.5), ("upper", 0.9)):
            assert (
                shares_below(data, getattr(detector.boundaries.store, f"{name}_level")) - wanted
            ).abs().mean() < 0.03


def test_a_visit_moves_only_its_samples_and_evaluation_none() -> None:
    z = features(64)
    detector = Ring(lower=0.5, upper=0.9, num_samples=64, boundaries="learned")
    assert detector.boundaries is not None
    ids = torch.arange(10)
    detector.observe(ids, detector.find(block_of(z, ids, ids)).update)
    store = detector.boundaries.store
    assert store.lower_level[:10].isfinite().all()
    assert (store.lower_level[10:] == -torch.inf).all()
    assert (store.upper_level[10:] == torch.inf).all()
    detector.eval()
    found = detector.find(block_of(z, torch.arange(5, 15), torch.arange(64)))
    assert not found.update
    block = block_of(z, torch.arange(5, 15), torch.arange(64))
    assert torch.equal(
        dropped(found, block),
        (block.sim_RC < store.lower_level[5:15].unsqueeze(1)) & (block.sim_RC > -2),
    )
    assert torch.equal(mask(found, block), block.sim_RC > store.upper_level[5:15].unsqueeze(1))


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_equal_similarities_and_rows_without_any_stay_finite(start: float) -> None:
    state = {
        "level": torch.tensor([start]),
        "scale": torch.tensor([0.1]),
        "evidence": torch.tensor([5.0]),
        "aim": torch.tensor([0.5]),
    }
    for _ in range(200):
        state, level = visit(
            torch.full((1, 1, 100), 0.25), torch.tensor([100.0]), state, torch.tensor(0.5)
        )
        assert all(value.isfinite().all() for value in (*state.values(), level))
    assert state["level"].item() == pytest.approx(0.25, abs=0.02)
    store = Boundaries(3)
    empty = Block(
        torch.full((1, 4), OUT),
        torch.tensor([1]),
        torch.ones(4, dtype=torch.int64),
        1,
        torch.tensor([0]),
    )
    store.observe(torch.tensor([1]), store.learn(empty, torch.tensor(0.3), torch.tensor(0.9))[0])
    assert torch.equal(store.store.lower_aim, torch.zeros(3))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_the_first_visit_starts_from_a_logistic_with_the_mean_and_deviation_of_the_row(
    share: float,
) -> None:
    block = block_of(features(40).double(), torch.arange(5), torch.arange(40))
    level, scale = first_visit(
        block.sim_bVC, torch.full((5,), 39.0), torch.logit(torch.tensor(share))
    )
    for i, row in enumerate(block.sim_RC.tolist()):
        seen = [s for s in row if s > -2]
        expected = statistics.pstdev(seen) * math.sqrt(3) / math.pi
        assert scale[i].item() == pytest.approx(expected, rel=1e-5)
        middle = statistics.mean(seen) + expected * math.log(share / (1 - share))
        assert level[i].item() == pytest.approx(middle, abs=1e-5)


def test_kin_above_a_learned_boundary_have_degrees() -> None:
    z = features(64)
    detector = Ring(lower=0.2, upper=0.8, num_samples=64, boundaries="learned")
    assert detector.boundaries is not None
    ids = torch.arange(64)
    for _ in range(5):
        detector.observe(ids, detector.find(block_of(z, ids, ids)).update)
    block = block_of(z, ids, ids)
    plain, graded = detector.eval().find(block), levels(Graded(detector), block)[0]
    assert torch.equal(mask(plain, block), mask(graded, block))
    assert torch.equal(dropped(plain, block), dropped(graded, block))
    level = detector.boundaries.store.upper_level.unsqueeze(1)
    degree = ((block.sim_RC - level) / (1 - level)).clamp(0, 1)
    assert graded.degree is not None
    torch.testing.assert_close(graded.degree, degree)
    assert (degree > 0).any()
