from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import GloFND, Oracle, StartAt
from kinfolk.objectives import NTXentLoss, SogCLRLoss
from kinfolk.pairs import Action, Kin
from tests.reference import losses
from tests.scripted import Scripted, everybody, same_class

ACTIONS: tuple[Action, ...] = ("eliminate", "attract", "reweight")


def batch(seed: int, ids: list[int], d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (
        torch.randn(len(ids), d, dtype=torch.float64, generator=g).requires_grad_()
        for _ in range(2)
    )
    return z1, z2, torch.tensor(ids)


@pytest.mark.parametrize("action", [None, *ACTIONS])
@pytest.mark.parametrize("block_rows", [None, 3])
def test_value_gradient_and_state_equal_the_equations(
    action: Action | None, block_rows: int | None
) -> None:
    """Three batches in which new samples meet old ones, so that a first visit falls into a mixed
    batch."""
    detector = None if action is None else Scripted(same_class(3))
    loss_fn = SogCLRLoss(
        num_samples=10,
        temperature=0.3,
        gamma=0.7,
        detector=detector,
        action=action or "eliminate",
        kin_weight=0.25,
        block_rows=block_rows,
    ).double()
    u: dict[int, float] = {}
    for seed, ids in enumerate([[0, 1, 2, 3], [2, 3, 4, 5], [9, 0, 4, 2]]):
        z1, z2, tensor = batch(seed, ids)
        factor = {None: 0.0, "reweight": 0.75}.get(action, 1.0)

        def kinship(i: int, j: int, ids: list[int] = ids, factor: float = factor) -> float:
            return factor * (ids[i % 4] % 3 == ids[j % 4] % 3)

        value, surrogate, new = losses.sogclr(
            z1, z2, ids, u, 0.3, 0.7, kinship, action or "eliminate"
        )
        loss = loss_fn(z1, z2, tensor)
        assert loss.item() == pytest.approx(value, rel=1e-9)
        ours, slow = torch.autograd.grad(loss, (z1, z2)), torch.autograd.grad(surrogate, (z1, z2))
        for a, b in zip(ours, slow, strict=True):
            torch.testing.assert_close(a, b)
        u |= new
        torch.testing.assert_close(
            loss_fn.u, torch.tensor([u.get(i, 0.0) for i in range(10)], dtype=torch.float64)
        )


def test_full_weight_of_the_new_value_is_the_batch_estimate() -> None:
    """γ = 1: the gradient is that of −s_pos + t·log ĝ, so gradcheck holds, and the value is
    decoupled NT-Xent up to a constant."""
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.4, gamma=1.0).double().eval()
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    assert torch.autograd.gradcheck(lambda a, b: loss_fn(a, b, ids), (z1, z2))
    constant = torch.tensor(6.0, dtype=torch.float64).log()
    torch.testing.assert_close(
        loss_fn(z1, z2, ids), 0.4 * (NTXentLoss(temperature=0.4, decoupled=True)(z1, z2) - constant)
    )


def test_a_stored_u_weights_the_push_of_each_row() -> None:
    """γ → 0: the push of row i is ĝ_i / u_i times that of the batch estimate."""
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.5, gamma=1e-12).double()
    u = torch.tensor([1.0, 2.0, 5.0, 0.3], dtype=torch.float64)
    loss_fn.store.write(ids, {"log_u": u.log()})
    unit = torch.nn.functional.normalize(torch.stack([z1, z2], 1).flatten(0, 1), dim=1)
    own = torch.arange(8).unsqueeze(1) // 2 == torch.arange(8) // 2
    g = (unit @ unit.T / 0.5).exp().masked_fill(own, 0.0).sum(1) / 6
    pull = torch.nn.functional.cosine_similarity(z1, z2).mean()
    (expected,) = torch.autograd.grad((0.5 / u.repeat_interleave(2) * g).mean() - pull, z1)
    (ours,) = torch.autograd.grad(loss_fn(z1, z2, ids), z1)
    torch.testing.assert_close(ours, expected)


