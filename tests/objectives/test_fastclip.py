from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import GloFND
from kinfolk.objectives import BimodalSogCLRLoss, FastCLIPLoss
from kinfolk.pairs import Action
from tests.cover import pairwise
from tests.reference import bimodal
from tests.scripted import Scripted, same_class

ACTIONS: tuple[Action, ...] = ("eliminate", "attract", "reweight")
BATCHES = [[0, 1, 2, 3], [2, 3, 4, 5], [9, 0, 4, 2]]
GROUPS = [7, -1, 7, 7, -1, -1, -1, -1, -1, 3]


def batch(seed: int, ids: list[int], d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images, texts = (
        torch.randn(len(ids), d, dtype=torch.float64, generator=g).requires_grad_()
        for _ in range(2)
    )
    return images, texts, torch.tensor(ids)


@pytest.mark.parametrize(
    ("action", "epsilon", "grouped", "by_t"),
    pairwise([None, *ACTIONS], [0.0, 0.2], [False, True], ["released", "exact"]),
)
def test_value_gradient_and_state_equal_the_equations(
    action: Action | None, epsilon: float, grouped: bool, by_t: Any
) -> None:
    detector = None if action is None else Scripted(same_class(4))
    chosen: dict[str, Any] = {
        "detector": detector,
        "action": action or "eliminate",
        "kin_weight": 0.25,
        "temperature_gradient": by_t,
    }
    loss_fn = FastCLIPLoss(
        num_samples=10,
        temperature=0.3,
        rho=1.5,
        gamma=0.7,
        decay_epochs=None,
        epsilon=epsilon,
        **chosen,
    ).double()
    factor, (scale,) = (
        {None: 0.0, "reweight": 0.75}.get(action, 1.0),
        loss_fn.temperature_parameters(),
    )
    u: bimodal.Averages = [{}, {}]
    for seed, ids in enumerate(BATCHES):
        images, texts, tensor = batch(seed, ids)
        groups = torch.tensor([GROUPS[i] for i in ids]) if grouped else None
        keys = [GROUPS[i] if GROUPS[i] >= 0 else -1 - i for i in ids] if grouped else ids

        def kinship(i: int, j: int, ids: list[int] = ids) -> float:
            return factor * (ids[i] % 4 == ids[j] % 4)

        value, surrogate, new = bimodal.fastclip(
            images,
            texts,
            ids,
            keys,
            u,
            torch.exp(-scale),
            0.7,
            1.5,
            epsilon,
            kinship,
            action or "eliminate",
            by_t == "released",
        )
        loss = loss_fn(images, texts, tensor, groups)
        assert loss.item() == pytest.approx(value, rel=1e-6)
        inputs = (images, texts, scale)
        for ours, slow in zip(
            torch.autograd.grad(loss, inputs), torch.autograd.grad(surrogate, inputs), strict=True
        ):
            torch.testing.assert_close(ours, slow)
        for side, objective in enumerate(loss_fn.objectives):
            u[side] |= new[side]
            expected = torch.tensor([u[side].get(i, 0.0) for i in range(10)], dtype=torch.float64)
            torch.testing.assert_close(objective.u, expected)


@pytest.mark.parametrize("action", ACTIONS)
def test_gradcheck_by_features_and_temperature(action: Action) -> None:
    images, texts, ids = batch(0, [0, 1, 2, 3, 4])
    loss_fn = FastCLIPLoss(
        num_samples=5,
        temperature=0.4,
        rho=2.0,
        gamma=1.0,
        decay_epochs=None,
        epsilon=0.3,
        detector=Scripted(same_class(3)),
        action=action,
        temperature_gradient="exact",
    )
    loss_fn = loss_fn.double().eval()

    def at(scale: Tensor, *features: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(
            loss_fn, {"learned.logit_scale": scale}, (*features, ids)
        )
        return loss

    assert torch.autograd.gradcheck(
        at, (torch.tensor(0.9, dtype=torch.float64, requires_grad=True), images, texts)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_the_batch_estimate_without_rho_is_that_of_sogclr(action: Action) -> None:
    images, texts, ids = batch(0, [0, 1, 2, 3, 4])
    kin = Scripted(same_class(3))
    ours = FastCLIPLoss(
        num_samples=5,
        temperature=0.25,
        rho=0.0,
        gamma=1.0,
        decay_epochs=None,
        epsilon=0.0,
        detector=kin,
        action=action,
    ).double()
    base = BimodalSogCLRLoss(
        num_samples=5, temperature=0.25, gamma=1.0, detector=kin, action=action
    ).double()
    for _ in range(2):
        a, b = ours(images, texts, ids), base(images, texts, ids)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(
            torch.autograd.grad(a, images), torch.autograd.grad(b, images), rtol=1e-6, atol=1e-8
        )


def test_the_temperature_settles_where_rho_says() -> None:
    """At the minimum the mean of KL(shares ‖ uniform) over the anchors is ρ: a larger ρ leads to a
    lower temperature."""
    images, texts, ids = batch(0, list(range(40)), 8)
    found = []
    for rho in (0.3, 0.9):
        loss_fn = FastCLIPLoss(
            num_samples=40,
            temperature=0.3,
            rho=rho,
            gamma=1.0,
            decay_epochs=None,
            epsilon=0.0,
            temperature_gradient="exact",
        )
        optimizer = torch.optim.Adam([{"params": loss_fn.temperature_parameters(), "lr": 0.05}])
        for _ in range(80):
            optimizer.zero_grad()
            loss_fn(images.detach(), texts.detach(), ids).backward()
            optimizer.step()
        t = loss_fn.current_temperature
        sim = (
            torch.nn.functional.normalize(images, dim=1)
            @ torch.nn.functional.normalize(texts, dim=1).T
            / t
        )
        divergence = 0.0
        for logits in (sim, sim.T):
            log_p = logits.masked_fill(torch.eye(40, dtype=torch.bool), -torch.inf).log_softmax(1)
            divergence += (log_p.exp() * (log_p + math.log(39)).nan_to_num(neginf=0.0)).sum(
                1
            ).mean().item() / 2
        assert divergence == pytest.approx(rho, rel=0.05)
        found.append(t)
    assert found[1] < found[0]


def test_only_the_released_gradient_keeps_the_temperature_up_before_anything_is_learned() -> None:
    """With the exact one and fewer than exp(ρ) negatives it falls to its floor."""
    images, texts, ids = batch(0, list(range(64)), 16)
    found = {}
    for by_t in ("exact", "released"):
        loss_fn = FastCLIPLoss(
            num_samples=64,
            temperature=0.07,
            rho=6.5,
            gamma=1.0,
            decay_epochs=None,
            temperature_gradient=by_t,
        )
        optimizer = torch.optim.Adam([{"params": loss_fn.temperature_parameters(), "lr": 0.05}])
        for _ in range(60):
            optimizer.zero_grad()
            loss_fn(images.detach(), texts.detach(), ids).backward()
            optimizer.step()
        found[by_t] = loss_fn.current_temperature
    assert found["exact"] < 0.011
    assert found["released"] > 0.04


def test_the_rate_of_the_temperature_falls_to_a_third_below_three_hundredths() -> None:
    loss_fn = FastCLIPLoss(num_samples=4, temperature=0.07)
    (scale,) = loss_fn.temperature_parameters()
    optimizer = torch.optim.AdamW(
        [{"params": loss_fn.temperature_parameters(), "lr": 2e-4, "weight_decay": 0}]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: loss_fn.temperature_lr_factor
    )
    assert schedule.get_last_lr() == [2e-4]
    with torch.no_grad():
        scale.fill_(-math.log(0.029))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([2e-4 / 3])
    with torch.no_grad():
        scale.fill_(-math.log(0.031))
    assert loss_fn.temperature_lr_factor == 1


def test_the_weight_of_the_new_value_falls_by_default() -> None:
    loss_fn = FastCLIPLoss(num_samples=4)
    assert float(loss_fn.image.current_gamma) == 1
    loss_fn.set_progress(9, 37)
    assert float(loss_fn.text.current_gamma) == pytest.approx(0.6)
    loss_fn.set_progress(20, 37)
    assert float(loss_fn.image.current_gamma) == 0.2


def test_half_precision_and_low_temperature_stay_finite() -> None:
    loss_fn = FastCLIPLoss(
        num_samples=4,
        temperature=0.01,
        decay_epochs=None,
        detector=GloFND(num_samples=4, alpha=0.3, init="quantile"),
    ).bfloat16()
    images, texts, ids = batch(0, [0, 1, 2, 3])
    for _ in range(3):
        loss = loss_fn(images.bfloat16(), texts.bfloat16(), ids)
        loss.backward()
        assert loss.isfinite()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert all(value.isfinite().all() for value in loss_fn.state_dict().values())


def test_evaluation_writes_nothing_and_a_saved_state_goes_on() -> None:
    data = [batch(seed, ids) for seed, ids in enumerate(BATCHES)]
    whole, first, second = (
        FastCLIPLoss(num_samples=10, detector=GloFND(num_samples=10, alpha=0.3)) for _ in range(3)
    )
    expected = [whole(*b).item() for b in data]
    first(*data[0])
    second.load_state_dict(first.state_dict())
    assert [second(*b).item() for b in data[1:]] == expected[1:]
    before = copy.deepcopy(second.state_dict())
    second.eval()(*data[0])
    assert all(torch.equal(before[key], value) for key, value in second.state_dict().items())


def test_a_batch_without_negatives_leaves_the_averages_alone() -> None:
    loss_fn = FastCLIPLoss(num_samples=4, temperature=0.1)
    images, texts, ids = batch(0, [0, 1, 2])
    loss = loss_fn(images, texts, ids, torch.zeros_like(ids))
    pull = torch.nn.functional.cosine_similarity(images, texts).mean()
    assert loss.item() == pytest.approx(0.65 - pull.item())
    assert not loss_fn.image.u.any()


def test_bad_input_is_named_and_repr_is_the_call() -> None:
    with pytest.raises(ValueError, match=r"`epsilon` \(=-1\) must be at least 0"):
        FastCLIPLoss(num_samples=4, epsilon=-1)
    with pytest.raises(ValueError, match=r"`gamma` \(=0\) must be in \(0, 1\]"):
        FastCLIPLoss(num_samples=4, gamma=0)
    with pytest.raises(ValueError, match=r"`min_temperature` \(=0\) must be above 0"):
        FastCLIPLoss(num_samples=4, min_temperature=0)
    shown = "FastCLIPLoss(num_samples=4)"
    assert repr(FastCLIPLoss(num_samples=4)) == shown
    assert (
        repr(FastCLIPLoss(num_samples=4, temperature_gradient="exact"))
        == shown[:-1] + ", temperature_gradient='exact')"
    )
    with pytest.raises(
        ValueError, match=r"`temperature_gradient` \(='twice'\) must be one of released, exact"
    ):
        FastCLIPLoss(num_samples=4, temperature_gradient="twice")  # type: ignore[arg-type]
