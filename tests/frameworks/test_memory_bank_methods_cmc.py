"""CMC equals the loops over its equations, step after step; two banks, two detectors, one draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.detectors import GloFND, Oracle, StartAt
from kinfolk.frameworks import CMC, IR
from kinfolk.models import SplitEncoder, SplitHead
from kinfolk.pairs import ACTIONS
from tests.frameworks.steps import assert_writes_nothing
from tests.reference import multiview, queues

NUM_SAMPLES, BATCH, T = 40, 6, 0.3
LABELS = torch.arange(NUM_SAMPLES) % 4


class Tower(nn.Sequential):
    output_size = 7

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(4 * channels, 7), nn.LayerNorm(7), nn.ReLU())


def made(num_negatives: int | None = None, bank_momentum: float = 0.5, **more: Any) -> CMC:
    torch.manual_seed(0)
    encoder = SplitEncoder([Tower(1), Tower(2)], (1, 2))
    head = SplitHead([nn.Linear(7, 5), nn.Linear(7, 5)], encoder.output_sizes)
    return CMC(
        encoder, head, NUM_SAMPLES, num_negatives, bank_momentum, **{"temperature": T, **more}
    ).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    # some twice
    return torch.randn(1, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randint(
        12, (size,), generator=g
    )


def parts_of(framework: CMC, views: Tensor) -> tuple[Tensor, Tensor]:
    """Each part through its own tower and head."""
    towers, heads = framework.encoder.towers, framework.head.heads
    assert isinstance(towers, nn.ModuleList)
    assert isinstance(heads, nn.ModuleList)
    return heads[0](towers[0](views[0][:, :1])), heads[1](towers[1](views[0][:, 1:]))


@pytest.mark.parametrize("num_negatives", [None, 15, 4096])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_is_two_losses_with_the_banks_swapped(
    num_negatives: int | None, momentum: float
) -> None:
    framework = made(num_negatives, momentum)
    light_bank, colour_bank = (
        framework.light_bank.features.clone(),
        framework.colour_bank.features.clone(),
    )
    assert not torch.allclose(light_bank, colour_bank)
    optimizer, draws = torch.optim.SGD(framework.parameters(), lr=0.1), set()
    for step in range(4):
        views, ids = batch(step)
        light, colour = parts_of(framework, views)
        drawn = framework.draw.ids().tolist()
        draws.add(tuple(drawn))
        assert len(set(drawn)) == len(drawn) == min(num_negatives or NUM_SAMPLES, NUM_SAMPLES)
        slow = multiview.cmc(light, colour, ids.tolist(), light_bank, colour_bank, drawn, T)
        expected = torch.autograd.grad(
            slow, list(framework.encoder.parameters()), retain_graph=True
        )
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, slow)
        torch.testing.assert_close([p.grad for p in framework.encoder.parameters()], list(expected))
        light_bank = queues.written(light_bank, ids.tolist(), light.detach(), momentum)
        colour_bank = queues.written(colour_bank, ids.tolist(), colour.detach(), momentum)
        torch.testing.assert_close(framework.light_bank.features, light_bank)
        torch.testing.assert_close(framework.colour_bank.features, colour_bank)
        optimizer.step()
    assert len(draws) == (4 if num_negatives == 15 else 1)
    assert framework.known_features is None, "some entries are random still"
    rest = (~framework.light_bank.seen).nonzero()[:, 0]
    light, colour = torch.randn(2, len(rest), light_bank.shape[1], dtype=light_bank.dtype).unbind()
    framework.light_bank.write(rest, light)
    framework.colour_bank.write(rest, colour)
    known = torch.cat((framework.light_bank.features, framework.colour_bank.features), 1) / 2**0.5
    torch.testing.assert_close(framework.known_features, known)


class Twice(nn.Module):
    """A head whose two halves are the same."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head, self.output_size = head, 2 * head.out_features

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(x)
        return torch.cat((z, z), 1)


@pytest.mark.parametrize("pool_kin", [False, True])
def test_two_equal_parts_are_twice_instance_discrimination(pool_kin: bool) -> None:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "temperature": T,
        "detector": Oracle(LABELS),
        "action": "attract",
        "pool_kin": pool_kin,
    }
    encoder, head = Tower(3), nn.Linear(7, 5)
    cmc, ir = (
        CMC(encoder, Twice(head), NUM_SAMPLES, None, **arguments).double(),
        IR(encoder, head, NUM_SAMPLES, None, **arguments).double(),
    )
    cmc.colour_bank.load_state_dict(cmc.light_bank.state_dict())
    for step in range(3):
        torch.testing.assert_close(cmc(*batch(step)), 2 * ir(*batch(step)))


