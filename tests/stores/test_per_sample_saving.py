"""State per sample is saved without a second copy of it."""

from __future__ import annotations

import io

import torch

from kinfolk.stores import PerSample


def test_the_state_dict_shares_the_memory_of_the_store() -> None:
    store = PerSample(5, threshold=1.0, mean=0.0)
    state = store.state_dict()
    assert {value.untyped_storage().data_ptr() for value in state.values()} == {
        store.rows.untyped_storage().data_ptr()
    }
    store.write(torch.tensor([2]), {"mean": torch.tensor([0.5])})
    assert state["mean"].tolist() == [0, 0, 0.5, 0, 0]


def test_a_file_holds_the_columns_once() -> None:
    store, file = PerSample(10_000, a=1.0, b=2.0, c=3.0), io.BytesIO()
    store.rows.normal_(generator=torch.Generator().manual_seed(0))
    torch.save(store.state_dict(), file)
    assert store.rows.nbytes < len(file.getvalue()) < store.rows.nbytes + 10_000
    file.seek(0)
    other = PerSample(10_000, a=0.0, b=0.0, c=0.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.rows, store.rows)


def test_a_store_loads_its_own_state() -> None:
    store = PerSample(4, a=1.0, b=2.0)
    store.load_state_dict(store.state_dict())
    assert store.rows.tolist() == [[1, 2]] * 4
