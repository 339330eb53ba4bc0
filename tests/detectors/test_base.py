"""What a detector needs at least; its wrappers, and the warm-up: silent, then learning, then
flagging."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import (
    DETECTORS,
    FNC,
    IFND,
    Components,
    Detector,
    GloFND,
    Guide,
    Hierarchy,
    Known,
    Oracle,
    Ring,
    StartAt,
    Teacher,
)
from kinfolk.detectors.base import InGuideSpace, Wrapped
from kinfolk.detectors.thresholds import Rule
from kinfolk.evaluation.detection import flagged_mask
from kinfolk.frameworks import SimCLR
from kinfolk.objectives import CLIPLoss, NTXentLoss
from kinfolk.pairs import Block, Kin, Pairs, above
from tests.detectors.blocks import levels, random_block, step

BLOCK = random_block(0, [0, 1, 2, 3])


class Nearest(Detector):
    """The candidate most similar to each anchor, with `find` alone."""

    def find(self, block: Block) -> Kin:
        return Kin(above(block, block.sim_RC.topk(2, 1).values[:, 1]))


def test_find_is_all_that_a_detector_needs() -> None:
    z, ids = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    head, detector = torch.nn.Linear(4, 3), StartAt(Nearest(), epoch=1)
    framework = SimCLR(torch.nn.Flatten(), head, detector=detector)
    found = []
    for epoch in range(2):
        framework.set_progress(epoch, 2)
        assert not framework.due(epoch)
        framework(z.view(2, 6, 4, 1, 1), ids).backward()
        found.append(int(framework.stats.flagged))
    assert found == [0, 12]
    assert framework.silent_reason() is None
    assert framework.metrics == {}
    expected, loss_fn = NTXentLoss(detector=FNC(top_k=1)), NTXentLoss(detector=Nearest())
    torch.testing.assert_close(loss_fn(z[0], z[1]), expected(z[0], z[1]))  # without ids


WRAPPERS: list[Callable[[Detector], Wrapped]] = [
    InGuideSpace,
    lambda detector: StartAt(detector, epoch=1),
    lambda detector: InGuideSpace(StartAt(detector, epoch=0)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_adds_no_ability(wrap: Callable[[Detector], Wrapped]) -> None:
    inner = Nearest()
    wrapped = wrap(inner)
    wrapped.set_loss_temperature(0.1)
    for epoch in range(3):
        wrapped.set_progress(epoch, 3)
        assert not wrapped.due(epoch)
        assert not wrapped.refreshed_at_end
        assert not wrapped.collects
        wrapped.refresh(None, 0.5)  # does nothing
    assert (wrapped.space, wrapped.needed_metrics, wrapped.metrics) == (
        "projected",
        frozenset(),
        {},
    )
    assert (wrapped.num_samples, wrapped.guide, wrapped.soft, wrapped.own_weight) == (
        None,
        None,
        False,
        None,
    )
    assert wrapped.inner is inner
    assert (inner.epoch, inner.num_epochs, inner.loss_temperature) == (2, 3, 0.1)


def test_a_wrapper_has_the_abilities_of_its_detector() -> None:
    inner = IFND(num_samples=8, space="features", schedule="constant")
    wrapped = InGuideSpace(StartAt(inner, epoch=0))
    wrapped.set_loss_temperature(0.03)
    assert inner.loss_temperature == 0.03
    assert (wrapped.due(0), wrapped.refreshed_at_end, wrapped.space) == (True, True, "features")
    assert (wrapped.num_samples, wrapped.inner) == (8, inner)
    bank = InGuideSpace(IFND(num_samples=8, source="bank"))
    bank.collect(torch.arange(8), torch.eye(8))
    assert bank.collects
    assert bank.state_dict()["detector.collected.seen"].all()
    taught = InGuideSpace(Teacher(own_weight=0.25))
    assert (taught.guide, taught.soft, taught.own_weight) == ("teacher", True, 0.25)
    assert StartAt(Guide(alpha=0.1), epoch=1).guide == "modality"


class Clustering(Nearest):
    """Overrides every call of the training."""

    space = "features"
    needed_metrics = frozenset({"epoch", "loss"})

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def due(self, epoch: int) -> bool:
        return epoch == 1

    def refresh(self, features: Tensor | None, progress: float) -> None:
        self.calls.append("refresh")

    def on_metric(self, name: str, value: float) -> None:
        self.calls.append(f"{name} {value}" if name == "epoch" else name)

    @property
    def metrics(self) -> dict[str, float]:
        return {"calls": float(len(self.calls))}


@pytest.mark.parametrize("wrap", [lambda detector: detector, InGuideSpace])
def test_a_training_makes_the_calls_that_a_detector_overrides(
    wrap: Callable[[Detector], Detector],
) -> None:
    detector = Clustering()
    framework = SimCLR(torch.nn.Flatten(), torch.nn.Linear(4, 3), detector=wrap(detector))
    assert [framework.due(epoch) for epoch in range(3)] == [False, True, False]
    assert framework.space == "features"
    framework.refresh(torch.eye(4), 0.5)
    framework.set_progress(1.5, 3)
    framework(torch.randn(2, 6, 4, 1, 1), torch.arange(6))
    assert detector.calls == ["refresh", "epoch 1.5", "loss"]
    assert framework.metrics == {"calls": 3.0}


class Counting(Nearest):
    """Prepares the candidates' ids."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared, self.blocks = 0, 0

    def prepare(self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None) -> Tensor:
        self.prepared += 1
        assert not candidates_CD.requires_grad
        return ids_C * 10

    def find(self, block: Block) -> Kin:
        self.blocks += 1
        assert block.prepared is not None
        assert torch.equal(block.prepared, block.candidate_ids * 10)
        return super().find(block)


