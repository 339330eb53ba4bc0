"""Threads that pin memory do it for the GPU of their rank, not for the first one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kinfolk.data.images import Transfer, transfer_batches

SECOND = torch.device("cuda:1")


def test_reading_threads_choose_the_device_before_they_pin(
    monkeypatch: pytest.MonkeyPatch, chosen_devices: dict[str, torch.device]
) -> None:
    stream = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    pinned: list[torch.device | None] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(chosen_devices.get(threading.current_thread().name))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: self)
    transfer = Transfer(SECOND)
    batches = list(
        transfer_batches(lambda step: {"ids": torch.tensor([step])}, range(5), transfer, threads=2)
    )
    assert [int(batch["ids"]) for batch in batches] == list(range(5))
    assert pinned == [SECOND] * 5
    assert threading.current_thread().name not in chosen_devices, (
        "Lightning chose that of the main thread"
    )


def test_nothing_is_chosen_on_a_cpu(chosen_devices: dict[str, torch.device]) -> None:
    assert (
        len(
            list(
                transfer_batches(
                    lambda step: {"step": step}, range(3), Transfer(torch.device("cpu")), threads=1
                )
            )
        )
        == 3
    )
    assert not chosen_devices