def test_in_eval_nothing_is_written() -> None:
    loss_fn = SogCLRLoss(num_samples=10, temperature=0.1, detector=Scripted(same_class(3)))
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    loss_fn(z1, z2, ids)
    before = copy.deepcopy(loss_fn.state_dict())
    loss_fn.eval()
    loss_fn(*batch(1, [4, 0, 5, 9]))
    after = loss_fn.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {key.split(".")[-1] for key in after} == {"log_u"}


def test_save_load_continue_is_bit_for_bit() -> None:
    batches = [
        batch(seed, ids) for seed, ids in enumerate([[0, 1, 2, 3], [2, 3, 4, 5], [1, 0, 5, 9]])
    ]
    whole, first, second = (SogCLRLoss(num_samples=10, temperature=0.1) for _ in range(3))
    expected = [whole(*b).item() for b in batches]
    first(*batches[0])
    second.load_state_dict(first.state_dict())
    assert [second(*b).item() for b in batches[1:]] == expected[1:]
    assert torch.equal(whole.u, second.u)


def test_loading_is_strict() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"size|num_samples"):
        SogCLRLoss(num_samples=10, temperature=0.1).load_state_dict(
            SogCLRLoss(num_samples=11, temperature=0.1).state_dict()
        )


@pytest.mark.parametrize("temperature", [0.01, 0.03])
def test_no_overflow_at_low_temperature(temperature: float) -> None:
    loss_fn, precise = (
        SogCLRLoss(num_samples=8, temperature=temperature),
        SogCLRLoss(num_samples=8, temperature=temperature),
    )
    z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    near = z + 1e-3
    for _ in range(3):
        loss = loss_fn(z, near, torch.arange(8))
        exact = precise(z.double(), near.double(), torch.arange(8))
        torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=1e-3)
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        assert gradient.isfinite().all()
    same = torch.ones(8, 4)
    assert loss_fn(same, same, torch.arange(8)).isfinite()
    assert (loss_fn.store.log_u < 100).all()


def test_all_flagged_leaves_no_trace_of_nan() -> None:
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.1, detector=Scripted(everybody))
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    assert loss_fn(z1, z2, ids).isfinite()
    assert loss_fn.u.isfinite().all()
    assert (loss_fn.u > 0).all()


def test_a_batch_of_one_writes_nothing() -> None:
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.1)
    z1, z2, ids = batch(0, [2])
    loss = loss_fn(z1, z2, ids)
    torch.testing.assert_close(loss, -torch.nn.functional.cosine_similarity(z1, z2).mean())
    assert not loss_fn.u.any()
    other = batch(1, [2, 0, 1, 3])
    assert loss_fn(*other).item() == SogCLRLoss(num_samples=4, temperature=0.1)(*other).item()


def test_duplicates_of_an_id_store_the_mean_of_their_updates() -> None:
    z1, z2, _ = batch(0, [0, 1, 2, 3])
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.3).double()
    loss_fn(z1, z2, torch.tensor([0, 1, 2, 0]))
    unit = torch.nn.functional.normalize(torch.stack([z1, z2], 1).flatten(0, 1), dim=1)
    sim = (unit @ unit.T / 0.3).exp()
    where = torch.tensor([0, 1, 2, 0]).repeat_interleave(2)
    g = [sim[i, where != where[i]].mean() for i in range(8)]
    twice = torch.sqrt((g[0] + g[1]) / 2 * (g[6] + g[7]) / 2)  # the mean of the logarithms
    expected = torch.stack([twice, (g[2] + g[3]) / 2, (g[4] + g[5]) / 2]).detach()
    torch.testing.assert_close(loss_fn.u[:3], expected)
    assert loss_fn.u[3] == 0


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_flagged_is_the_base_loss_bit_for_bit(action: Action) -> None:
    no_kin = Scripted(lambda row, col: Kin(row + col < 0))
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    assert (
        SogCLRLoss(num_samples=4, temperature=0.2)(z1, z2, ids).item()
        == SogCLRLoss(num_samples=4, temperature=0.2, detector=no_kin, action=action)(
            z1, z2, ids
        ).item()
    )


