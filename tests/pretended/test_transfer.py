"""Batches on their way to a GPU: read ahead, pinned, copied on a stream of their own; the host
never waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.data.images import Transfer
from kinfolk.data.views import Views
from kinfolk.embedding import embed
from kinfolk.training.loader import BatchLoader
from tests.pretended.device import AVAILABLE, CUDA, LOG, OnDevice, pretended

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")


class Data:
    """Random images; counts what was read."""

    num_train = 24

    def __init__(self) -> None:
        self.all = torch.randint(
            0, 256, (24, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.all)

    def pixels(self, ids: Tensor) -> Tensor:
        return self.all[ids]

    def aspect(self, ids: Tensor) -> Tensor:
        return 1 + ids / 24


class Streams:
    """Stands for CUDA's streams, events and pinned memory, and notes in which order they are
    used."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.pinned: set[int] = set()
        self._kept: list[Tensor] = []

    def pin(self, x: Tensor) -> Tensor:
        copy = x.clone()
        self._kept.append(copy)
        self.pinned.add(copy.data_ptr())
        return copy

    def record_event(self) -> Streams:
        self.notes.append("recorded")
        return self

    def wait_event(self, event: Streams) -> None:
        self.notes.append("device waits")

    def synchronize(self) -> None:
        self.notes.append("host waits")

    @contextlib.contextmanager
    def active(self, stream: Streams) -> Iterator[None]:
        self.notes.append("side stream")
        yield
        self.notes.append("main stream")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made, empty = Streams(), torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "stream", made.active)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: made.pin(self))
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: made.notes.append("kept"))
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **given: empty(*args, **given)
    )
    return made


def views_of(batch: dict[str, Any], device: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(batch["step"])
    return batch | {"views": Views("simclr", 8)(batch["pixels"], draw, aspect=batch["aspect"])}


def on_host(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(on_host(found[name]), value, atol=1e-5, rtol=1e-5)


def test_batches_arrive_on_the_device_without_waiting() -> None:
    data = Data()
    expected = [views_of(batch, None) for batch in BatchLoader(data, 4, seed=1)]
    with pretended():
        Views("simclr", 8)(OnDevice(data.all[:4]), torch.Generator())  # constants are copied once
        LOG.reset()
        loader = BatchLoader(
            data, 4, seed=1, transfer=Transfer(CUDA, lambda batch: views_of(batch, CUDA))
        )
        found = list(loader)
        assert not LOG.waits, LOG.waits
    assert isinstance(found[0]["views"], OnDevice)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_batch_is_sent_before_the_one_before_it_is_done_and_the_position_counts_what_was_yielded() -> (  # noqa: E501
    None
):
    data, sent = Data(), list[int]()

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        sent.append(batch["step"])
        return batch

    with pretended():
        loader = BatchLoader(data, 4, seed=1, transfer=Transfer(CUDA, prepare))
        batches = iter(loader)
        seen = []
        for number, batch in enumerate(batches, 1):
            seen.append(batch["ids"].held.tolist())
            assert loader.position == number
            assert sent == list(range(len(sent)))
            assert number <= len(sent) <= number + 1
            if number == 3:
                break
        state = loader.state_dict()
        again = BatchLoader(data, 4, seed=1, transfer=Transfer(CUDA, prepare))
        again.load_state_dict(state)
        seen += [batch["ids"].held.tolist() for batch in again]
    assert seen == [batch["ids"].tolist() for batch in BatchLoader(data, 4, seed=1)]


def test_copies_come_from_pinned_memory_on_a_stream_of_their_own(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Transfer.send

    def spied(self: Transfer, batch: dict[str, Any]) -> Any:
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        assert len(tensors) == 3
        assert all(value.data_ptr() in streams.pinned for value in tensors)
        return send(self, batch)

    monkeypatch.setattr(Transfer, "send", spied)
    with pretended():
        found = list(BatchLoader(Data(), 12, seed=1, transfer=Transfer(CUDA)))
        assert not LOG.waits, LOG.waits
    assert len(found) == 2
    once = ["side stream", "recorded", "main stream"]
    taken = ["device waits", "kept", "kept", "kept"]
    assert streams.notes in ([*once, *once, *taken, *taken], [*once, *taken, *once, *taken])


def test_embedding_waits_for_a_batch_only_after_the_next_was_launched(streams: Streams) -> None:
    data, views, encoder = Data(), Views("plain", 8), nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    expected = encoder(views.evaluate(data.all, data.aspect(torch.arange(24)))).detach()
    launched: list[int] = []
    encoder.register_forward_hook(lambda *_: launched.append(streams.notes.count("host waits")))
    with pretended():
        encoder.to("cuda")
        views.evaluate(OnDevice(data.all[:2]), OnDevice(torch.ones(2)))  # constants are copied once
        LOG.reset()
        found = embed(encoder, data, views, batch_size=8, device="cuda")
        assert not LOG.waits, LOG.waits
    assert launched == [0, 0, 1], "the second batch is launched before the host waits for the first"
    assert streams.notes.count("host waits") == 3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
