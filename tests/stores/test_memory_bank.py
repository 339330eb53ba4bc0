"""The bank: unit norm, the rule of its momentum, one rule for duplicates, strict loading."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from kinfolk.stores import Bank

NUM_SAMPLES, DIM = 6, 3


def test_it_starts_with_random_unit_vectors_that_all_agree_on() -> None:
    torch.manual_seed(1)
    one = Bank(NUM_SAMPLES, DIM)
    torch.manual_seed(2)
    assert torch.equal(one.features, Bank(NUM_SAMPLES, DIM).features)
    assert one.features.norm(dim=1).allclose(torch.ones(NUM_SAMPLES))
    assert len({tuple(row) for row in one.features.tolist()}) == NUM_SAMPLES
    assert not torch.equal(one.features, Bank(NUM_SAMPLES, DIM, seed=1).features)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_write_moves_its_entries_only(momentum: float) -> None:
    bank = Bank(NUM_SAMPLES, DIM, momentum)
    before, z, ids = bank.features.clone(), torch.randn(2, DIM) * 5, torch.tensor([4, 1])
    bank.write(ids, z)
    expected = before.clone()
    for row, i in enumerate(ids.tolist()):
        expected[i] = normalize(
            momentum * before[i] + (1 - momentum) * z[row] / z[row].norm(), dim=0
        )
    torch.testing.assert_close(bank.features, expected)
    assert torch.equal(bank.features[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert torch.equal(bank.read(ids), bank.features[ids])


def test_duplicates_count_as_their_mean() -> None:
    bank = Bank(NUM_SAMPLES, DIM, 0.5).double()
    before, z = bank.features.clone(), normalize(torch.randn(5, DIM, dtype=torch.float64), dim=1)
    bank.write(torch.tensor([3, 0, 3, 5, 3]), z * torch.tensor([1.0, 2, 3, 4, 5]).unsqueeze(1))
    torch.testing.assert_close(
        bank.features[3], normalize(before[3] / 2 + (z[0] + z[2] + z[4]) / 6, dim=0)
    )
    torch.testing.assert_close(bank.features[0], normalize(before[0] / 2 + z[1] / 2, dim=0))
    torch.testing.assert_close(bank.features[5], normalize(before[5] / 2 + z[3] / 2, dim=0))
    assert torch.equal(bank.features[[1, 2, 4]], before[[1, 2, 4]])


def test_state_dict_loads_strictly_and_casts_leave_it_exact() -> None:
    bank, other = Bank(NUM_SAMPLES, DIM), Bank(NUM_SAMPLES, DIM, seed=3)
    other.load_state_dict(bank.state_dict())
    assert torch.equal(bank.features, other.features)
    assert torch.equal(other.bfloat16().features, bank.features)
    with pytest.raises(
        RuntimeError, match="has the size 6 × 3, but `num_samples` × `dim` is 7 × 3"
    ):
        Bank(7, DIM).load_state_dict(bank.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        Bank(NUM_SAMPLES, DIM).load_state_dict({})


def test_what_is_wrong_is_named() -> None:
    bank = Bank(NUM_SAMPLES, DIM)
    for bad in (-1, NUM_SAMPLES):
        with pytest.raises(ValueError, match=rf"`ids` \(={bad}\) must be in \[0, 6\)"):
            bank.write(torch.tensor([bad]), torch.zeros(1, DIM))
        with pytest.raises(ValueError, match=rf"`ids` \(={bad}\) must be in \[0, 6\)"):
            bank.read(torch.tensor([bad]))
    with pytest.raises(ValueError, match=r"`z` \(=\(1, 2\)\) must have the shape \(1, 3\)"):
        bank.write(torch.tensor([0]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"`momentum` \(=1\) must be in \[0, 1\)"):
        Bank(NUM_SAMPLES, DIM, 1)
    with pytest.raises(ValueError, match=r"`num_samples` \(=0\) must be at least 1"):
        Bank(0, DIM)
    assert repr(bank) == "Bank(num_samples=6, dim=3, momentum=0.5, seed=0)"
