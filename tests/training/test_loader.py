"""The loader: every sample once an epoch, a function of seed and epoch, parts that join to the
batch of one process, exact continuation."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from kinfolk.errors import UsageError
from kinfolk.training.loader import BatchLoader


class Images:
    """Image i is a single pixel of value i."""

    def __init__(self, num_train: int) -> None:
        self.num_train = num_train

    def pixels(self, ids: Tensor) -> Tensor:
        return ids.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 1, 3).contiguous()

    def aspect(self, ids: Tensor) -> Tensor:
        return 1 + ids.float()


def order(loader: BatchLoader) -> list[list[int]]:
    return [batch["ids"].tolist() for batch in loader]


def test_an_epoch_has_every_sample_at_most_once_and_drops_the_rest() -> None:
    loader = BatchLoader(Images(23), batch_size=5, seed=1)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    ids = torch.cat([batch["ids"] for batch in batches])
    assert len(set(ids.tolist())) == 20
    assert [batch["step"] for batch in batches] == [0, 1, 2, 3]
    for batch in batches:
        torch.testing.assert_close(batch["pixels"][:, 0, 0, 0].long(), batch["ids"])
        torch.testing.assert_close(batch["aspect"], 1 + batch["ids"].float())


def test_order_is_a_function_of_seed_and_epoch() -> None:
    loader = BatchLoader(Images(40), batch_size=8, seed=1)
    first = order(loader)
    loader.set_epoch(1)
    second = order(loader)
    loader.set_epoch(0)
    assert order(loader) == first
    assert second != first
    assert order(BatchLoader(Images(40), batch_size=8, seed=2)) != first


def test_ranks_join_to_the_batch_of_one_process() -> None:
    whole = order(BatchLoader(Images(40), batch_size=12, seed=3))
    parts = [
        order(BatchLoader(Images(40), batch_size=12, seed=3, rank=rank, world_size=3))
        for rank in range(3)
    ]
    assert [list(chain.from_iterable(step)) for step in zip(*parts, strict=True)] == whole


def test_it_goes_on_where_it_was_saved() -> None:
    loader = BatchLoader(Images(40), batch_size=8, seed=1)
    loader.set_epoch(4)
    whole = order(loader)
    loader.set_epoch(4)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    again = BatchLoader(Images(40), batch_size=8, seed=1)
    iter(again)  # Lightning asks for an iterator before it restores the state
    again.load_state_dict(state)
    assert order(again) == whole[2:]
    assert len(again) == 5, "the length is that of a whole epoch"
    again.load_state_dict({"epoch": 4, "position": 5})
    assert order(again) == []


def test_a_given_order_replaces_the_shuffle() -> None:
    """Asked for once an epoch, when its first batch is read; None: the random one. Ranks take their
    parts of it."""
    asked: list[tuple[int, int]] = []
    state = {"reversed": False}

    def backwards(generator: torch.Generator, batch_size: int) -> Tensor | None:
        asked.append((generator.initial_seed(), batch_size))
        return torch.arange(40).flip(0) if state["reversed"] else None

    loader = BatchLoader(Images(40), batch_size=8, seed=1, order=backwards)
    assert order(loader) == order(BatchLoader(Images(40), batch_size=8, seed=1))
    loader.set_epoch(1)
    batches = iter(loader)
    state["reversed"] = True
    assert [batch["ids"].tolist() for batch in batches] == torch.arange(40).flip(0).view(
        5, 8
    ).tolist()
    assert len(asked) == 2
    assert asked[0] != asked[1], "another generator in every epoch"
    loader.load_state_dict({"epoch": 1, "position": 3})
    assert order(loader) == torch.arange(16).flip(0).view(2, 8).tolist()
    assert asked[2] == asked[1]
    parts = [
        order(BatchLoader(Images(40), 8, seed=1, rank=r, world_size=2, order=backwards))[1]
        for r in (0, 1)
    ]
    assert parts == [[31, 30, 29, 28], [27, 26, 25, 24]]


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"`batch_size` \(=256\) must be at most the number of training samples \(=100\)",
    ):
        BatchLoader(Images(100), batch_size=256, seed=0)
    with pytest.raises(UsageError, match=r"multiple of the number of devices \(=3\)"):
        BatchLoader(Images(100), batch_size=10, seed=0, world_size=3)
