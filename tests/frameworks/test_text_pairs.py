"""Text pairs: the loss of CLIP on one encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfolk as kf
from kinfolk.frameworks import TextPairs

IDS, GROUPS = torch.arange(4), torch.tensor([0, 0, 2, 3])


def made(**arguments: Any) -> TextPairs:
    torch.manual_seed(0)
    return TextPairs(nn.EmbeddingBag(9, 6), nn.Linear(6, 5), **arguments).double()


def batch(negatives: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(9, (1, 4, 3)), torch.randint(9, (4, 1 + negatives, 5))


def test_equals_the_loss_of_two_towers() -> None:
    views, tokens = batch(negatives=2)
    framework = made(detector=kf.FNC(top_k=1))
    both = [framework.head(framework.encoder(each)) for each in (views[0], tokens.flatten(0, 1))]
    other = both[1].unflatten(0, (4, 3))
    loss = kf.CLIPLoss(temperature=0.05, learnable=False, detector=kf.FNC(top_k=1))
    expected = loss(both[0], other[:, 0], IDS, GROUPS, negatives=other[:, 1:], own_only=True)
    framework.own_negatives_only = True
    found = framework(views, IDS, tokens, GROUPS)
    torch.testing.assert_close(found, expected)
    found.backward()
    framework.own_negatives_only = False
    assert not torch.isclose(framework(views, IDS, tokens, GROUPS), expected)


def test_known_positives_are_no_negatives_unless_switched_off() -> None:
    views, tokens = batch()
    plain, switched = made(), made(known_groups=False)
    apart = plain(views, IDS, tokens, torch.arange(4))
    assert plain(views, IDS, tokens, GROUPS) < apart
    for framework in (plain, switched):
        framework.set_groups(GROUPS)
    torch.testing.assert_close(switched(views, IDS, tokens, GROUPS), apart)


def test_ids_of_negatives_are_known_positives_and_state() -> None:
    views, tokens = batch(negatives=1)
    framework = made()
    framework.set_groups(torch.tensor([0, 0, 2, 3, -1]))
    new = framework(views, IDS, tokens, GROUPS, torch.full((4, 1), 4))
    own = framework(views, IDS, tokens, GROUPS, torch.arange(4).unsqueeze(1))
    assert own < new  # the negative of a row is its positive
    learning = made(detector=kf.GloFND(num_samples=5, alpha=0.2))
    with pytest.raises(ValueError, match="`negative_ids` must be given"):
        learning(views, IDS, tokens, GROUPS)
    learning(views, IDS, tokens, GROUPS, torch.full((4, 1), 4)).backward()


def test_embeds_positives_of_unit_norm() -> None:
    views, tokens = batch(negatives=1)
    framework = made()
    torch.testing.assert_close(framework.embed_text(tokens), framework.embed(tokens[:, 0]))
    torch.testing.assert_close(framework.embed(views[0]).norm(dim=1), torch.ones(4).double())
    with pytest.raises(ValueError, match=r"`tokens` \(=None\) must be given"):
        framework(views, IDS)
