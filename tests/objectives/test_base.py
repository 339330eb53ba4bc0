"""What all objectives share: which ids they take, whose temperature counts, and known positives, which are never negatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kinfolk.contrast import Rows
from kinfolk.detectors import FNC, Oracle
from kinfolk.frameworks import MoCo
from kinfolk.objectives import CLIPLoss, LocalAggregation, NTXent, Objective, RelativeContrast, SogCLR
from kinfolk.objectives.base import pulls
from kinfolk.pairs import Pairs, two_views
from kinfolk.stats import Stats
from tests.scripted import Scripted, same_class

LOSSES: dict[str, Objective] = {
    "ntxent": NTXent(0.2),
    "sogclr": SogCLR(8, 0.2),
    "relative": RelativeContrast(0.2),
    "la": LocalAggregation(0.2),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_ids_that_are_no_integers_are_refused(name: str, dtype: torch.dtype) -> None:
    """0.5 would become 0, and in float32 the ids 2²⁴ and 2²⁴ + 1 are one."""
    z, ids = F.normalize(torch.randn(2, 4), dim=1), torch.tensor([0, 1])
    message = rf"`ids` \(={dtype}\) must be whole numbers: give an integer tensor"
    with pytest.raises(ValueError, match=message):
        LOSSES[name](z, z, ids.to(dtype))
    with pytest.raises(ValueError, match=message):
        LOSSES[name].on(Pairs(z, z, z.unsqueeze(1), ids.to(dtype), ids))
    with pytest.raises(ValueError, match=rf"`candidate_ids` \(={dtype}\) must be whole numbers"):
        LOSSES[name].on(Pairs(z, z, z.unsqueeze(1), ids, ids.to(dtype)))
    with pytest.raises(ValueError, match=message):
        CLIPLoss()(z, z, ids.to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_ids_of_any_integer_type_are_the_same_ids(dtype: torch.dtype) -> None:
    z, ids = torch.randn(4, 5), torch.tensor([3, 1, 0, 3])
    loss_fn = NTXent(0.2, detector=Oracle(torch.tensor([0, 1, 1, 0])))
    assert torch.equal(loss_fn(z, -z, ids.to(dtype)), loss_fn(z, -z, ids))
    given = [Pairs(z, z, -z.unsqueeze(1), each, each) for each in (ids.to(dtype), ids)]
    assert torch.equal(loss_fn.on(given[0]), loss_fn.on(given[1]))


@pytest.mark.parametrize("name", ["ntxent", "relative", "la"])
@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
def test_a_given_temperature_replaces_the_own_everywhere(name: str, action: Any) -> None:
    kind = type(LOSSES[name])
    g = torch.Generator().manual_seed(0)
    z, queue, keys = (torch.randn(*shape, 5, generator=g, dtype=torch.float64) for shape in ((4,), (9,), (4, 2)))
    degree = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2) if name == "relative" else None
    pairs = Pairs(z.requires_grad_(), queue.requires_grad_(), keys, torch.arange(4), torch.arange(9) + 2, degree=degree)
    given = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    own, other = (kind(t, detector=Scripted(same_class(3)), action=action, block_rows=3) for t in (0.3, 0.9))
    torch.testing.assert_close(other.on(pairs, given), own.on(pairs))
    assert torch.autograd.gradcheck(
        lambda *inputs: other.on(replace(pairs, anchors=inputs[0], candidates=inputs[1]), inputs[2]), (z, queue, given)
    )


GROUPS = torch.tensor([0, 0, 2, 3, 2, 5, 0, 7])


def test_groups_of_the_batch() -> None:
    torch.manual_seed(0)
    z1, z2 = F.normalize(torch.randn(2, 6, 4), dim=-1)
    ids = torch.tensor([0, 1, 3, 5, 6, 7])
    loss_fn = NTXent(0.2)
    loss_fn.set_groups(GROUPS)
    pairs = two_views(z1, z2, ids)
    given = replace(pairs, groups=GROUPS[ids], candidate_groups=GROUPS[pairs.candidate_ids])
    assert torch.equal(loss_fn(z1, z2, ids), NTXent(0.2).on(given))
    assert int(loss_fn.stats.negatives) == 12 * 10 - 3 * 2 * 4, "0, 1 and 6 are of one group"
    assert not torch.equal(loss_fn(z1, z2, ids), NTXent(0.2)(z1, z2, ids))
    assert not [name for name in loss_fn.state_dict() if "groups" in name], "data, not state"
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss_fn(z1, z2)


def test_groups_of_the_queue() -> None:
    torch.manual_seed(0)
    anchors, queue = F.normalize(torch.randn(2, 4), dim=-1), F.normalize(torch.randn(8, 4), dim=-1)
    ids, queue_ids = torch.tensor([1, 5]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    loss_fn = NTXent(0.2)
    loss_fn.set_groups(GROUPS)
    found = loss_fn.on(Pairs(anchors, queue, anchors.unsqueeze(1), ids, queue_ids, unit_candidates=True))
    kept = [queue[[2, 3, 4, 5, 7]], queue[[0, 1, 2, 3, 4, 6, 7]]]
    expected = [torch.logsumexp(torch.cat((torch.ones(1), own @ z)) / 0.2, 0) - 1 / 0.2 for own, z in zip(kept, anchors, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_queue_in_training() -> None:
    torch.manual_seed(0)
    groups = torch.arange(40) // 2
    moco = MoCo(nn.Flatten(), nn.Linear(12, 4), num_samples=40, queue_size=8)
    moco.set_groups(groups)
    for ids in (torch.arange(0, 16, 2), torch.arange(1, 17, 2)):
        moco(torch.randn(2, 8, 3, 2, 2), ids)
    assert int(moco.stats.negatives) == 8 * 7, "of each anchor's eight candidates, keys of the other rows, one is of its group"


def test_the_own_weight_has_the_precision_of_the_loss() -> None:
    own, kin = torch.tensor([[0.7], [0.2]], dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)
    rows = Rows(own, torch.zeros(2), torch.arange(2), 1, 0.1, kin_mass_R=kin, kin_sum_R=0.4 * kin)
    pull = pulls(rows, 0.3)
    assert pull.own_R.tolist() == [0.3, 1.0]
    torch.testing.assert_close(pull.sum_R.tolist(), [0.3 * 0.7 + 0.7 * 0.4, 0.2], rtol=0, atol=1e-15)


def test_a_call_that_does_not_judge_counts_what_is_flagged_and_nothing_by_the_labels() -> None:
    torch.manual_seed(0)
    z1, z2, ids = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6)
    loss_fn = NTXent(0.2, detector=FNC(top_k=2))
    loss_fn.set_eval_labels(ids % 2)
    judged = loss_fn(z1, z2, ids)
    counts = loss_fn.stats.counts()
    loss_fn.judges = False
    assert torch.equal(loss_fn(z1, z2, ids), judged)
    assert counts[2:8].all(), "judged, hits, kin, anchors, precision and recall"
    fields = ("negatives", "flagged", "positives", "positive_sum")
    for name in vars(loss_fn.stats):
        before = int(getattr(Stats.from_counts(counts), name))
        assert int(getattr(loss_fn.stats, name)) == (before if name in fields else 0)
