"""What torch without CUDA lacks, for tests that pretend it has it."""

from __future__ import annotations

import threading

import pytest
import torch


@pytest.fixture(autouse=True)
def chosen_devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The device that each thread chose, by the name of the thread."""
    chosen: dict[str, torch.device] = {}

    def choose(device: torch.device) -> None:
        chosen[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return chosen
