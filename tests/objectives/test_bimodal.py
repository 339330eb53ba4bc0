from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, GloFND, Oracle
from kinfolk.objectives import CLIPLoss
from kinfolk.pairs import Action
from tests.cover import pairwise
from tests.reference import bimodal
from tests.scripted import Scripted, same_class

ACTIONS: tuple[Action, ...] = ("eliminate", "attract", "reweight")
GROUPS = [3, 3, -1, 0, 3, 0, 9, -1]
KEYS = [3, 3, -3, 0, 3, 0, 9, -8]  # a group's own number, or one that no other has


def towers(n: int = 8, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images, texts = (
        torch.randn(n, d, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return images, texts


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize(
    ("action", "block_rows", "groups"), pairwise([None, *ACTIONS], [None, 3], [None, GROUPS])
)
def test_value_and_gradient_equal_the_equation(
    action: Action | None, block_rows: int | None, groups: list[int] | None
) -> None:
    images, texts = towers()
    detector = None if action is None else Scripted(same_class(3))
    loss_fn = CLIPLoss(
        temperature=0.3,
        detector=detector,
        action=action or "eliminate",
        kin_weight=0.25,
        block_rows=block_rows,
    ).double()
    factor = {None: 0.0, "reweight": 0.75}.get(action, 1.0)
    scale = loss_fn.temperature_parameters()[0]
    ours = loss_fn(images, texts, torch.arange(8), None if groups is None else torch.tensor(groups))
    keys = range(8) if groups is None else KEYS
    slow = bimodal.clip(
        images,
        texts,
        torch.exp(-scale),
        keys,
        lambda i, j: factor * (i % 3 == j % 3),
        action or "eliminate",
    )
    torch.testing.assert_close(ours, slow)
    torch.testing.assert_close(
        gradients(ours, images, texts, scale), gradients(slow, images, texts, scale)
    )


def test_equals_the_cross_entropy_of_rows_and_columns() -> None:
    images, texts = towers(16)
    loss_fn = CLIPLoss(temperature=0.07).double()
    (scale,) = loss_fn.temperature_parameters()
    logits = scale.exp() * F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T
    dense = (
        F.cross_entropy(logits, torch.arange(16)) + F.cross_entropy(logits.T, torch.arange(16))
    ) / 2
    ours = loss_fn(images, texts)
    torch.testing.assert_close(ours, dense)
    torch.testing.assert_close(
        gradients(ours, images, texts, scale), gradients(dense, images, texts, scale)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_gradcheck_by_features_and_temperature(action: Action) -> None:
    images, texts = towers(5, 4)
    loss_fn = (
        CLIPLoss(temperature=0.4, detector=Scripted(same_class(2)), action=action).double().eval()
    )
    groups = torch.tensor([0, 1, 2, 1, 4])

    def at(scale: Tensor, *features: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(
            loss_fn, {"learned.logit_scale": scale}, (*features, torch.arange(5), groups)
        )
        return loss

    assert torch.autograd.gradcheck(
        at, (torch.tensor(0.9, dtype=torch.float64, requires_grad=True), images, texts)
    )


def test_groups_all_distinct_are_no_groups() -> None:
    images, texts = towers()
    plain = CLIPLoss(temperature=0.2)(images, texts, torch.arange(8))
    for groups in (
        torch.arange(8) + 40,
        torch.full((8,), -1),
        torch.tensor([5, -1, 7, -1, 0, 1, 2, 3]),
    ):
        assert (
            CLIPLoss(temperature=0.2)(images, texts, torch.arange(8), groups).item() == plain.item()
        )


def test_known_positives_are_never_negatives() -> None:
    images, texts = towers(4)
    groups = torch.tensor([0, 0, 1, 2])
    shared = (groups.unsqueeze(1) == groups) & ~torch.eye(4, dtype=torch.bool)
    logits = (F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T / 0.2).masked_fill(
        shared, -torch.inf
    )
    dense = (
        F.cross_entropy(logits, torch.arange(4)) + F.cross_entropy(logits.T, torch.arange(4))
    ) / 2
    loss_fn = CLIPLoss(temperature=0.2, learnable=False)
    torch.testing.assert_close(loss_fn(images, texts, torch.arange(4), groups), dense)
    assert int(loss_fn.stats.negatives) == 2 * (12 - 2)


def test_a_sample_twice_in_the_batch_is_not_its_own_negative() -> None:
    images, texts = towers(4)
    twice = torch.tensor([0, 1, 2, 0])
    assert (
        CLIPLoss(temperature=0.2)(images, texts, twice).item()
        == CLIPLoss(temperature=0.2)(
            images, texts, torch.arange(4), torch.tensor([7, -1, -1, 7])
        ).item()
    )


def test_directions_keep_thresholds_of_their_own() -> None:
    images, texts = towers(8)
    loss_fn = CLIPLoss(temperature=0.2, detector=GloFND(num_samples=8, alpha=0.3, init="quantile"))
    for _ in range(3):
        loss_fn(images, texts, torch.arange(8))
    image, text = (objective.detector for objective in loss_fn.objectives)
    assert isinstance(image, GloFND)
    assert isinstance(text, GloFND)
    assert not torch.equal(image.thresholds, text.thresholds)
    swapped = CLIPLoss(temperature=0.2, detector=GloFND(num_samples=8, alpha=0.3, init="quantile"))
    for _ in range(3):
        swapped(texts, images, torch.arange(8))
    other = swapped.text.detector
    assert isinstance(other, GloFND)
    assert torch.equal(image.thresholds, other.thresholds)


@pytest.mark.parametrize("action", ACTIONS)
def test_counts_of_both_directions_add_up(action: Action) -> None:
    images, texts = towers(8)
    for detector in (
        FNC(top_k=2),
        Oracle(torch.arange(8) % 3),
        GloFND(num_samples=8, alpha=0.3, init="quantile"),
    ):
        loss_fn = CLIPLoss(temperature=0.2, detector=detector, action=action)
        loss_fn.set_eval_labels(torch.arange(8) % 3)
        assert loss_fn(images, texts, torch.arange(8)).isfinite()
        assert torch.equal(
            loss_fn.stats.counts, loss_fn.image.stats.counts + loss_fn.text.stats.counts
        )
        assert int(loss_fn.stats.negatives) == 2 * 56
        assert 0 < loss_fn.stats.share < 1
        assert 0 <= loss_fn.stats.f1 <= 1


def test_the_learned_temperature_stays_above_its_bound() -> None:
    loss_fn = CLIPLoss(temperature=0.07, min_temperature=0.05)
    (scale,) = loss_fn.temperature_parameters()
    with torch.no_grad():
        scale.fill_(math.log(1 / 0.01))
    images, texts = towers(4)
    loss_fn.eval()
    expected = CLIPLoss(temperature=0.05, learnable=False)(images, texts).item()
    assert loss_fn(images, texts).item() == pytest.approx(expected, rel=1e-6)
    assert scale.item() == pytest.approx(math.log(100)), "evaluation writes nothing"
    assert loss_fn.current_temperature == pytest.approx(0.05)
    loss_fn.train()
    loss_fn(images, texts).backward()
    assert scale.item() == pytest.approx(math.log(20))
    assert scale.grad is not None
    assert scale.grad != 0


def test_a_temperature_that_is_not_learned_has_no_parameters() -> None:
    assert not list(CLIPLoss(temperature=0.1, learnable=False).parameters())
    assert CLIPLoss(temperature=0.1, learnable=False).current_temperature == 0.1
    images, texts = towers(4)
    learned = CLIPLoss(temperature=0.1).double()
    assert CLIPLoss(temperature=0.1, learnable=False)(images, texts).item() == pytest.approx(
        learned(images, texts).item(), rel=1e-6
    )


def test_frozen_towers_still_teach_the_temperature() -> None:
    loss_fn = CLIPLoss(temperature=0.5)
    images, texts = (z.detach() for z in towers(4))
    loss_fn(images, texts).backward()
    assert loss_fn.temperature_parameters()[0].grad is not None
    locked = texts.clone().requires_grad_()
    loss_fn(images, locked).backward()
    assert locked.grad is not None


@pytest.mark.parametrize("temperature", [0.01, 0.07])
def test_half_precision_and_low_temperature_stay_finite(temperature: float) -> None:
    images, texts = (z.detach().bfloat16().requires_grad_() for z in towers(8))
    loss_fn = CLIPLoss(
        temperature=temperature, detector=GloFND(num_samples=8, alpha=0.2, init="quantile")
    ).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(images, texts, torch.arange(8))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        x.grad is not None and x.grad.isfinite().all()
        for x in (images, texts, *loss_fn.parameters())
    )


def test_evaluation_writes_nothing_and_a_saved_state_goes_on() -> None:
    batches = [
        (
            *towers(6, seed=seed),
            torch.randperm(10, generator=torch.Generator().manual_seed(seed))[:6],
        )
        for seed in range(4)
    ]
    whole, first, second = (
        CLIPLoss(temperature=0.2, detector=GloFND(num_samples=10, alpha=0.3)) for _ in range(3)
    )
    expected = [whole(*b).item() for b in batches]
    for b in batches[:2]:
        first(*b)
    second.load_state_dict(first.state_dict())
    assert [second(*b).item() for b in batches[2:]] == expected[2:]
    before = copy.deepcopy(second.state_dict())
    second.eval()(*batches[0])
    assert all(torch.equal(before[key], value) for key, value in second.state_dict().items())


def test_permuting_the_batch_changes_nothing() -> None:
    images, texts = towers(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    groups = torch.tensor(GROUPS)
    loss_fn = CLIPLoss(temperature=0.2, detector=FNC(top_k=2)).double()
    permuted = loss_fn(images[order], texts[order], order, groups[order])
    torch.testing.assert_close(loss_fn(images, texts, torch.arange(8), groups), permuted)


def test_a_batch_of_one_and_one_group_for_all_have_no_negatives() -> None:
    images, texts = towers(3)
    assert CLIPLoss(temperature=0.2)(images[:1], texts[:1]).item() == 0
    loss = CLIPLoss(temperature=0.2)(
        images, texts, torch.arange(3), torch.zeros(3, dtype=torch.int64)
    )
    assert loss.item() == 0
    loss.backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


def test_bad_input_is_named() -> None:
    images, texts = towers(4)
    loss_fn, ids = (
        CLIPLoss(temperature=0.1, detector=GloFND(num_samples=4, alpha=0.1)),
        torch.arange(4),
    )
    with pytest.raises(
        ValueError,
        match=(
            r"`image_features` \(=\(4, 5\)\) and `text_features` \(=\(3, 5\)\) must have one shape"
        ),
    ):
        loss_fn(images, texts[:3], ids)
    with pytest.raises(ValueError, match=r"`ids` \(=\(3,\)\) must have the shape \(4,\)"):
        loss_fn(images, texts, ids[:3])
    with pytest.raises(ValueError, match=r"`group_ids` \(=\(4, 1\)\) must have the shape \(4,\)"):
        loss_fn(images, texts, ids, ids.unsqueeze(1))
    with pytest.raises(
        ValueError, match=r"`group_ids` \(=torch.float32\) must be an integer tensor"
    ):
        loss_fn(images, texts, ids, ids.float())
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss_fn(images, texts)
    with pytest.raises(ValueError, match=r"`ids` \(=4\) must be in \[0, 4\)"):
        loss_fn(images, texts, ids + 1)
    with pytest.raises(ValueError, match=r"`temperature` \(=2.0\) must be in \[0.01, 1.0\]"):
        CLIPLoss(temperature=2.0)


def test_repr_is_the_call() -> None:
    assert repr(CLIPLoss()) == "CLIPLoss()"
    assert (
        repr(CLIPLoss(temperature=0.1, learnable=False, action="attract"))
        == "CLIPLoss(temperature=0.1, action='attract', learnable=False)"
    )
