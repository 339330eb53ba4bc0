"""The relative contrastive loss: keys that are positive under one criterion and not under
another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, Oracle
from kinfolk.objectives import NTXentLoss, RelativeContrastLoss
from kinfolk.pairs import ACTIONS, Pairs
from tests.reference import relative

T, CRITERIA, QUEUE, BATCH = 0.3, 3, 14, 4
LABELS = torch.arange(10) % 3


def pairs(seed: int = 0, keys: int = 3, dtype: torch.dtype = torch.float64) -> Pairs:
    """A prediction for each criterion, keys that are nearer and nearer, and a queue with entries of
    the anchors' own."""
    g = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(*shape, 5, generator=g, dtype=torch.float64)
        for shape in ((BATCH * CRITERIA,), (BATCH, keys))
    )
    queue = F.normalize(torch.randn(QUEUE, 5, generator=g, dtype=torch.float64), dim=1)
    degree = torch.randint(0, 2, (BATCH * CRITERIA, keys), generator=g).to(dtype)
    degree[:, 0] = 1
    ids, queue_ids = (
        torch.randperm(10, generator=g)[:BATCH],
        torch.randint(0, 10, (QUEUE,), generator=g),
    )
    return Pairs(
        q.to(dtype).requires_grad_(),
        queue.to(dtype),
        k.repeat_interleave(CRITERIA, 0).to(dtype),
        ids,
        queue_ids,
        CRITERIA,
        degree=degree,
    )


def slow(p: Pairs, temperature: float = T) -> Tensor:
    """By loops; a key of degree below 0 is none."""
    assert p.degree is not None
    keys = p.positives.view(BATCH, CRITERIA, -1, 5)[:, 0]
    own = [
        [
            (key, [bool(d == 1) for d in degree])
            for key, degree in zip(mine, degrees.T, strict=True)
            if degree[0] >= 0
        ]
        for mine, degrees in zip(keys, p.degree.view(BATCH, CRITERIA, -1), strict=True)
    ]
    queue = list(zip(p.candidates, p.candidate_ids.tolist(), strict=True))
    return relative.rcl(
        [list(mine) for mine in p.anchors.view(BATCH, CRITERIA, 5)],
        own,
        p.ids.tolist(),
        queue,
        temperature,
    )


@pytest.mark.parametrize("block_rows", [None, 3])
@pytest.mark.parametrize("absent", [False, True])
def test_it_is_equations_2_and_3(block_rows: int | None, absent: bool) -> None:
    p = pairs()
    if absent:
        assert p.degree is not None
        p.degree[:CRITERIA, 1:] = -1
        p.degree[-CRITERIA:, 2] = -1
    loss, expected = RelativeContrastLoss(temperature=T, block_rows=block_rows).on(p), slow(p)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, p.anchors), torch.autograd.grad(expected, p.anchors)
    )


def test_a_positive_key_alone_is_nt_xent_to_the_last_digit() -> None:
    p = replace(pairs(keys=1), degree=None)
    given = replace(p, degree=torch.ones(len(p.anchors), 1))
    base = NTXentLoss(temperature=T).on(p)
    (gradient,) = torch.autograd.grad(base, p.anchors)
    for each in (p, given):
        loss = RelativeContrastLoss(temperature=T).on(each)
        assert torch.equal(loss, base)
        torch.testing.assert_close(torch.autograd.grad(loss, p.anchors)[0], gradient)


def test_one_prediction_for_all_criteria_goes_by_the_share_that_agree() -> None:
    """Equation 9: the mean over criteria of the same prediction is the loss with the degree P_c."""
    p = pairs()
    assert p.degree is not None
    same = p.anchors.view(BATCH, CRITERIA, 5)[:, :1].expand(-1, CRITERIA, -1)
    each = RelativeContrastLoss(temperature=T).on(replace(p, anchors=same.reshape(-1, 5)))
    share = p.degree.view(BATCH, CRITERIA, -1).mean(1)
    positives = p.positives.view(BATCH, CRITERIA, -1, 5)[:, 0]
    once = RelativeContrastLoss(temperature=T).on(
        replace(p, anchors=same[:, 0], positives=positives, num_views=1, degree=share)
    )
    torch.testing.assert_close(each, once)


