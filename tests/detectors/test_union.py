"""The union of detectors, and a detector that stops."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kinfolk as kf
from kinfolk.detectors import Detector
from kinfolk.pairs import ACTIONS, Action, Block, Kin
from tests.detectors.blocks import kin, random_block, step

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


def test_the_highest_degree_counts_and_kin_are_not_ignored() -> None:
    hard = torch.tensor([[True, False, False, False]])
    soft = torch.tensor([[0.5, 0.25, 0.0, 0.0]])
    ignored = torch.tensor([[False, True, True, False]])
    (found,) = [
        kf.Union(Fixed(Kin(hard)), Fixed(Kin(soft)), Fixed(Kin(ignore=ignored))).find(BLOCK)
    ]
    assert isinstance(found, Kin)
    assert found.degree is not None
    assert found.ignore is not None
    assert found.degree.tolist() == [[1.0, 0.25, 0.0, 0.0]]
    assert found.ignore.tolist() == [[False, False, True, False]]


def test_levels_are_united_one_by_one() -> None:
    first, second, other = (torch.eye(3, dtype=torch.bool).roll(k, 1) for k in range(3))
    found = kf.Union(Fixed(Kin(first), Kin(second)), Fixed(Kin(other))).find(BLOCK)
    assert isinstance(found, tuple)
    degrees = [kin.degree for kin in found]
    assert all(
        torch.equal(a, b)
        for a, b in zip(degrees, (first | other, second | other), strict=True)
        if a is not None
    )


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
    with pytest.raises(TypeError, match="must be detectors"):
        kf.Union()


def test_a_stopped_detector_flags_nothing_and_learns_nothing() -> None:
    detector = kf.StopAt(kf.GloFND(num_samples=N, alpha=0.3, init="quantile"), epoch=2)
    flagged = list[bool]()
    for epoch in range(4):
        detector.set_progress(epoch, 4)
        before = {name: value.clone() for name, value in detector.state_dict().items()}
        flagged.append(bool(step(detector, replace(BLOCK)).any()))
        same = all(
            torch.equal(value, before[name]) for name, value in detector.state_dict().items()
        )
        assert same == (epoch >= 2)
    assert flagged == [True, True, False, False]


def test_a_stopped_detector_is_not_refreshed() -> None:
    detector = kf.StopAt(kf.IFND(num_samples=N, schedule="constant"), epoch=2)
    assert [detector.due(epoch) for epoch in range(4)] == [True, True, False, False]
    assert detector.refreshed_at_end
    detector.set_progress(3, 4)
    assert not detector.refreshed_at_end
    with pytest.raises(
        ValueError, match=r"`epoch` \(=3\) must be above 3, the first epoch that flags"
    ):
        kf.StopAt(kf.StartAt(kf.FNC(top_k=1), epoch=3), epoch=3)
