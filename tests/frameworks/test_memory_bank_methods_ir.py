"""IR equals the loops over its equation, step after step; its bank and its draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.detectors import FNC, Detector, GloFND, Oracle, Ring
from kinfolk.frameworks import IR
from kinfolk.pairs import ACTIONS
from tests.cover import pairwise
from tests.frameworks.steps import assert_writes_nothing
from tests.frameworks.test_moco import kin_of
from tests.reference import queues
from tests.reference import ring as reference

NUM_SAMPLES, BATCH, T = 40, 6, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 4


def made(num_negatives: int | None = None, bank_momentum: float = 0.5, **more: Any) -> IR:
    torch.manual_seed(0)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    return IR(encoder, head, NUM_SAMPLES, num_negatives, bank_momentum, T, **more).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    # some twice
    return torch.randn(1, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randint(
        12, (size,), generator=g
    )


@pytest.mark.parametrize("num_negatives", [None, 15, 39, 4096])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_is_equation_3_with_the_bank_of_earlier_batches(
    num_negatives: int | None, momentum: float
) -> None:
    framework = made(num_negatives, momentum)
    bank = framework.bank.features.clone()
    optimizer = torch.optim.SGD(framework.parameters(), lr=0.1)
    for step in range(5):
        views, ids = batch(step)
        z = framework.head(framework.encoder(views[0]))
        drawn = framework.draw.ids().tolist()
        assert len(set(drawn)) == len(drawn) == min(num_negatives or NUM_SAMPLES, NUM_SAMPLES)
        slow = queues.ir(z, ids.tolist(), bank, drawn, T)
        expected = torch.autograd.grad(
            slow, list(framework.encoder.parameters()), retain_graph=True
        )
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, slow)
        torch.testing.assert_close([p.grad for p in framework.encoder.parameters()], list(expected))
        bank = queues.written(bank, ids.tolist(), z.detach(), momentum)
        torch.testing.assert_close(framework.bank.features, bank)
        optimizer.step()
    assert framework.bank.features.dtype == torch.float64


def test_the_bank_is_handed_out_once_every_sample_was_seen() -> None:
    """Clusters of random vectors would mean nothing."""
    framework = made(10)
    for ids in torch.arange(NUM_SAMPLES).view(-1, 8):
        assert framework.known_features is None
        framework(torch.randn(1, len(ids), 3, 2, 2, dtype=torch.float64), ids)
    assert framework.known_features is framework.bank.features
    again = made(10)
    again.load_state_dict(framework.state_dict())
    assert again.known_features is not None


def test_the_draw_is_another_in_every_step_and_the_same_after_a_resume() -> None:
    framework, draws = made(10), []
    for step in range(3):
        draws.append(framework.draw.ids())
        framework(*batch(step))
    assert len({tuple(draw.tolist()) for draw in draws}) == 3
    torch.manual_seed(7)
    other = IR(framework.encoder, framework.head, NUM_SAMPLES, 10)
    other.load_state_dict(framework.state_dict())
    assert torch.equal(other.draw.ids(), framework.draw.ids())


def test_pooled_kin_stand_inside_the_logarithm() -> None:
    """Ring + C_i: equation 5 of the Ring paper, with the members of the anchor's cluster above and
    those and the ring below."""
    ring = Ring(lower=0.3, upper=0.8, num_samples=NUM_SAMPLES, num_clusters=4)
    ring.refresh(torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1)), 0.0)
    assert ring.clusters is not None
    framework, cluster = (
        made(detector=ring, action="attract", pool_kin=True),
        ring.clusters.labels[0].tolist(),
    )
    views, ids = batch(0)
    bank, rows = framework.bank.features.clone(), []
    z = torch.nn.functional.normalize(framework.head(framework.encoder(views[0])), dim=1)
    for anchor, own in zip(z, ids.tolist(), strict=True):
        others = [j for j in range(NUM_SAMPLES) if j != own]
        sim = [(anchor @ bank[j]).item() for j in others]
        _, inside, _ = reference.ring(sim, "0.3", "0.8")
        close = {own} | {j for j in others if cluster[j] == cluster[own]}
        below = close | {others[place] for place in inside}
        above, all_of_it = (
            torch.stack([(anchor @ bank[j] / T).exp() for j in sorted(part)]).sum()
            for part in (close, below)
        )
        rows.append(-(above / all_of_it).log())
    slow = torch.stack(rows).mean()
    expected = torch.autograd.grad(slow, list(framework.encoder.parameters()))
    loss = framework(views, ids)
    loss.backward()
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close([p.grad for p in framework.encoder.parameters()], list(expected))


@pytest.mark.parametrize("detector", [None, Oracle(LABELS)])
def test_without_attracted_kin_there_is_nothing_to_pool(detector: Detector | None) -> None:
    torch.testing.assert_close(
        made(detector=detector, pool_kin=True)(*batch(0)), made(detector=detector)(*batch(0))
    )


@pytest.mark.parametrize(
    ("action", "name", "num_negatives"), pairwise(ACTIONS, ["fnc", "glofnd", "oracle"], [None, 20])
)
def test_detectors_look_at_the_bank(name: str, action: Any, num_negatives: int | None) -> None:
    glofnd = GloFND(num_samples=NUM_SAMPLES, alpha=0.2, rule="sgd", lr=0.5)
    glofnd.store.threshold.fill_(0.3)
    detectors: dict[str, Detector] = {
        "fnc": FNC(alpha=0.25),
        "glofnd": glofnd,
        "oracle": Oracle(LABELS),
    }
    framework = made(num_negatives, detector=detectors[name], action=action, kin_weight=0.25)
    framework.set_eval_labels(LABELS)
    views, ids = batch(0)[0], torch.arange(BATCH) * 5
    z, bank, drawn = (
        framework.head(framework.encoder(views[0])),
        framework.bank.features.clone(),
        framework.draw.ids().tolist(),
    )
    sims = [
        [float("-inf") if i == j else (v @ bank[j] / v.norm()).item() for j in drawn]
        for v, i in zip(z, ids.tolist(), strict=True)
    ]
    kin = [
        {j for j in mine if drawn[j] != i}
        for mine, i in zip(kin_of(name, sims, ids, drawn), ids.tolist(), strict=True)
    ]
    degree = 0.75 if action == "reweight" else 1.0
    slow = queues.ir(z, ids.tolist(), bank, drawn, T, lambda i, j: degree * (j in kin[i]), action)
    torch.testing.assert_close(framework(views, ids), slow)
    assert framework.stats.counts[1] == sum(map(len, kin)) > 0


@pytest.mark.parametrize("decoupled", [False, True])
def test_prior_and_hardness_apply_to_the_drawn_entries(decoupled: bool) -> None:
    framework = made(10, prior=0.1, hardness=0.6, decoupled=decoupled)
    views, ids = batch(0)
    bank, drawn, losses = framework.bank.features.clone(), framework.draw.ids().tolist(), []
    for z, i in zip(framework.head(framework.encoder(views[0])), ids.tolist(), strict=True):
        anchor = z / z.norm()
        own, sums = (
            torch.exp(anchor @ bank[i] / T),
            torch.stack([torch.exp(anchor @ bank[j] / T) for j in drawn if j != i]),
        )
        hard = sums**0.6
        estimate = (-0.1 * len(sums) * own + (hard * sums).sum() / hard.mean()) / 0.9
        estimate = estimate.clamp(min=len(sums) * math.exp(-1 / T))
        losses.append(-torch.log(own / (estimate if decoupled else own + estimate)))
    slow, weights = torch.stack(losses).mean(), list(framework.encoder.parameters())
    loss = framework(views, ids)
    torch.testing.assert_close(loss, slow)
    for ours, theirs in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(slow, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_gradient_is_right() -> None:
    framework = made(20, detector=Oracle(LABELS), action="attract").eval()
    views, ids = batch(1, size=3)
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_evaluation_and_broken_steps_write_nothing() -> None:
    framework = made(20, detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.2))
    framework(*batch(0))
    assert_writes_nothing(framework, *batch(1))


def test_the_state_loads_strictly() -> None:
    framework = made(20)
    framework(*batch(0))
    assert {"bank.features", "draw.count", "draw.seed"} <= framework.state_dict().keys()
    made(20).load_state_dict(framework.state_dict())
    smaller = IR(framework.encoder, framework.head, NUM_SAMPLES - 1)
    with pytest.raises(
        RuntimeError, match="has the size 40 × 5, but `num_samples` × `dim` is 39 × 5"
    ):
        smaller.load_state_dict(framework.state_dict())
    with pytest.raises(ValueError, match=r"`num_negatives` \(=0\) must be at least 1"):
        made(0)
    with pytest.raises(ValueError, match=r"`ids` \(=40\) must be in \[0, 40\)"):
        framework(batch(1)[0], torch.arange(35, 41))
