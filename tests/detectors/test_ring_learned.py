"""Learned boundaries come to the exact quantiles on frozen features, unbiased by few candidates, follow a target that moves, and leave
other samples alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import Ring
from kinfolk.detectors.ring_learned import Boundaries, visited
from kinfolk.kinship import Interval
from kinfolk.objectives import NTXent
from kinfolk.pairs import Block
from tests.detectors.blocks import dropped, mask


def features(num: int, dim: int = 8, seed: int = 0) -> Tensor:
    """Clusters of unequal size, so that rows differ and are not normal."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, dim, generator=g)
    which = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1]), num, replacement=True, generator=g)
    return torch.nn.functional.normalize(centres[which] + 0.8 * torch.randn(num, dim, generator=g), dim=1)


def batches(z: Tensor, size: int, epochs: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [part for _ in range(epochs) for part in torch.split(torch.randperm(len(z), generator=g), size)]


def block_of(z: Tensor, ids: Tensor, columns: Tensor) -> Block:
    sim = (z[ids] @ z[columns].T).masked_fill(ids.unsqueeze(1) == columns, -torch.inf)
    return Block(sim, ids, columns, 1, (sim > -2).sum(1))


def shares_below(z: Tensor, level: Tensor) -> Tensor:
    """(N,) the share of all other samples less similar than the level."""
    sim = (z @ z.T).fill_diagonal_(torch.inf)
    return (sim < level.unsqueeze(1)).sum(1) / (len(z) - 1)


def test_batches_teach_the_quantiles_of_the_data_set() -> None:
    """510 candidates a visit; the error of a boundary, in shares, is well below that of one batch's own quantile."""
    z = features(1024)
    detector, single = Ring(0.8, 0.98, num_samples=1024, boundaries="learned"), torch.zeros(2, 1024)
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
    """Wanted 1 %, of as few as 31 candidates: excluded in the steps of twenty epochs, and by the thresholds at the end."""
    z, found, of = features(512), 0.0, 0.0
    bounds = (0.01, 1.0) if end == "lower" else (0.0, 0.99)
    detector = Ring(*bounds, num_samples=512, boundaries="learned")
    assert detector.boundaries is not None
    for step, ids in enumerate(batches(z, size, 30)):
        block = block_of(z, ids, ids)
        answer = detector.find(block)
        detector.observe(ids, answer.update)
        if step >= 10 * 512 // size:
            excluded = dropped(answer.levels[0], block) if end == "lower" else mask(answer.levels[0], block)
            found, of = found + float(excluded.sum()), of + float(block.num_negatives_R.sum())
    assert found / of == pytest.approx(0.01, rel=0.1)
    below = shares_below(z, getattr(detector.boundaries.store, f"{end}_level")).mean()
    assert float(below if end == "lower" else 1 - below) == pytest.approx(0.01, rel=0.1)


def test_two_views_that_are_alike_do_not_bias_the_share() -> None:
    z, size, found, of = features(256), 32, 0.0, 0.0
    detector, g = Ring(0.0, 0.99, num_samples=256, boundaries="learned"), torch.Generator().manual_seed(0)
    loss_fn = NTXent(0.1, detector=detector)
    for epoch in range(40):
        for ids in torch.randperm(256, generator=g).split(size):  # type: ignore[no-untyped-call]
            with torch.no_grad():
                loss_fn(*(z[ids] + 0.02 * torch.randn(size, z.shape[1], generator=g) for _ in range(2)), ids)
            if epoch >= 15:
                found, of = found + float(loss_fn.stats.flagged), of + float(loss_fn.stats.negatives)
    assert found / of == pytest.approx(0.01, rel=0.1)


def test_a_shift_and_a_stretch_of_all_similarities_move_the_thresholds_alone() -> None:
    g, states = torch.Generator().manual_seed(0), []
    visits = [torch.randn(5, 60, generator=g, dtype=torch.float64) * 0.1 for _ in range(40)]
    for shift, stretch in ((0.0, 1.0), (0.4, 0.2)):
        state = {name: torch.zeros(5, dtype=torch.float64) for name in ("level", "scale", "evidence", "aim")}
        for sim in visits:
            state, _ = visited(shift + stretch * sim, torch.full((5,), 60.0, dtype=torch.float64), state, 0.95)
        states.append((state["level"] - shift) / stretch)
    torch.testing.assert_close(*states)


def test_a_large_bank_is_learned_from_some_of_its_columns() -> None:
    """4,096 of 12,000 columns a visit, others every time."""
    z = features(12_000, seed=1)
    detector, ids, columns = Ring(0.9, 0.99, num_samples=12_000, boundaries="learned"), torch.arange(40), torch.arange(12_000)
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
    detector = Ring(0.9, 0.99, num_samples=1024, boundaries="learned", anneal="linear", anneal_epochs=20)
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
    detector = Ring(0.5, 0.9, num_samples=512, boundaries="learned")
    assert detector.boundaries is not None
    for data in (z, other):
        for ids in batches(data, 256, 30):
            detector.observe(ids, detector.find(block_of(data, ids, ids)).update)
        for name, wanted in (("lower", 0.5), ("upper", 0.9)):
            assert (shares_below(data, getattr(detector.boundaries.store, f"{name}_level")) - wanted).abs().mean() < 0.03


def test_a_visit_moves_only_its_samples_and_evaluation_none() -> None:
    z = features(64)
    detector = Ring(0.5, 0.9, num_samples=64, boundaries="learned")
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
    drop = found.levels[0].drop
    assert isinstance(drop, Interval)
    assert drop.upper_R is not None
    assert torch.equal(drop.upper_R, store.lower_level[5:15])


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_equal_similarities_and_rows_without_any_stay_finite(start: float) -> None:
    state = {"level": torch.tensor([start]), "scale": torch.tensor([0.1]), "evidence": torch.tensor([5.0]), "aim": torch.tensor([0.5])}
    for _ in range(200):
        state, level = visited(torch.full((1, 100), 0.25), torch.tensor([100.0]), state, 0.5)
        assert all(value.isfinite().all() for value in (*state.values(), level))
    assert state["level"].item() == pytest.approx(0.25, abs=0.02)
    store = Boundaries(3)
    empty = Block(torch.full((1, 4), -torch.inf), torch.tensor([1]), torch.ones(4, dtype=torch.int64), 1, torch.tensor([0]))
    store.observe(torch.tensor([1]), store.learned(empty, 0.3, 0.9)[0])
    assert torch.equal(store.store.lower_aim, torch.zeros(3))
