"""Embeddings collected during training: means over views and duplicates, and a size that is known
only from the first write on."""

from __future__ import annotations

import pytest
import torch

from kinfolk.stores.per_sample import Collected


def test_the_mean_over_views_is_kept() -> None:
    store, rows = Collected(5), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    store.write(torch.tensor([3, 0]), rows)
    torch.testing.assert_close(store.features[3], rows[:3].mean(0))
    torch.testing.assert_close(store.features[0], rows[3:].mean(0))
    assert store.seen.tolist() == [True, False, False, True, False]


def test_the_last_write_counts_and_duplicates_are_averaged() -> None:
    store, rows = Collected(5), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    store.write(torch.tensor([2]), torch.ones(1, 4))
    store.write(torch.tensor([2, 1, 2]), rows)
    torch.testing.assert_close(store.features[2], (rows[0] + rows[2]) / 2)
    store.write(torch.empty(0, dtype=torch.int64), rows[:0])
    torch.testing.assert_close(store.features[1], rows[1])


def test_features_and_marks_are_saved_and_loaded() -> None:
    store, fresh, older = Collected(5), Collected(5), Collected(5)
    store.write(torch.tensor([2]), torch.ones(1, 4))
    older.write(torch.tensor([1]), torch.ones(1, 3))
    for other in (fresh, older):
        other.load_state_dict(store.state_dict())
        assert torch.equal(other.features, store.features)
        assert torch.equal(other.seen, store.seen)
    fresh.load_state_dict(Collected(5).state_dict())
    assert not fresh.seen.any()


def test_another_number_of_samples_and_ids_out_of_range_are_refused() -> None:
    with pytest.raises(
        RuntimeError,
        match="`features` has the size 5, but `num_samples` is 6: use the same data set",
    ):
        Collected(6).load_state_dict(Collected(5).state_dict())
    with pytest.raises(ValueError, match=r"`ids` \(=5\) must be in \[0, 5\)"):
        Collected(5).write(torch.tensor([5]), torch.ones(1, 4))
