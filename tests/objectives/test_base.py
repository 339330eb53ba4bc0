"""Known positives of all samples: never negatives, in the batch and in a queue, whatever the framework."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kinfolk.frameworks import MoCo
from kinfolk.objectives import NTXent
from kinfolk.pairs import Pairs, two_views

GROUPS = torch.tensor([0, 0, 2, 3, 2, 5, 0, 7])


def test_groups_of_the_batch() -> None:
    torch.manual_seed(0)
    z1, z2 = F.normalize(torch.randn(2, 6, 4), dim=-1)
    ids = torch.tensor([0, 1, 3, 5, 6, 7])
    loss_fn = NTXent(0.2)
    loss_fn.know(GROUPS)
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
    loss_fn.know(GROUPS)
    found = loss_fn.on(Pairs(anchors, queue, anchors.unsqueeze(1), ids, queue_ids, unit_candidates=True))
    kept = [queue[[2, 3, 4, 5, 7]], queue[[0, 1, 2, 3, 4, 6, 7]]]
    expected = [torch.logsumexp(torch.cat((torch.ones(1), own @ z)) / 0.2, 0) - 1 / 0.2 for own, z in zip(kept, anchors, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_queue_in_training() -> None:
    torch.manual_seed(0)
    groups = torch.arange(40) // 2
    moco = MoCo(nn.Flatten(), nn.Linear(12, 4), num_samples=40, queue_size=8)
    moco.know(groups)
    for ids in (torch.arange(0, 16, 2), torch.arange(1, 17, 2)):
        moco(torch.randn(2, 8, 3, 2, 2), ids)
    assert int(moco.stats.negatives) == 8 * 7, "of each anchor's eight candidates, keys of the other rows, one is of its group"
