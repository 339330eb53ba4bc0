"""Fine-tuning: learns, leaves the encoder as it was, is seeded, copes with tiny and odd label
sets."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.data.views import Views
from kinfolk.errors import KinfolkError
from kinfolk.evaluation.gradient_training import TUNINGS, TuningSettings, finetune, rate_factor
from kinfolk.models import build_encoder
from tests.data.images import PixelData

VIEWS = Views("plain", 8, scale=(0.8, 1.0))


class Images(PixelData):
    """Bright and dark images, in turn."""

    def __init__(self, count: int, classes: int = 2) -> None:
        self.labels = torch.arange(count) % classes
        noise = torch.randint(0, 60, (count, 8, 8, 3), generator=torch.Generator().manual_seed(0))
        super().__init__(
            (noise + (190 // max(1, classes - 1)) * self.labels.view(-1, 1, 1, 1)).to(torch.uint8)
        )

    def part(self, *where: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(*where)
        return ids, self.labels[ids]


@pytest.fixture
def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_encoder("resnet10", stem="cifar", width=4).eval()


def test_learns_and_leaves_the_encoder_as_it_was(encoder: torch.nn.Module) -> None:
    data = Images(80)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    random = torch.get_rng_state()
    parts: tuple[Any, Any] = data.part(40), data.part(40, 80)
    settings = TuningSettings(batch_size=16)
    found = finetune(encoder, data, VIEWS, *parts, settings, epochs=6)
    assert found.accuracy > 0.9
    assert (found.epochs, found.steps) == (6, 18)
    assert math.isnan(found.top5)
    assert found.loss < 0.6
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert not encoder.training
    assert torch.equal(torch.get_rng_state(), random)
    assert finetune(encoder, data, VIEWS, *parts, settings, epochs=6) == found
    assert finetune(encoder, data, VIEWS, *parts, settings, epochs=6, seed=1) != found


def test_few_samples_are_met_more_often(
    encoder: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the function has its name
    monkeypatch.setattr(sys.modules["kinfolk.evaluation.gradient_training"], "FEWEST_STEPS", 25)
    data = Images(20)
    found = finetune(encoder, data, VIEWS, data.part(2), data.part(2, 20))
    assert (found.epochs, found.steps) == (25, 25)
    pairs = TuningSettings(batch_size=2)
    odd = finetune(encoder, data, VIEWS, data.part(3), data.part(3, 20), pairs, epochs=1)
    assert odd.steps == 1, "no batch of a single sample"


def test_top5_and_unknown_test_classes(encoder: torch.nn.Module) -> None:
    data = Images(40, classes=8)
    known = data.labels < 7
    train = torch.arange(40)[known][:28], data.labels[known][:28]
    found = finetune(encoder, data, VIEWS, train, data.part(32, 40), epochs=1)
    assert 0 <= found.accuracy <= found.top5 <= 7 / 8


def test_fine_tuning_by_rcl_uses_nesterov_and_a_cosine(encoder: torch.nn.Module) -> None:
    """Nesterov momentum and a cosine; the rate goes by the size of the batches, so that a few
    samples do not make it diverge."""
    data = Images(80)
    given: tuple[Any, Any, Any, Any, Any] = (
        encoder,
        data,
        VIEWS,
        data.part(40),
        data.part(40, 80),
    )
    found = finetune(*given, "rcl", epochs=8)
    assert (found.epochs, found.steps) == (8, 8)
    assert found.loss < 0.69
    assert finetune(*given, replace(TUNINGS["rcl"], decay=0.2), epochs=8) != found
    assert finetune(*given, replace(TUNINGS["rcl"], nesterov=False), epochs=8) != found
    with pytest.raises(ValueError, match=r"`settings` \(='simclr'\) must be one of ifnd, rcl"):
        finetune(*given, "simclr")


@pytest.mark.parametrize(
    ("name", "fraction", "epochs"), [("rcl", 0.0999, 30), ("rcl", 0.01, 60), ("ifnd", 0.01, 20)]
)
def test_epochs_and_rates_go_by_the_share_of_the_labels(
    name: str, fraction: float, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[list[float], int]] = []

    def fake(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, decay: Any, epochs: int, *_: Any
    ) -> list[float]:
        received.append(([group["lr"] for group in optimizer.param_groups], epochs))
        return [0.0]

    module = sys.modules["kinfolk.evaluation.gradient_training"]
    monkeypatch.setattr(module, "_train", fake)
    monkeypatch.setattr(module, "FEWEST_STEPS", 1)
    data = Images(20)
    encoder = build_encoder("resnet10", stem="cifar", width=4).eval()
    finetune(encoder, data, VIEWS, data.part(10), data.part(10, 20), name, fraction=fraction)
    ((rates, number),) = received
    assert rates == pytest.approx([0.8 * 10 / 4096] * 2 if name == "rcl" else [0.01, 1.0])
    assert number == epochs


def test_rates_fall_by_steps_or_by_a_cosine() -> None:
    assert [rate_factor(0.2, epoch, 20) for epoch in (0, 11, 12, 16)] == pytest.approx(
        [1, 1, 0.2, 0.04]
    )
    assert [rate_factor("cosine", epoch, 20) for epoch in (0, 10, 20)] == pytest.approx([1, 0.5, 0])


def test_wrong_arguments_are_refused_in_one_sentence(encoder: torch.nn.Module) -> None:
    data = Images(10)
    one = torch.tensor([0, 2]), torch.tensor([0, 0])
    with pytest.raises(
        KinfolkError, match="at least two classes; the 2 labelled training samples have 1"
    ):
        finetune(encoder, data, VIEWS, one, data.part(5, 10))
    with pytest.raises(KinfolkError, match="test part has no labelled samples"):
        finetune(encoder, data, VIEWS, data.part(5), data.part(0))
    with pytest.raises(ValueError, match=r"`epochs` \(=0\)"):
        finetune(encoder, data, VIEWS, data.part(5), data.part(5, 10), epochs=0)
    wild = TuningSettings(lr=1e30)
    with pytest.raises(KinfolkError, match="not finite"):
        finetune(encoder, data, VIEWS, data.part(5), data.part(5, 10), wild, epochs=4)