def test_a_key_of_another_label_is_only_pushed() -> None:
    z, other = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 1.0]])
    for degree, sign in ((1.0, 1), (0.0, -1)):
        key = Pairs(
            z,
            other,
            torch.tensor([[[0.6, 0.8]]]),
            torch.tensor([0]),
            torch.tensor([1]),
            degree=torch.tensor([[degree]]),
        )
        (gradient,) = torch.autograd.grad(
            RelativeContrastLoss(temperature=T).on(replace(key, candidates=-other)), z
        )
        assert -gradient[0, 1] * sign > 0, (
            "a step downhill goes towards a positive and away from a negative"
        )


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_flagged_is_the_base_loss(action: Any) -> None:
    base = RelativeContrastLoss(temperature=T).on(pairs())
    for detector in (FNC(min_similarity=1.0), Oracle(torch.arange(10))):
        assert torch.equal(
            RelativeContrastLoss(temperature=T, detector=detector, action=action).on(pairs()), base
        )


def test_attracted_kin_are_further_keys() -> None:
    p = pairs(keys=1)
    loss = RelativeContrastLoss(temperature=T, detector=Oracle(LABELS), action="attract").on(p)
    q, key = F.normalize(p.anchors, dim=1), F.normalize(p.positives[:, 0], dim=1)
    expected = []
    for row in range(len(q)):
        i = int(p.ids[row // CRITERIA])
        logits = [
            (int(j), q[row] @ v / T)
            for v, j in zip(p.candidates, p.candidate_ids, strict=True)
            if j != i
        ]
        lse = torch.stack([s for _, s in logits]).logsumexp(0)
        own = q[row] @ key[row] / T
        losses = [
            torch.logaddexp(own, lse) - own,
            *(lse - s for j, s in logits if LABELS[j] == LABELS[i]),
        ]
        expected.append(sum(losses, torch.zeros(())) / len(losses))
    mean = torch.stack(expected).mean()
    torch.testing.assert_close(loss, mean)
    torch.testing.assert_close(
        torch.autograd.grad(loss, p.anchors), torch.autograd.grad(mean, p.anchors)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_the_gradient_is_right(action: Any) -> None:
    p = pairs()
    loss_fn = RelativeContrastLoss(
        temperature=T, detector=Oracle(LABELS), action=action, block_rows=4
    ).eval()
    keys, queue = p.positives.clone().requires_grad_(), p.candidates.clone().requires_grad_()
    inputs = (p.anchors, keys, queue)
    assert torch.autograd.gradcheck(
        lambda a, k, c: loss_fn.on(replace(p, anchors=a, positives=k, candidates=c)),
        inputs,
        fast_mode=True,
    )


def test_low_temperature_and_half_precision_stay_finite() -> None:
    p = pairs(dtype=torch.bfloat16)
    loss = RelativeContrastLoss(temperature=0.01).on(p)
    (gradient,) = torch.autograd.grad(loss, p.anchors)
    exact = replace(
        p,
        anchors=p.anchors.double(),
        positives=p.positives.double(),
        candidates=p.candidates.double(),
    )
    torch.testing.assert_close(
        loss.double(), RelativeContrastLoss(temperature=0.01).on(exact), rtol=1e-3, atol=1e-3
    )
    assert gradient.isfinite().all()


def test_an_anchor_without_negatives_stays_finite() -> None:
    p = pairs()
    p = replace(p, candidate_ids=p.ids[:1].expand(QUEUE))
    loss = RelativeContrastLoss(temperature=T, detector=Oracle(LABELS), action="attract").on(p)
    (gradient,) = torch.autograd.grad(loss, p.anchors)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_the_order_of_candidates_does_not_matter() -> None:
    p, order = pairs(), torch.randperm(QUEUE, generator=torch.Generator().manual_seed(3))
    mixed = replace(p, candidates=p.candidates[order], candidate_ids=p.candidate_ids[order])
    torch.testing.assert_close(
        RelativeContrastLoss(temperature=T).on(p), RelativeContrastLoss(temperature=T).on(mixed)
    )


def test_degrees_are_refused_where_they_say_nothing() -> None:
    with pytest.raises(
        ValueError, match="`degree` must be None: NTXentLoss counts every positive fully"
    ):
        NTXentLoss(temperature=T).on(pairs())
    for shape in ((2, 3), (12, 1)):
        with pytest.raises(ValueError, match=r"`degree` \(=\(.*\)\) must have the shape \(12, 3\)"):
            replace(pairs(), degree=torch.ones(shape))


def test_the_call_is_shown() -> None:
    assert repr(RelativeContrastLoss(temperature=0.1)) == "RelativeContrastLoss()"