def test_ids_out_of_range_and_wrong_gamma_are_named() -> None:
    with pytest.raises(ValueError, match=r"`ids`.*\[0, 4\)"):
        SogCLRLoss(num_samples=4, temperature=0.2)(*batch(0, [0, 1, 2, 4]))
    with pytest.raises(ValueError, match=r"`gamma` \(=0\) must be in \(0, 1\]"):
        SogCLRLoss(num_samples=4, temperature=0.2, gamma=0)


def test_repr_is_the_call() -> None:
    assert (
        repr(SogCLRLoss(num_samples=4, temperature=0.2))
        == "SogCLRLoss(temperature=0.2, num_samples=4)"
    )


def test_a_broken_step_leaves_the_state_alone() -> None:
    loss_fn = SogCLRLoss(
        num_samples=4, temperature=0.1, detector=GloFND(num_samples=4, alpha=0.3, init="quantile")
    )
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    loss_fn(z1, z2, ids)
    before = copy.deepcopy(loss_fn.state_dict())
    broken = z1.detach().clone()
    broken[0, 0] = torch.nan
    assert not loss_fn(broken, z2, ids).isfinite()
    assert all(torch.equal(before[key], value) for key, value in loss_fn.state_dict().items())


def test_ids_are_required_where_state_or_labels_are_addressed_by_them() -> None:
    z1, z2, _ = batch(0, [0, 1, 2, 3])
    watched = NTXentLoss(temperature=0.1)
    watched.set_eval_labels(torch.zeros(4, dtype=torch.int64))
    late = StartAt(GloFND(num_samples=4, alpha=0.1), epoch=1)
    for loss_fn in (
        SogCLRLoss(num_samples=4, temperature=0.1),
        NTXentLoss(temperature=0.1, detector=Oracle(torch.arange(4))),
        NTXentLoss(temperature=0.1, detector=late),
        watched,
    ):
        with pytest.raises(ValueError, match="`ids` must be given"):
            loss_fn(z1, z2)


def test_small_weights_do_not_cancel() -> None:
    """All negatives are kin of one small weight: the weighted mean is the plain one."""
    z1, z2, ids = batch(0, list(range(64)))
    z1, z2 = z1.detach().float(), z2.detach().float()
    plain = SogCLRLoss(num_samples=64, temperature=0.3)(z1, z2, ids)
    for weight in (1e-3, 1e-6):
        torch.testing.assert_close(
            SogCLRLoss(
                num_samples=64,
                temperature=0.3,
                detector=Scripted(everybody),
                action="reweight",
                kin_weight=weight,
            )(z1, z2, ids),
            plain,
        )


@pytest.mark.parametrize("action", ACTIONS)
def test_who_is_kin_and_dropped_is_dropped(action: Action) -> None:
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    drop = Scripted(lambda row, col: Kin(ignore=(col == 3) & (row >= 0)))
    both = Scripted(lambda row, col: Kin((col == 3) & (row >= 0), ignore=(col == 3) & (row >= 0)))
    assert (
        SogCLRLoss(num_samples=4, temperature=0.2, detector=both, action=action)(z1, z2, ids).item()
        == SogCLRLoss(num_samples=4, temperature=0.2, detector=drop)(z1, z2, ids).item()
    )


def test_several_levels_store_the_mean_of_their_averages() -> None:
    z1, z2, ids = batch(0, [0, 1, 2, 3])
    one, two, both = (
        SogCLRLoss(
            num_samples=4, temperature=0.3, detector=Scripted(*(same_class(k) for k in ks))
        ).double()
        for ks in ((2,), (3,), (2, 3))
    )
    for loss_fn in (one, two, both):
        loss_fn(z1, z2, ids)
    torch.testing.assert_close(both.u, (one.u + two.u) / 2)


def test_a_cast_of_the_weights_leaves_the_state_exact() -> None:
    loss_fn = SogCLRLoss(num_samples=4, temperature=0.3)
    loss_fn(*batch(0, [0, 1, 2, 3]))
    before = loss_fn.u.clone()
    assert torch.equal(loss_fn.bfloat16().u, before)
    assert loss_fn.double().u.dtype == torch.float64
