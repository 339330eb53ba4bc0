from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import FNC, GloFND
from kinfolk.objectives import BimodalSogCLRLoss, CLIPLoss
from kinfolk.pairs import Action
from tests.reference import bimodal
from tests.scripted import Scripted, everybody, same_class

ACTIONS: tuple[Action, ...] = ("eliminate", "attract", "reweight")
BATCHES = [[0, 1, 2, 3], [2, 3, 4, 5], [9, 0, 4, 2]]  # in which new samples meet old ones
GROUPS = [7, -1, 7, 7, -1, -1, -1, -1, -1, 3]


def batch(seed: int, ids: list[int], d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images, texts = (
        torch.randn(len(ids), d, dtype=torch.float64, generator=g).requires_grad_()
        for _ in range(2)
    )
    return images, texts, torch.tensor(ids)


@pytest.mark.parametrize("action", [None, *ACTIONS])
@pytest.mark.parametrize("block_rows", [None, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_value_gradient_and_state_equal_the_equations(
    action: Action | None, block_rows: int | None, grouped: bool
) -> None:
    detector = None if action is None else Scripted(same_class(4))
    loss_fn = BimodalSogCLRLoss(
        num_samples=10,
        temperature=0.3,
        gamma=0.7,
        decay_epochs=None,
        detector=detector,
        action=action or "eliminate",
        kin_weight=0.25,
        block_rows=block_rows,
    ).double()
    factor = {None: 0.0, "reweight": 0.75}.get(action, 1.0)
    u: bimodal.Averages = [{}, {}]
    for seed, ids in enumerate(BATCHES):
        images, texts, tensor = batch(seed, ids)
        groups = torch.tensor([GROUPS[i] for i in ids]) if grouped else None
        keys = [GROUPS[i] if GROUPS[i] >= 0 else -1 - i for i in ids] if grouped else ids

        def kinship(i: int, j: int, ids: list[int] = ids) -> float:
            return factor * (ids[i] % 4 == ids[j] % 4)

        value, surrogate, new = bimodal.sogclr(
            images, texts, ids, keys, u, 0.3, 0.7, kinship, action or "eliminate"
        )
        loss = loss_fn(images, texts, tensor, groups)
        assert loss.item() == pytest.approx(value, rel=1e-9)
        for ours, slow in zip(
            torch.autograd.grad(loss, (images, texts)),
            torch.autograd.grad(surrogate, (images, texts)),
            strict=True,
        ):
            torch.testing.assert_close(ours, slow)
        for side, objective in enumerate(loss_fn.objectives):
            u[side] |= new[side]
            expected = torch.tensor([u[side].get(i, 0.0) for i in range(10)], dtype=torch.float64)
            torch.testing.assert_close(objective.u, expected)


def test_full_weight_of_the_new_value_is_the_batch_estimate() -> None:
    """γ = 1: the gradient is exact, and the value is that of CLIP without the positive in the
    denominator, up to a constant."""
    images, texts, ids = batch(0, [0, 1, 2, 3])
    loss_fn = BimodalSogCLRLoss(num_samples=4, temperature=0.4, gamma=1.0).double().eval()
    assert torch.autograd.gradcheck(lambda a, b: loss_fn(a, b, ids), (images, texts))
    clip = CLIPLoss(temperature=0.4, learnable=False, decoupled=True)
    constant = torch.tensor(3.0, dtype=torch.float64).log()
    torch.testing.assert_close(loss_fn(images, texts, ids), 0.4 * (clip(images, texts) - constant))


def test_the_weight_falls_along_a_cosine_and_stays() -> None:
    loss_fn = BimodalSogCLRLoss(num_samples=4, temperature=0.1, gamma=0.2, decay_epochs=10)
    seen = []
    for epoch in range(13):
        loss_fn.set_progress(epoch, 13)
        assert loss_fn.image.current_gamma == loss_fn.text.current_gamma
        seen.append(float(loss_fn.image.current_gamma))
    assert seen[0] == 1
    assert seen[5] == pytest.approx(0.6)
    assert seen[10:] == [0.2, 0.2, 0.2]
    assert seen == sorted(seen, reverse=True)
    constant = BimodalSogCLRLoss(num_samples=4, gamma=0.3, decay_epochs=None)
    assert float(constant.image.current_gamma) == 0.3


def test_the_paper_s_setting_is_the_default() -> None:
    loss_fn = BimodalSogCLRLoss(num_samples=4)
    assert loss_fn.temperature == 0.03
    loss_fn.set_progress(9, 37)
    assert float(loss_fn.image.current_gamma) == pytest.approx(0.6)
    loss_fn.set_progress(18, 37)
    assert float(loss_fn.text.current_gamma) == 0.2


def test_nothing_flagged_is_the_base_loss_bit_for_bit() -> None:
    data = [batch(seed, ids) for seed, ids in enumerate(BATCHES)]
    base, ours = (
        BimodalSogCLRLoss(num_samples=10, temperature=0.1, gamma=0.9, decay_epochs=None),
        BimodalSogCLRLoss(
            num_samples=10,
            temperature=0.1,
            gamma=0.9,
            decay_epochs=None,
            detector=GloFND(num_samples=10, alpha=0.0),
        ),
    )
    assert [base(*b).item() for b in data] == [ours(*b).item() for b in data]


@pytest.mark.parametrize("action", ACTIONS)
def test_all_flagged_at_a_low_temperature_stays_finite(action: Action) -> None:
    loss_fn = BimodalSogCLRLoss(
        num_samples=4,
        temperature=0.01,
        gamma=0.9,
        decay_epochs=None,
        detector=Scripted(everybody),
        action=action,
    )
    images, texts, ids = batch(0, [0, 1, 2, 3])
    for _ in range(3):
        loss = loss_fn(images.bfloat16(), texts.bfloat16(), ids)
        loss.backward()
        assert loss.isfinite()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert all(objective.store.log_u.isfinite().all() for objective in loss_fn.objectives)


def test_evaluation_writes_nothing_and_a_saved_state_goes_on() -> None:
    data = [batch(seed, ids) for seed, ids in enumerate(BATCHES)]
    whole, first, second = (
        BimodalSogCLRLoss(
            num_samples=10,
            temperature=0.1,
            gamma=0.9,
            decay_epochs=None,
            detector=GloFND(num_samples=10, alpha=0.3),
        )
        for _ in range(3)
    )
    expected = [whole(*b).item() for b in data]
    first(*data[0])
    second.load_state_dict(first.state_dict())
    assert [second(*b).item() for b in data[1:]] == expected[1:]
    before = copy.deepcopy(second.state_dict())
    assert {
        "image.store.log_u",
        "text.store.log_u",
        "image.detector.store.threshold",
        "text.detector.store.threshold",
    } <= before.keys()
    second.eval()(*data[0])
    assert all(torch.equal(before[key], value) for key, value in second.state_dict().items())


def test_bad_input_is_named_and_repr_is_the_call() -> None:
    images, texts, ids = batch(0, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="`ids` must be given"):
        BimodalSogCLRLoss(num_samples=4, temperature=0.1)(images, texts)
    with pytest.raises(ValueError, match=r"`ids` \(=4\) must be in \[0, 4\)"):
        BimodalSogCLRLoss(num_samples=4, temperature=0.1)(images, texts, ids + 1)
    with pytest.raises(ValueError, match=r"`decay_epochs` \(=0\) must be at least 1"):
        BimodalSogCLRLoss(num_samples=4, temperature=0.1, decay_epochs=0)
    shown = "BimodalSogCLRLoss(temperature=0.1, detector=FNC(top_k=1), num_samples=4)"
    assert repr(BimodalSogCLRLoss(num_samples=4, temperature=0.1, detector=FNC(top_k=1))) == shown
