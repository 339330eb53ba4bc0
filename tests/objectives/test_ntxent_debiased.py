from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.objectives import CLIPLoss, NTXentLoss
from kinfolk.pairs import Pairs
from tests.reference.debiased import debiased_ntxent
from tests.scripted import Scripted, same_class


def views(n: int = 7, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(n, d, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )  # type: ignore[return-value]


def require_equal(ours: Tensor, slow: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, slow)
    for a, b in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(slow, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "settings",
    [
        {"prior": 0.1},
        {"prior": 0.9},
        {"hardness": 0.5},
        {"hardness": 2.0},
        {"prior": 0.1, "hardness": 1.0},
        {"decoupled": True},
        {"prior": 0.1, "hardness": 0.5, "decoupled": True},
    ],
)
@pytest.mark.parametrize("block_rows", [None, 4])
def test_equals_the_published_equations(settings: dict[str, Any], block_rows: int | None) -> None:
    z1, z2 = views()
    require_equal(
        NTXentLoss(temperature=0.4, block_rows=block_rows, **settings)(z1, z2),
        debiased_ntxent(z1, z2, 0.4, **settings),
        z1,
        z2,
    )


def test_the_clamp_is_reached_and_left_in_one_batch() -> None:
    """Some rows of this batch are at the least possible sum, which has no gradient, and some
    above."""
    z1, z2 = views()
    z = torch.nn.functional.normalize(torch.cat((z1, z2)).detach(), dim=1)
    e = torch.exp(z @ z.T / 0.4)
    own = torch.arange(14)
    pos = e[own, (own + 7) % 14]
    n_g = (-0.5 * 12 * pos + e.sum(1) - e.diagonal() - pos) / 0.5
    held = n_g < 12 * math.exp(-1 / 0.4)
    assert held.any()
    assert not held.all()
    ours = NTXentLoss(temperature=0.4, prior=0.5)(z1, z2)
    require_equal(ours, debiased_ntxent(z1, z2, 0.4, prior=0.5), z1, z2)


def test_nothing_known_is_ntxent_bit_for_bit() -> None:
    z1, z2 = views()
    off: list[dict[str, Any]] = [{"prior": 0.0}, {"hardness": 0.0}, {"prior": 0.0, "hardness": 0.0}]
    for settings in off:
        assert torch.equal(
            NTXentLoss(temperature=0.3, **settings)(z1, z2), NTXentLoss(temperature=0.3)(z1, z2)
        )
    assert torch.equal(
        NTXentLoss(temperature=0.3, prior=0.1, hardness=0.0)(z1, z2),
        NTXentLoss(temperature=0.3, prior=0.1)(z1, z2),
    )


@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
def test_the_gradient_with_a_detector_equals_finite_differences(action: Any) -> None:
    z1, z2 = views(5, 3)
    loss_fn = NTXentLoss(
        temperature=0.5,
        prior=0.1,
        hardness=0.7,
        detector=Scripted(same_class(2)),
        action=action,
        kin_weight=0.3,
        block_rows=3,
    )
    assert torch.autograd.gradcheck(loss_fn, (z1, z2))


def test_eliminated_kin_are_as_good_as_absent_whatever_the_weights() -> None:
    """An anchor of class 0 without the candidates of class 0: the other class alone stands in the
    weighted mean."""
    z1, z2 = views(6)
    anchors, ids = z1[:1], torch.zeros(1, dtype=torch.int64)
    both = Pairs(anchors, z2[1:], z2[:1].unsqueeze(1), ids, torch.arange(1, 6))
    odd = Pairs(anchors, z2[1::2], z2[:1].unsqueeze(1), ids, torch.arange(1, 6, 2))
    wanted: list[dict[str, Any]] = [{"hardness": 0.8}, {"prior": 0.05, "hardness": 0.8}]
    for settings in wanted:
        torch.testing.assert_close(
            NTXentLoss(temperature=0.3, detector=Scripted(same_class(2)), **settings).on(both),
            NTXentLoss(temperature=0.3, **settings).on(odd),
        )


def test_the_temperature_of_image_and_text_is_learned_through_both() -> None:
    z1, z2 = views(5, 3)
    loss_fn = CLIPLoss(temperature=0.4, prior=0.1, hardness=0.6).double()
    scale = loss_fn.temperature_parameters()[0]

    def at(value: Tensor) -> Tensor:
        images, texts = (torch.nn.functional.normalize(z, dim=1) for z in (z1, z2))
        t, total = torch.exp(-value), torch.zeros((), dtype=torch.float64)
        for sim in (images @ texts.T, texts @ images.T):
            own = torch.exp(sim.diag() / t)
            others = ~torch.eye(5, dtype=torch.bool)
            neg = torch.where(others, torch.exp(sim / t), 0.0)
            imp = torch.where(others, torch.exp(0.6 * sim / t), 0.0)
            ng = (-0.1 * 4 * own + (imp * neg).sum(1) / (imp.sum(1) / 4)) / 0.9
            total = (
                total - torch.log(own / (own + torch.maximum(ng, 4 * torch.exp(-1 / t)))).mean() / 2
            )
        return total

    require_equal(loss_fn(z1, z2), at(scale), z1, z2, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_temperature_and_few_bits_stay_finite(dtype: torch.dtype) -> None:
    z1, z2 = (z.detach().to(dtype).requires_grad_() for z in views(16))
    loss = NTXentLoss(temperature=0.01, prior=0.1, hardness=1.0)(z1, z2)
    loss.backward()
    exact = NTXentLoss(temperature=0.01, prior=0.1, hardness=1.0)(z1.double(), z2.double())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=1e-3)
    assert z1.grad is not None
    assert z1.grad.isfinite().all()


def test_an_anchor_without_negatives_has_no_loss() -> None:
    z1, z2 = views(1)
    loss = NTXentLoss(temperature=0.3, prior=0.1, hardness=0.5)(z1, z2)
    assert loss == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (z1, z2)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior": 1.0}, r"`prior` \(=1.0\) must be in \[0, 1\)"),
        ({"hardness": -0.1}, r"`hardness` \(=-0.1\) must be at least 0"),
        (
            {"prior": 0.1, "rescale_kept": True},
            "`rescale_kept` .* must be False with `prior` or `hardness`",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NTXentLoss(temperature=0.3, **settings)


def test_the_call_is_shown() -> None:
    assert (
        repr(NTXentLoss(temperature=0.3, prior=0.1, hardness=0.5))
        == "NTXentLoss(temperature=0.3, prior=0.1, hardness=0.5)"
    )