@pytest.mark.parametrize("action", ACTIONS)
def test_each_direction_has_a_separate_detector(action: Any) -> None:
    glofnd = GloFND(num_samples=NUM_SAMPLES, alpha=0.3, init="quantile")
    framework = made(20, detector=StartAt(glofnd, epoch=1), action=action)
    framework.set_eval_labels(LABELS)
    first, second = framework.detectors
    assert first is not second
    framework.set_progress(3, 7)
    assert [detector.epoch for detector in framework.detectors] == [3, 3]
    framework(*batch(0))
    light, colour = (objective.stats for objective in framework.objectives)
    assert torch.equal(framework.stats.counts, light.counts + colour.counts)
    assert framework.stats.kin > 0, "both know the labels"
    state = framework.state_dict()
    thresholds = [state[name] for name in state if name.endswith("threshold")]
    assert len(thresholds) == 2
    assert not torch.equal(thresholds[0], thresholds[1])
    assert all((threshold < 1).any() for threshold in thresholds)


def test_an_oracle_takes_the_class_out_of_both_directions() -> None:
    framework, plain = made(None, detector=Oracle(LABELS)), made(None)
    views, ids = batch(0)[0], torch.arange(BATCH)
    light, colour = parts_of(framework, views)
    banks = framework.light_bank.features.clone(), framework.colour_bank.features.clone()
    slow = sum(
        (
            queues.ir(
                z,
                ids.tolist(),
                bank,
                list(range(NUM_SAMPLES)),
                T,
                lambda i, j: float(LABELS[i] == LABELS[j]),
            )
            for z, bank in ((light, banks[1]), (colour, banks[0]))
        ),
        torch.zeros(()),
    )
    loss = framework(views, ids)
    torch.testing.assert_close(loss, slow)
    assert loss < plain(views, ids)
    assert framework.stats.flagged == 2 * BATCH * (NUM_SAMPLES // 4 - 1)


def test_what_is_evaluated_is_joined() -> None:
    framework, images = made(), batch(0)[0][0]
    light, colour = (
        nn.functional.normalize(part, dim=1) for part in parts_of(framework, images.unsqueeze(0))
    )
    assert framework.features(images).shape == (BATCH, 14)
    embedded = framework.embed(images)
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(BATCH, dtype=torch.float64))
    torch.testing.assert_close(embedded @ embedded.T, (light @ light.T + colour @ colour.T) / 2)


def test_the_gradient_is_right() -> None:
    framework = made(20, detector=Oracle(LABELS), action="attract").eval()
    views, ids = batch(1, size=3)
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_in_half_precision_only_the_networks_are_coarse() -> None:
    framework = made(20, temperature=0.01).float().to(torch.bfloat16)
    views, ids = batch(0)
    light, colour = (
        part.detach().double() for part in parts_of(framework, views.to(torch.bfloat16))
    )
    light_bank, colour_bank = (
        bank.features.double() for bank in (framework.light_bank, framework.colour_bank)
    )
    assert framework.light_bank.features.dtype == torch.float32
    expected = multiview.cmc(
        light, colour, ids.tolist(), light_bank, colour_bank, framework.draw.ids().tolist(), 0.01
    )
    torch.testing.assert_close(
        framework(views.to(torch.bfloat16), ids).double(), expected, rtol=1e-4, atol=1e-4
    )


def test_evaluation_and_broken_steps_write_nothing() -> None:
    framework = made(20, detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.2))
    framework(*batch(0))
    assert_writes_nothing(framework, *batch(1))


def test_saved_and_continued_is_the_same() -> None:
    def trained(framework: CMC, steps: range) -> CMC:
        optimizer = torch.optim.SGD(framework.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            framework(*batch(step)).backward()
            optimizer.step()
        return framework

    def new() -> CMC:
        return made(15, detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.2))

    whole, first = trained(new(), range(4)), trained(new(), range(2))
    torch.manual_seed(9)
    again = new()
    again.draw.seed.fill_(5)
    again.load_state_dict(first.state_dict())
    ours, theirs = trained(again, range(2, 4)).state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`head` \(=5\) must be of an even number of outputs"):
        CMC(Tower(3), nn.Linear(7, 5), NUM_SAMPLES)
    with pytest.raises(ValueError, match=r"`num_negatives` \(=0\) must be at least 1"):
        made(0)