def test_candidates_are_prepared_once_a_step_and_passed_to_every_block() -> None:
    z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for wrap in (None, InGuideSpace, lambda detector: StartAt(detector, epoch=0)):
        detector = Counting()
        wrapped = detector if wrap is None else wrap(detector)
        NTXentLoss(detector=wrapped, block_rows=4)(z[0], z[1], torch.arange(6) + 3)
        assert (detector.prepared, detector.blocks) == (1, 3)
    waiting = Counting()
    NTXentLoss(detector=StartAt(waiting, epoch=1))(z[0], z[1])
    assert (waiting.prepared, waiting.blocks) == (0, 0)


@pytest.mark.parametrize("of_samples", [False, True])
@pytest.mark.parametrize("num_views", [1, 2])
def test_in_the_space_of_the_guide_its_similarities_are_seen(
    num_views: int, of_samples: bool
) -> None:
    g, ids = torch.Generator().manual_seed(0), torch.arange(6)
    z, positives = (
        torch.randn(6 * num_views, 4, generator=g),
        torch.randn(6 * num_views, 1, 4, generator=g),
    )
    samples = torch.nn.functional.normalize(torch.randn(6, 3, generator=g), dim=1)
    rows, row_ids = samples.repeat_interleave(num_views, 0), ids.repeat_interleave(num_views)
    guide = samples if of_samples else rows
    pairs = Pairs(z, z, positives, ids, row_ids, num_views, guide=guide, candidate_guide=rows)
    loss_fn = NTXentLoss(detector=InGuideSpace(FNC(min_similarity=0.3)))
    loss_fn.on(pairs)
    near = (rows @ rows.T > 0.3) & (row_ids.unsqueeze(1) != row_ids)
    assert int(loss_fn.stats.flagged) == int(near.sum()) > 0
    grouped = NTXentLoss(detector=InGuideSpace(Components()), action="attract")
    plain = NTXentLoss(detector=Components(), action="attract")
    grouped.on(pairs)
    plain.on(Pairs(rows, rows, rows.unsqueeze(1), ids, row_ids, num_views))
    assert torch.equal(grouped.stats.flagged, plain.stats.flagged)


def test_a_registered_detector_without_a_paper_is_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kinfolk.cli.lists import methods
    from kinfolk.plugins import register_detector

    register_detector("nearest", Nearest)
    try:
        methods()
    finally:
        DETECTORS.pop("nearest")
    assert "nearest" in capsys.readouterr().out


def test_ids_are_needed_where_there_is_a_number_of_samples() -> None:
    class Half(Nearest):
        num_samples = 6

    z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    for detector in (Half(), StartAt(Half(), epoch=3)):
        with pytest.raises(ValueError, match="`ids` must be given"):
            NTXentLoss(detector=detector)(z[0], z[1])


def at(detector: StartAt, epoch: int) -> Tensor:
    detector.set_progress(epoch, 10)
    return step(detector, BLOCK)


