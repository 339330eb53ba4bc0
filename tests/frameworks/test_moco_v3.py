"""MoCo v3 equals the loops over its algorithm, step after step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors import FNC, IFND, GloFND, Oracle
from kinfolk.frameworks import MoCoV3
from kinfolk.pairs import ACTIONS
from tests.reference import queues

NUM_SAMPLES, BATCH, T = 20, 6, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 3


def made(**more: Any) -> MoCoV3:
    torch.manual_seed(0)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    return MoCoV3(
        encoder, head, **{"momentum": 0.9, "predictor_size": 7, "temperature": T, **more}
    ).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(2, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randperm(
        NUM_SAMPLES, generator=g
    )[:size]


def slow(framework: MoCoV3, views: Tensor, ids: Tensor, action: str | None = None) -> Tensor:
    """The other view's keys are the positives and the negatives; with an action, samples of one
    label are kin."""
    queries = framework.predictor(framework.head(framework.encoder(views.flatten(0, 1)))).chunk(2)
    keys = framework.slow(views.flatten(0, 1)).chunk(2)
    label = LABELS[ids].tolist()
    total = torch.zeros((), dtype=torch.float64)
    for query, key in ((queries[0], keys[1]), (queries[1], keys[0])):
        entries = [(k / k.norm(), int(i)) for k, i in zip(key, ids, strict=True)]
        kinship = (
            queues.no_kin
            if action is None
            else lambda i, j: (0.5 if action == "reweight" else 1.0) * (label[i] == label[j])
        )
        total = (
            total
            + queues.moco(query, key, ids.tolist(), entries, T, kinship, action or "eliminate") / 2
        )
    return total


@pytest.mark.parametrize("action", [None, *ACTIONS])
def test_it_is_algorithm_1(action: Any) -> None:
    """Loss and gradient of all parts over steps in which the copy follows."""
    framework = made() if action is None else made(detector=Oracle(LABELS), action=action)
    trained = [p for p in framework.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(4):
        views, ids = batch(step)
        expected = slow(framework, views, ids, action)
        gradient = torch.autograd.grad(expected, trained)
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close([p.grad for p in trained], list(gradient))
        optimizer.step()
        framework.after_step()
    assert not torch.equal(
        framework.get_parameter("slow.head.weight"), framework.get_parameter("head.weight")
    )


def test_nothing_flagged_is_the_plain_loss() -> None:
    plain, silent = made(), made(detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.0))
    assert torch.equal(plain(*batch(0)), silent(*batch(0)))


def test_the_counts_are_of_both_directions() -> None:
    framework = made(detector=FNC(top_k=1))
    framework.set_eval_labels(LABELS)
    framework(*batch(0))
    assert int(framework.stats.negatives) == 2 * BATCH * (BATCH - 1)
    assert int(framework.stats.flagged) == 2 * BATCH
    assert int(framework.stats.positives) == 2 * BATCH


def test_a_detector_that_collects_receives_keys() -> None:
    detector = IFND(num_samples=NUM_SAMPLES, num_clusters=(3,), source="bank")
    framework = made(detector=detector)
    views, ids = batch(0)
    keys = F.normalize(framework.slow(views[0]), dim=1)
    framework(views, ids)
    assert detector.collected is not None
    torch.testing.assert_close(
        detector.collected.features[ids].double(), keys, atol=1e-6, rtol=1e-5
    )


def test_the_gradient_is_right() -> None:
    framework = made().eval()
    views, ids = batch(1, size=3)
    keys = framework.slow(views.flatten(0, 1))
    framework.slow.forward = lambda images: keys  # type: ignore[method-assign]  # whose gradient is stopped
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_the_momentum_rises_to_one() -> None:
    framework = made()
    found = []
    for epoch in range(5):
        framework.set_progress(epoch, 4)
        found.append(framework.slow.momentum)
    assert found == pytest.approx([0.9, 0.914645, 0.95, 0.985355, 1.0], abs=1e-6)


def test_the_state_loads_strictly_and_goes_on() -> None:
    one, other = made(), made()
    one(*batch(0)).backward()
    one.after_step()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(*batch(1)), other(*batch(1)))
    assert {"predictor.0.weight", "slow.head.weight"} <= one.state_dict().keys()
    assert torch.equal(one.embed(batch(2)[0][0]), F.normalize(one.slow(batch(2)[0][0]), dim=1))
