"""The union of detectors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfolk as kf
from kinfolk.detectors import Detector
from kinfolk.pairs import ACTIONS, Action, Block, Kin
from tests.detectors.blocks import block_of, kin, random_block

N = 8
LABELS = torch.arange(N) % 3
BLOCK = random_block(0, [0, 1, 2, 3])


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (torch.randn(N, 5, dtype=torch.float64, generator=g) for _ in range(2))
    return z1, z2, torch.arange(N)


def test_a_union_flags_what_any_detector_flags() -> None:
    one, other = kf.FNC(top_k=1), kf.Oracle(LABELS)
    both = kin(kf.Union(one, other), BLOCK)
    assert torch.equal(both, kin(one, BLOCK) | kin(other, BLOCK))
    assert (kin(one, BLOCK) != both).any()
    assert (kin(other, BLOCK) != both).any()


@pytest.mark.parametrize("action", ACTIONS)
def test_the_union_of_one_detector_with_itself_is_that_detector(action: Action) -> None:
    z1, z2, ids = views()
    alone, twice = (
        kf.GloFND(num_samples=N, alpha=0.3, init="quantile"),
        kf.GloFND(num_samples=N, alpha=0.3, init="quantile"),
    )
    united = kf.Union(copy.deepcopy(alone), twice)
    losses = [
        kf.NTXentLoss(temperature=0.3, detector=each, action=action, block_rows=6)
        for each in (alone, united)
    ]
    for _ in range(3):
        one, other = (loss_fn(z1, z2, ids) for loss_fn in losses)
        torch.testing.assert_close(one, other)
    for member in united.members:
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(member.state_dict()[name], value)


def test_each_keeps_its_state_and_its_prepared_features() -> None:
    z1, z2, ids = views()
    features = torch.randn(N, 3, generator=torch.Generator().manual_seed(3))
    parts = (
        kf.GloFND(num_samples=N, alpha=0.3, init="quantile"),
        kf.GloFND(num_samples=N, alpha=0.1, init="quantile"),
    )
    loss_fn = kf.NTXentLoss(
        temperature=0.3, detector=kf.Union(*parts, kf.Guide(features, alpha=0.2), kf.Components())
    )
    alone = [kf.NTXentLoss(temperature=0.3, detector=copy.deepcopy(part)) for part in parts]
    for _ in range(2):
        for each in (loss_fn, *alone):
            each(z1, z2, ids)
    for part, each in zip(parts, alone, strict=True):
        assert each.detector is not None
        for name, value in each.detector.state_dict().items():
            torch.testing.assert_close(part.state_dict()[name], value)
    again = kf.NTXentLoss(temperature=0.3, detector=copy.deepcopy(loss_fn.detector))
    again.load_state_dict(loss_fn.state_dict())
    torch.testing.assert_close(again(z1, z2, ids), loss_fn(z1, z2, ids))


class Fixed(Detector):
    """Answers with what it is given."""

    def __init__(self, *answer: Kin) -> None:
        super().__init__()
        self.answer = answer

    def find(self, block: Block) -> tuple[Kin, ...]:
        return self.answer


SMALL = block_of(torch.eye(4), torch.arange(4))


def test_the_highest_degree_counts_and_kin_are_not_ignored() -> None:
    """In a loop over the candidates, hard and soft kin in any order."""
    g = torch.Generator().manual_seed(1)
    hard, ignored, also = (torch.rand(4, 4, generator=g) > 0.5 for _ in range(3))
    soft = torch.rand(4, 4, generator=g) * (torch.rand(4, 4, generator=g) > 0.5)
    parts = Fixed(Kin(hard)), Fixed(Kin(soft, ignore=also)), Fixed(Kin(ignore=ignored))
    for members in (parts, parts[::-1]):
        (found,) = kf.Union(*members).find(SMALL)
        assert found.degree is not None
        assert found.ignore is not None
        for i in range(4):
            for j in range(4):
                own = 0.0 if also[i, j] else float(soft[i, j])
                degree = max(float(hard[i, j]), own)
                assert float(found.degree[i, j]) == degree
                is_ignored = bool(ignored[i, j] or also[i, j]) and degree == 0
                assert bool(found.ignore[i, j]) == is_ignored
    (none,) = kf.Union(Fixed(Kin()), Fixed(Kin())).find(SMALL)
    assert (none.degree, none.ignore) == (None, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_hard_and_soft_kin_of_any_precision_are_united(dtype: torch.dtype) -> None:
    half = torch.full((4, 4), 0.5, dtype=dtype)
    (found,) = kf.Union(Fixed(Kin(half)), Fixed(Kin(torch.eye(4) > 0))).find(SMALL)
    assert torch.equal(found.degree, torch.maximum(half, torch.eye(4, dtype=dtype)))  # type: ignore[arg-type]


def test_levels_are_united_one_by_one() -> None:
    first, second, other = (torch.eye(4, dtype=torch.bool).roll(k, 1) for k in range(3))
    found = kf.Union(Fixed(Kin(first), Kin(second)), Fixed(Kin(other))).find(SMALL)
    assert [each.degree.tolist() for each in found if each.degree is not None] == [
        (first | other).tolist(),
        (second | other).tolist(),
    ]


def test_a_wrong_answer_of_one_is_refused() -> None:
    wrong = kf.Union(kf.FNC(top_k=1), Fixed(Kin(torch.ones(2, 2) > 0)))
    with pytest.raises(ValueError, match=r"`degree` of `Kin` .* must be bool or float"):
        wrong.find(SMALL)


def test_refresh_metrics_and_progress_are_delegated() -> None:
    late = kf.IFND(num_samples=N, num_clusters=(2,), schedule="constant", every=2)
    united = kf.Union(late, kf.StartAt(kf.FNC(top_k=1), epoch=3))
    united.set_progress(0, 10)
    assert [united.due(epoch) for epoch in range(4)] == [late.due(epoch) for epoch in range(4)]
    united.refresh(torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), 0.0)
    assert kin(late, BLOCK).any()
    assert torch.equal(kin(united, BLOCK), kin(late, BLOCK))  # FNC has not started
    united.set_progress(3, 10)
    assert (kin(united, BLOCK) != kin(late, BLOCK)).any()
    assert united.metrics == late.metrics
    assert (united.num_samples, united.refreshed_at_end) == (N, late.refreshed_at_end)
    assert united.silent_reason() is None
    silent = kf.Union(kf.GloFND(num_samples=N, alpha=0.0))
    assert silent.silent_reason() is not None


def test_detectors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`num_samples` of united detectors \(=8, 9\) must be the same"
    ):
        kf.Union(kf.GloFND(num_samples=8, alpha=0.1), kf.GloFND(num_samples=9, alpha=0.1))
    with pytest.raises(ValueError, match="`guide` of united detectors"):
        kf.Union(kf.Teacher(), kf.Guide(alpha=0.1))
    with pytest.raises(ValueError, match="cannot be united"):
        kf.Union(kf.IFND(num_samples=8), kf.IFND(num_samples=8, source="bank"))
    with pytest.raises(TypeError, match="must be a detector object"):
        kf.Union()
    with pytest.raises(ValueError, match="`space` of united detectors"):
        kf.Union(kf.IFND(num_samples=8), kf.IFND(num_samples=8, space="features"))


def test_a_union_in_a_union_without_clusters_reads_no_features() -> None:
    inner = kf.Union(kf.FNC(top_k=1), kf.Oracle(LABELS))
    outer = kf.Union(inner, kf.IFND(num_samples=N, space="features"))
    assert outer.space == "features"
    flat = kf.Union(kf.FNC(top_k=1), kf.Oracle(LABELS))
    assert torch.equal(kin(outer, BLOCK), kin(flat, BLOCK))


class Refreshed(kf.FNC):
    """Records its refreshes, which are due every few epochs."""

    def __init__(self, *, every: int, at_end: bool = False) -> None:
        super().__init__(top_k=1)
        self.every, self.refreshed_at_end = every, at_end
        self.calls: list[tuple[int, float]] = []

    def due(self, epoch: int) -> bool:
        return epoch % self.every == 0

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self.calls.append((self.epoch, progress))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda each: each,
        lambda each: kf.StartAt(each, epoch=3),
        lambda each: kf.StartAt(each, epoch=4, update_from=1),
        lambda each: kf.StopAt(each, epoch=5),
        lambda each: kf.StopAt(kf.StartAt(each, epoch=3), epoch=6),
    ],
)
def test_each_is_refreshed_as_if_it_were_alone(wrap: Callable[[Detector], Detector]) -> None:
    """Wrapped one by one, together, or in a union within a union."""
    alone, inside, around, nested = (
        [Refreshed(every=3), Refreshed(every=4, at_end=True)] for _ in range(4)
    )
    trained: list[Detector] = [
        *map(wrap, alone),
        kf.Union(*map(wrap, inside)),
        wrap(kf.Union(*around)),
        kf.Union(wrap(kf.Union(nested[0], kf.Union(nested[1])))),
    ]
    for epoch in range(8):
        for detector in trained:
            detector.set_progress(epoch, 8)
            if detector.due(epoch):
                detector.refresh(None, epoch / 8)
    for detector in trained:
        if detector.refreshed_at_end:
            detector.refresh(None, 1.0)
    expected = [each.calls for each in alone]
    assert expected[0]
    for parts in (inside, around, nested):
        assert [each.calls for each in parts] == expected


def test_a_resumed_union_repeats_no_refresh() -> None:
    united = kf.Union(Refreshed(every=3), Refreshed(every=4))
    for epoch in range(4):
        united.set_progress(epoch, 8)
        if united.due(epoch):
            united.refresh(None, epoch / 8)
    parts = Refreshed(every=3), Refreshed(every=4)
    resumed = kf.Union(*parts)
    resumed.load_state_dict(united.state_dict())
    resumed.set_progress(4, 8)
    resumed.refresh(None, 0.5)
    assert [each.calls for each in parts] == [[], [(4, 0.5)]]


@pytest.mark.parametrize("wrap", [kf.StartAt, kf.StopAt])
def test_wrapped_together_is_wrapped_one_by_one(wrap: Any) -> None:
    z1, z2, ids = views()

    def parts() -> list[Detector]:
        return [
            kf.GloFND(num_samples=N, alpha=0.3, init="quantile"),
            kf.Guide(torch.eye(N)[:, :3] + 0.1, margin=0.1),
        ]

    one = kf.NTXentLoss(detector=wrap(kf.Union(*parts()), epoch=2))
    other = kf.NTXentLoss(detector=kf.Union(*(wrap(each, epoch=2) for each in parts())))
    for epoch in range(4):
        for loss_fn in (one, other):
            loss_fn.set_progress(epoch, 4)
        torch.testing.assert_close(one(z1, z2, ids), other(z1, z2, ids))
        assert torch.equal(one.stats.counts, other.stats.counts)
        assert (int(one.stats.flagged) > 0) == ((epoch >= 2) == (wrap is kf.StartAt))


def test_a_step_that_is_not_finite_changes_no_state() -> None:
    z1, z2, ids = views()
    glofnd = kf.GloFND(num_samples=N, alpha=0.3, init="quantile")
    bank = kf.IFND(num_samples=N, num_clusters=(2,), source="bank", schedule="constant")
    loss_fn = kf.NTXentLoss(detector=kf.Union(glofnd, bank))
    loss_fn(z1, z2, ids)
    before = copy.deepcopy(loss_fn.state_dict())
    loss_fn(z1.index_fill(0, torch.tensor([2]), torch.nan), z2, ids)
    for name, value in loss_fn.state_dict().items():
        torch.testing.assert_close(value, before[name], msg=name)
    loss_fn(z2, z1, ids)
    assert any((value != before[name]).any() for name, value in loss_fn.state_dict().items())


def test_features_that_are_collected_reach_the_detector_that_collects() -> None:
    z1, z2, ids = views()
    bank = kf.IFND(num_samples=N, num_clusters=(2,), source="bank", schedule="constant")
    united = kf.Union(bank, kf.FNC(top_k=1))
    loss_fn = kf.NTXentLoss(detector=united)
    loss_fn(z1, z2, ids)
    assert united.collects
    assert bank.state_dict()["collected.seen"].all()
    united.refresh(None, 0.0)
    assert kin(bank, BLOCK).any()


class Listening(kf.FNC):
    needed_metrics = frozenset({"knn"})

    def on_metric(self, name: str, value: float) -> None:
        self.heard = (name, value)


def test_metrics_go_to_those_that_need_them() -> None:
    listening, ring = Listening(top_k=1), kf.Ring(lower=0.1, upper=0.9, anneal="step")
    united = kf.Union(listening, ring)
    assert united.needed_metrics == {"knn"} | ring.needed_metrics
    united.on_metric("knn", 0.5)
    assert listening.heard == ("knn", 0.5)
    for name in ring.needed_metrics:
        united.on_metric(name, 1.0)
    assert listening.heard == ("knn", 0.5)
    twice = kf.Union(
        *(kf.IFND(num_samples=N, num_clusters=(2,), schedule="constant") for _ in range(2))
    )
    twice.refresh(torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), 0.0)
    name, number = next(iter(twice.members[0].metrics)), len(twice.members[0].metrics)
    assert len(twice.metrics) == 2 * number
    assert twice.metrics[f"{name}_1"] == twice.metrics[name]


def test_the_tables_of_a_guide_change_places_in_the_other_direction() -> None:
    z1, z2, ids = views()
    g = torch.Generator().manual_seed(5)
    one, two = (torch.randn(N, 4, generator=g) for _ in range(2))
    guide = kf.Guide(one, positives=two, margin=0.1)
    alone = kf.CLIPLoss(temperature=0.2, detector=copy.deepcopy(guide))
    united = kf.CLIPLoss(temperature=0.2, detector=kf.Union(kf.StartAt(guide, epoch=0)))
    torch.testing.assert_close(alone(z1, z2, ids), united(z1, z2, ids))
    assert torch.equal(alone.stats.counts, united.stats.counts)
    other = kf.CLIPLoss(temperature=0.2, detector=kf.Guide(alpha=0.3))
    modality = kf.CLIPLoss(temperature=0.2, detector=kf.Union(kf.Guide(alpha=0.3)))
    torch.testing.assert_close(other(z1, z2, ids), modality(z1, z2, ids))


def test_a_soft_member_makes_it_soft() -> None:
    united = kf.Union(kf.Teacher(own_weight=0.25), kf.FNC(top_k=1))
    assert (united.soft, united.guide, united.own_weight) == (True, "teacher", 0.25)
    with pytest.raises(ValueError, match="eliminate"):
        kf.NTXentLoss(detector=united)
