"""Heads that begin anew: by their seed alone, in place, with running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kinfolk.frameworks.spcl import reinitialise, require_resettable
from kinfolk.models.heads import projection_head


def test_the_same_seed_is_the_same_head() -> None:
    heads = [projection_head(6, 8, 4) for _ in range(2)]
    for i, head in enumerate(heads):
        for _ in range(i + 1):
            head(torch.randn(5, 6) + 3)
        reinitialise([head], seed=7)
    assert all(
        torch.equal(a, b)
        for a, b in zip(heads[0].state_dict().values(), heads[1].state_dict().values(), strict=True)
    )
    assert heads[0].state_dict()["1.running_mean"].eq(0).all()
    before = heads[0].get_parameter("0.weight").clone()
    reinitialise(heads[:1], seed=8)
    assert not torch.equal(heads[0].get_parameter("0.weight"), before)


def test_it_is_in_place_and_leaves_the_generator_alone() -> None:
    head = projection_head(6, 8, 4)
    kept = list(head.parameters())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    reinitialise([head], seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(a is b for a, b in zip(head.parameters(), kept, strict=True))
    assert all(p.requires_grad for p in kept)
    assert head.get_parameter("0.weight").std() > 0.1, "a first weight, not zero"


def test_layers_that_cannot_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

    require_resettable(projection_head(6, 8, 4))
    with pytest.raises(ValueError, match="which Scale does not have"):
        require_resettable(nn.Sequential(nn.Linear(2, 2), Scale()))