def test_nothing_is_flagged_before_the_epoch() -> None:
    detector = StartAt(FNC(top_k=1), epoch=2)
    assert [bool(at(detector, epoch).any()) for epoch in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("shared", [False, True])
def test_state_moves_from_update_from_and_masks_apply_from_epoch(shared: bool) -> None:
    rule: Rule = "adam" if shared else "tracking"
    inner = GloFND(num_samples=4, alpha=0.3, rule=rule, init="quantile", shared=shared)
    detector = StartAt(inner, epoch=2, update_from=1)
    assert not at(detector, 0).any()
    assert inner.thresholds.tolist() == [1.0] * 4
    assert not at(detector, 1).any()
    assert (inner.thresholds < 1).all()
    assert at(detector, 2).any()


class Levels(Nearest):
    """Two levels, each with its own state."""

    def find(self, block: Block) -> tuple[Kin, ...]:  # type: ignore[override]
        degree = super().find(block).degree
        return tuple(Kin(degree, update={name: block.ids * 1.0}) for name in ("one", "two"))


def test_the_state_of_all_levels_moves_in_the_warm_up() -> None:
    detector = StartAt(Levels(), epoch=2, update_from=1)
    found = []
    for epoch in range(3):
        detector.set_progress(epoch, 10)
        answer = levels(detector, BLOCK)
        update = {name for level in answer for name in level.update}
        found.append((update, any(bool(flagged_mask(level, BLOCK).any()) for level in answer)))
    assert found == [(set(), False), ({"one", "two"}, False), ({"one", "two"}, True)]


def test_without_update_from_the_state_waits_too() -> None:
    inner = GloFND(num_samples=4, alpha=0.3, init="quantile")
    detector = StartAt(inner, epoch=2)
    at(detector, 1)
    assert inner.thresholds.tolist() == [1.0] * 4


def test_from_the_start_it_equals_the_wrapped_detector() -> None:
    bare = GloFND(num_samples=4, alpha=0.3, init="quantile")
    wrapped = StartAt(GloFND(num_samples=4, alpha=0.3, init="quantile"), epoch=0)
    for _ in range(3):
        assert torch.equal(step(wrapped, BLOCK), step(bare, BLOCK))
    assert {f"detector.{name}" for name in bare.state_dict()} == set(wrapped.state_dict())


@pytest.mark.parametrize(
    ("detector", "start", "update_from", "due"),
    [
        (Hierarchy(num_samples=8, warmup_epochs=10), 20, None, [20]),
        (Hierarchy(num_samples=8, warmup_epochs=10), 20, 15, [15]),
        (Hierarchy(num_samples=8, warmup_epochs=10), 20, 5, [10]),
        (Hierarchy(num_samples=8, warmup_epochs=0), 3, None, [3]),
        (IFND(num_samples=8, every=8), 20, None, [20, 24]),
        (IFND(num_samples=8, every=50), 20, None, []),  # linear: nothing is accepted in epoch 0
        (FNC(top_k=1), 20, None, []),
    ],
)
def test_a_refresh_missed_in_the_warm_up_is_made_up_for(
    detector: Detector, start: int, update_from: int | None, due: list[int]
) -> None:
    wrapped = StartAt(detector, epoch=start, update_from=update_from)
    wrapped.set_progress(0, 30)
    assert [epoch for epoch in range(30) if wrapped.due(epoch)] == due


def test_both_directions_of_a_bimodal_loss_get_the_epoch() -> None:
    loss_fn = CLIPLoss(detector=StartAt(FNC(top_k=1), epoch=2))
    z, ids = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    found = []
    for epoch in (0.0, 1.9, 2.0):
        loss_fn.set_progress(epoch, 3)
        loss_fn(z[0], z[1], ids)
        found.append(int(loss_fn.stats.flagged))
    assert found == [0, 0, 12]


@pytest.mark.parametrize(("epoch", "update_from"), [(-1, None), (2, 3), (2, -1)])
def test_a_start_before_the_first_epoch_is_refused(epoch: int, update_from: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        StartAt(FNC(top_k=1), epoch=epoch, update_from=update_from)


def test_repr_is_the_call() -> None:
    assert repr(StartAt(FNC(top_k=1), epoch=3)) == "StartAt(FNC(top_k=1), epoch=3)"
    assert repr(InGuideSpace(Nearest())) == "InGuideSpace(Nearest())"
    labels, keys = torch.arange(900), [f"{i:03}" for i in range(900)]
    known = Known(torch.tensor([[0, 1]]), num_samples=900, keys=keys)
    assert repr(copy.deepcopy(Oracle(labels))) == "Oracle(<Tensor (900,)>)"
    assert repr(known) == (
        "Known(<Tensor (1, 2)>, num_samples=900, keys=['000', '001', '002', '003', '004', '005',"
        " ...])"
    )
    ring = Ring(lower=0.5, upper=0.9, num_samples=9, num_clusters=(2, 3), anneal="step", seed=1)
    assert repr(eval(repr(ring))) == repr(ring)
