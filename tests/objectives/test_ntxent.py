from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import FNC
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Action, Kin, Pairs
from tests.reference import losses
from tests.scripted import Scripted, everybody, same_class

ACTIONS: tuple[Action, ...] = ("eliminate", "attract", "reweight")


def views(n: int = 7, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (
        torch.randn(n, d, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return z1, z2


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("block_rows", [None, 1, 2, 5, 100])
def test_equals_the_equation(block_rows: int | None) -> None:
    z1, z2 = views()
    ours, slow = (
        NTXentLoss(temperature=0.3, block_rows=block_rows)(z1, z2),
        losses.ntxent(z1, z2, 0.3),
    )
    torch.testing.assert_close(ours, slow)
    for a, b in zip(gradients(ours, z1, z2), gradients(slow, z1, z2), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("block_rows", [None, 4])
def test_equals_the_equation_with_kin(action: Action, block_rows: int | None) -> None:
    z1, z2 = views()
    kinship = lambda i, j: (0.75 if action == "reweight" else 1.0) * (i % 7 % 3 == j % 7 % 3)  # noqa: E731
    ours = NTXentLoss(
        temperature=0.3,
        detector=Scripted(same_class(3)),
        action=action,
        kin_weight=0.25,
        block_rows=block_rows,
    )(z1, z2)
    slow = losses.ntxent(z1, z2, 0.3, kinship, action)
    torch.testing.assert_close(ours, slow)
    for a, b in zip(gradients(ours, z1, z2), gradients(slow, z1, z2), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("block_rows", [None, 4])
@pytest.mark.parametrize("by_level", [False, True])
def test_what_is_kept_can_stand_for_what_is_eliminated(
    block_rows: int | None, by_level: bool
) -> None:
    """As the published code of GloFND for SimCLR scales it; with kin by their ids, and by their
    similarity."""
    z1, z2 = views()
    z = torch.nn.functional.normalize(torch.cat((z1, z2)).detach(), dim=1)
    kinship = lambda i, j: float(z[i] @ z[j] > 0.2 if by_level else i % 7 % 3 == j % 7 % 3)  # noqa: E731
    detector = FNC(min_similarity=0.2) if by_level else Scripted(same_class(3))
    ours = NTXentLoss(temperature=0.3, detector=detector, rescale_kept=True, block_rows=block_rows)(
        z1, z2
    )
    slow = losses.ntxent(z1, z2, 0.3, kinship, rescale=True)
    torch.testing.assert_close(ours, slow)
    assert ours > losses.ntxent(z1, z2, 0.3, kinship)
    for a, b in zip(gradients(ours, z1, z2), gradients(slow, z1, z2), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_eliminated_is_not_rescaled_and_all_but_one_stays_finite() -> None:
    z1, z2 = views()
    assert torch.equal(
        NTXentLoss(temperature=0.3, rescale_kept=True)(z1, z2), NTXentLoss(temperature=0.3)(z1, z2)
    )
    inputs = (z1, z2)
    rescaled = NTXentLoss(temperature=0.3, detector=Scripted(everybody), rescale_kept=True)
    assert torch.autograd.gradcheck(lambda a, b: rescaled(a, b), inputs)
    alone = NTXentLoss(temperature=0.3, detector=Scripted(everybody), rescale_kept=True)(
        z1[:1], z2[:1]
    )
    assert alone == 0, "there are no negatives"
    with pytest.raises(
        ValueError, match=r"`rescale_kept` \(=True\) must be False with `action` \(='attract'\)"
    ):
        NTXentLoss(
            temperature=0.3, detector=Scripted(everybody), action="attract", rescale_kept=True
        )
    assert "rescale_kept=True" in repr(rescaled)


def test_the_same_class_attracted_is_supcon() -> None:
    z1, z2 = views(9)
    labels = torch.arange(9) % 3
    ours, slow = (
        NTXentLoss(temperature=0.1, detector=Scripted(same_class(3)), action="attract")(z1, z2),
        losses.supcon(z1, z2, labels, 0.1),
    )
    torch.testing.assert_close(ours, slow)
    for a, b in zip(gradients(ours, z1, z2), gradients(slow, z1, z2), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_flagged_is_the_base_loss_bit_for_bit(action: Action) -> None:
    z1, z2 = views()
    no_kin = Scripted(lambda row, col: Kin(row + col < 0))
    base, ours = (
        NTXentLoss(temperature=0.2)(z1, z2),
        NTXentLoss(temperature=0.2, detector=no_kin, action=action)(z1, z2),
    )
    assert torch.equal(base, ours)
    if action != "attract":  # attraction takes the products in another order
        assert all(
            torch.equal(a, b)
            for a, b in zip(gradients(base, z1, z2), gradients(ours, z1, z2), strict=True)
        )


def test_reweighting_to_nothing_eliminates_and_to_one_changes_nothing() -> None:
    z1, z2 = views()
    detector = Scripted(same_class(3))
    loss = {
        weight: NTXentLoss(
            temperature=0.2, detector=detector, action="reweight", kin_weight=weight
        )(z1, z2)
        for weight in (0.0, 1.0)
    }
    torch.testing.assert_close(loss[0.0], NTXentLoss(temperature=0.2, detector=detector)(z1, z2))
    torch.testing.assert_close(loss[1.0], NTXentLoss(temperature=0.2)(z1, z2))


def test_degrees_of_kinship_are_the_factors() -> None:
    z1, z2 = views()

    def degree(row: Tensor, col: Tensor) -> Tensor:
        return ((row + col) % 4 / 4).to(torch.float64)

    detector = Scripted(lambda row, col: Kin(degree(row, col)))
    slow = losses.ntxent(z1, z2, 0.3, lambda i, j: (i % 7 + j % 7) % 4 / 4, "reweight")
    torch.testing.assert_close(
        NTXentLoss(temperature=0.3, detector=detector, action="reweight")(z1, z2), slow
    )


def test_several_levels_are_the_mean_of_their_losses() -> None:
    z1, z2 = views()
    both = NTXentLoss(
        temperature=0.3, detector=Scripted(same_class(2), same_class(3)), action="attract"
    )(z1, z2)
    one, two = (
        NTXentLoss(temperature=0.3, detector=Scripted(same_class(k)), action="attract")(z1, z2)
        for k in (2, 3)
    )
    torch.testing.assert_close(both, (one + two) / 2)
    for a, b in zip(gradients(both, z1), gradients((one + two) / 2, z1), strict=True):
        torch.testing.assert_close(a, b)


def test_dropped_candidates_are_as_good_as_absent() -> None:
    z1, z2 = views(6)
    loss = NTXentLoss(
        temperature=0.3,
        detector=Scripted(
            lambda row, col: Kin(ignore=(col >= 4) & (row < 4) | (col < 4) & (row >= 4))
        ),
    )(z1, z2)
    parts = [
        NTXentLoss(temperature=0.3)(z1[part], z2[part]) * len(z1[part]) / 6
        for part in (slice(0, 4), slice(4, 6))
    ]
    torch.testing.assert_close(loss, sum(parts))


@pytest.mark.parametrize("action", ACTIONS)
def test_the_gradient_equals_finite_differences(action: Action) -> None:
    z1, z2 = views(4, 3)
    loss_fn = NTXentLoss(
        temperature=0.4, detector=Scripted(same_class(2)), action=action, block_rows=3
    )
    assert torch.autograd.gradcheck(loss_fn, (z1, z2))


def test_all_flagged_stays_finite_and_keeps_the_least_similar() -> None:
    z1, z2 = views()
    loss_fn = NTXentLoss(temperature=0.2, detector=Scripted(everybody), min_negatives=2)
    loss = loss_fn(z1, z2)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, z1, z2))
    assert int(loss_fn.stats.negatives - loss_fn.stats.flagged) == 2 * 14
    z = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1)
    sim = (z @ z.T).detach()
    expected = []
    for i in range(14):
        own = (i + 7) % 14
        least = sorted(sim[i, j].item() for j in range(14) if j not in (i, own))[:2]
        logits = torch.tensor([sim[i, own].item(), *least], dtype=torch.float64) / 0.2
        expected.append(logits.logsumexp(0) - logits[0])
    torch.testing.assert_close(loss.detach(), torch.stack(expected).mean())


def test_a_batch_of_one_has_no_loss() -> None:
    z1, z2 = views(1)
    loss = NTXentLoss(temperature=0.2)(z1, z2)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert all(g.abs().max() < 1e-12 for g in gradients(loss, z1, z2))


def test_an_anchor_is_never_pushed_from_another_copy_of_its_own_sample() -> None:
    z1, z2 = views(3)
    twice = [torch.cat([z, z[:1]]) for z in (z1, z2)]
    ids = torch.tensor([0, 1, 2, 0])
    loss = NTXentLoss(temperature=0.3)(*twice, ids)
    for z in twice:
        z.retain_grad()
    (gradient,) = torch.autograd.grad(loss, twice[0])
    assert gradient.isfinite().all()
    sim = torch.nn.functional.normalize(torch.cat(twice), dim=1)
    logits = sim @ sim.T / 0.3
    where = ids.repeat(2)
    expected = []
    for i in range(8):
        own = (i + 4) % 8
        kept = [own, *(j for j in range(8) if where[j] != where[i])]
        expected.append(logits[i, kept].logsumexp(0) - logits[i, own])
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_permuting_the_batch_changes_nothing() -> None:
    z1, z2 = views(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    loss_fn = NTXentLoss(temperature=0.1, detector=Scripted(same_class(4)))
    torch.testing.assert_close(
        loss_fn(z1, z2, torch.arange(12)), loss_fn(z1[order], z2[order], order)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("action", ACTIONS)
def test_finite_at_low_temperature_and_precision(dtype: torch.dtype, action: Action) -> None:
    z1, z2 = ((100 * z.detach()).to(dtype).requires_grad_() for z in views(16))
    loss = NTXentLoss(temperature=0.01, detector=Scripted(same_class(4)), action=action)(z1, z2)
    assert loss.dtype == torch.float32
    exact = NTXentLoss(temperature=0.01, detector=Scripted(same_class(4)), action=action)(
        z1.double(), z2.double()
    )
    torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=1e-3)
    loss.backward()
    for z in (z1, z2):
        assert z.grad is not None
        assert z.grad.dtype == dtype
        assert z.grad.isfinite().all()


def test_autocast_computes_in_float32() -> None:
    z1, z2 = (z.detach().float() for z in views(16))
    with torch.autocast("cpu", torch.bfloat16):
        inside = NTXentLoss(temperature=0.1)(z1, z2)
    assert torch.equal(inside, NTXentLoss(temperature=0.1)(z1, z2))


def test_no_gradient_is_taken_where_none_is_asked() -> None:
    z1, z2 = views()
    with torch.no_grad():
        assert torch.equal(
            NTXentLoss(temperature=0.2)(z1, z2),
            NTXentLoss(temperature=0.2)(z1.detach(), z2.detach()),
        )


def test_the_positive_can_be_left_out_of_the_denominator() -> None:
    z1, z2 = views(4)
    z = torch.nn.functional.normalize(torch.cat([z1, z2]), dim=1)
    logits = z @ z.T / 0.3
    rows = [
        logits[i, [j for j in range(8) if j % 4 != i % 4]].logsumexp(0) - logits[i, (i + 4) % 8]
        for i in range(8)
    ]
    loss_fn = NTXentLoss(temperature=0.3, decoupled=True)
    torch.testing.assert_close(loss_fn(z1, z2), torch.stack(rows).mean())
    assert torch.autograd.gradcheck(loss_fn, (z1, z2))


def test_a_queue_of_candidates_with_ids() -> None:
    g = torch.Generator().manual_seed(3)
    query, key = (
        torch.randn(4, 6, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    queue = torch.randn(10, 6, dtype=torch.float64, generator=g)
    ids, queue_ids = torch.tensor([3, 8, 20, 21]), torch.arange(10)
    pairs = Pairs(query, queue, key.unsqueeze(1), ids, queue_ids)
    loss = NTXentLoss(temperature=0.2).on(pairs)
    q, k, c = (torch.nn.functional.normalize(x, dim=1) for x in (query, key, queue))
    rows = []
    for i in range(4):
        kept = [c[j] for j in range(10) if queue_ids[j] != ids[i]]
        logits = torch.stack([q[i] @ k[i], *(q[i] @ v for v in kept)]) / 0.2
        rows.append(logits.logsumexp(0) - logits[0])
    slow = torch.stack(rows).mean()
    torch.testing.assert_close(loss, slow)
    for a, b in zip(gradients(loss, query, key), gradients(slow, query, key), strict=True):
        torch.testing.assert_close(a, b)


def test_groups_are_never_negatives() -> None:
    z1, z2 = views(4)
    z = torch.stack([z1, z2], 1).flatten(0, 1)
    ids, groups = torch.arange(4), torch.tensor([5, 5, 6, 7])
    pairs = Pairs(
        z,
        z,
        torch.stack([z2, z1], 1).flatten(0, 1).unsqueeze(1),
        ids,
        ids.repeat_interleave(2),
        2,
        groups,
        groups.repeat_interleave(2),
    )
    eliminated = NTXentLoss(
        temperature=0.3, detector=Scripted(lambda row, col: Kin((row < 2) & (col < 2)))
    )(z1, z2)
    torch.testing.assert_close(NTXentLoss(temperature=0.3).on(pairs), eliminated)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": 0.0}, r"`temperature` \(=0.0\) must be above 0"),
        ({"temperature": 0.1, "action": "elimnate"}, "eliminate, attract, reweight"),
        ({"temperature": 0.1, "min_negatives": 0}, "at least 1"),
        ({"min_negatives": 1.5}, r"`min_negatives` \(=1.5\) must be an integer, at least 1"),
        ({"block_rows": 2.5}, r"`block_rows` \(=2.5\) must be an integer, at least 1"),
        ({"temperature": math.inf}, r"`temperature` \(=inf\) must be above 0"),
        ({"temperature": 0.1, "kin_weight": 1.5}, r"`kin_weight` \(=1.5\)"),
        ({"temperature": 0.1, "block_rows": 0}, "block_rows"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NTXentLoss(**arguments)  # type: ignore[arg-type]


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"one shape \(batch, embedding\)"):
        NTXentLoss(temperature=0.1)(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="there are 4 `ids`"):
        NTXentLoss(temperature=0.1)(torch.ones(3, 2), torch.ones(3, 2), torch.arange(4))


def test_repr_is_the_call() -> None:
    assert repr(NTXentLoss(temperature=0.1)) == "NTXentLoss()"


def test_a_row_whose_first_candidates_are_far_away() -> None:
    """The log-sum-exp must not rest on shares that have underflown: at t = 0.01 the first
    candidates' are below 1e-38."""
    g = torch.Generator().manual_seed(0)
    near = torch.tensor([1.0, 0, 0]) + 0.01 * torch.randn(300, 3, generator=g)
    z1, z2 = torch.cat([-near, near]), torch.cat([-near, near]) + 1e-3
    z1.requires_grad_()
    loss = NTXentLoss(temperature=0.01)(z1, z2)
    dense = torch.nn.functional.normalize(torch.stack([z1, z2], 1).flatten(0, 1), dim=1).double()
    logits = (dense @ dense.T / 0.01).fill_diagonal_(-torch.inf)
    slow = torch.nn.functional.cross_entropy(logits, torch.arange(1200) ^ 1)
    torch.testing.assert_close(loss.double(), slow, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(loss, z1)[0].isfinite().all()


def test_training_goes_on_after_a_validation_in_inference_mode() -> None:
    z1, z2 = views()
    loss_fn, fresh = NTXentLoss(temperature=0.2), NTXentLoss(temperature=0.2)
    with torch.inference_mode():
        loss_fn.eval()(z1, z2)
    loss = loss_fn.train()(z1, z2)
    assert torch.equal(loss, fresh(z1, z2))
    assert all(g.isfinite().all() for g in gradients(loss, z1, z2))


def test_a_weight_of_nothing_keeps_the_least_similar_too() -> None:
    z1, z2 = views()
    kept = NTXentLoss(
        temperature=0.2,
        detector=Scripted(everybody),
        action="reweight",
        kin_weight=0.0,
        min_negatives=3,
    )(z1, z2)
    torch.testing.assert_close(
        kept, NTXentLoss(temperature=0.2, detector=Scripted(everybody), min_negatives=3)(z1, z2)
    )


def test_repr_shows_what_differs_from_the_defaults() -> None:
    shown = repr(NTXentLoss(temperature=0.1, kin_weight=0.25, decoupled=True))
    assert shown == "NTXentLoss(kin_weight=0.25, decoupled=True)"
