"""Attraction on a head of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kinfolk.detectors import FNC, Components, Detector, GloFND, Guide, Ring, Teacher
from kinfolk.detectors.components import find_components
from kinfolk.errors import UsageError
from kinfolk.frameworks import SimCLR
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Kin
from tests.scripted import Scripted, same_class

N, B = 20, 8


def made(detector: Detector | None, action: Any = "attract", **more: Any) -> SimCLR:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU())
    return SimCLR(
        encoder,
        nn.Linear(8, 4),
        0.3,
        second_head=nn.Linear(8, 5),
        detector=detector,
        action=action,
        **more,
    ).double()


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, B, 3, 2, 2, dtype=torch.float64, generator=g), torch.randperm(
        N, generator=g
    )[:B]


@pytest.mark.parametrize("block_rows", [None, 6])
def test_the_loss_is_the_plain_one_and_supcon_by_the_components_of_the_first_head(
    block_rows: int | None,
) -> None:
    framework = made(Components(), block_rows=block_rows)
    views, ids = batch()
    features = framework.encoder(views.flatten(0, 1))
    z, w = framework.head(features), framework.second_head(features)  # type: ignore[misc]
    first = F.normalize(z.view(2, B, -1).transpose(0, 1).flatten(0, 1), dim=1)
    key = find_components(first, ids.repeat_interleave(2))[::2]
    labels = torch.full((N,), -1).scatter(0, ids, key)
    by_component = Scripted(lambda row, col: Kin(labels[row] == labels[col]))
    attracted = NTXentLoss(temperature=0.3, detector=by_component, action="attract")
    expected = NTXentLoss(temperature=0.3)(*z.chunk(2), ids) + attracted(*w.chunk(2), ids)
    ours = framework(views, ids)
    torch.testing.assert_close(ours, expected)
    for one, other in zip(
        *(
            torch.autograd.grad(x, list(framework.encoder.parameters()), retain_graph=True)
            for x in (ours, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_attraction_does_not_reach_the_first_head() -> None:
    views, ids = batch()
    found = []
    for detector in (Scripted(same_class(2)), Scripted(same_class(3))):
        framework = made(detector)
        framework(views, ids).backward()
        grad = framework.head.weight.grad
        assert isinstance(grad, torch.Tensor)
        found.append(grad)
    torch.testing.assert_close(*found)


def test_a_threshold_is_one_of_the_first_head() -> None:
    views, ids = batch()
    framework = made(FNC(min_similarity=0.4))
    framework(views, ids)
    z = F.normalize(framework.head(framework.encoder(views.flatten(0, 1))), dim=1)
    other = (ids.repeat(2).unsqueeze(1) != ids.repeat(2)).sum()
    above = ((z @ z.T > 0.4) & (ids.repeat(2).unsqueeze(1) != ids.repeat(2))).sum()
    assert 0 < above < other
    assert int(framework.stats.flagged) == int(above)


@pytest.mark.parametrize(
    "detector",
    [
        GloFND(num_samples=N, alpha=0.2, init="quantile"),
        Ring(lower=0.3, upper=0.8),
        Guide(torch.eye(N), margin=0.9),
    ],
)
def test_other_detectors_work_on_it(detector: Detector) -> None:
    framework = made(detector)
    loss = framework(*batch())
    loss.backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for p in framework.parameters()
        if p.requires_grad
    )


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a detector with the action 'attract'"):
        made(Components(), "eliminate")
    with pytest.raises(ValueError, match="needs a detector with the action 'attract'"):
        made(None)
    with pytest.raises(ValueError, match=r"must be false with Teacher"):
        made(Teacher())
    context = Context(N, second_head=nn.Linear(8, 4))
    with pytest.raises(
        UsageError,
        match=r"`head.second` \(=True\) must be false with sogclr: a second head is for simclr",
    ):
        build(parse("sogclr+components"), nn.Flatten(), nn.Linear(12, 4), context)
