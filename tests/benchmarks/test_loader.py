"""The loading benchmark: a missing peer is skipped by name, and what it streams is every sample
once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.loading import load

benchmark = load("loader")


def test_an_epoch_is_streamed_and_its_memory_printed(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.flat(1000, 0)
    out = capsys.readouterr().out
    assert "every sample once: yes" in out
    assert "bytes a sample" in out


def test_a_missing_peer_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> Any:
        raise ImportError("No module named 'webdataset'")

    monkeypatch.setattr(benchmark, "SIDE", 8)
    monkeypatch.setattr(benchmark, "BATCH", 4)
    for peer in ("webdataset", "lightly"):
        monkeypatch.setattr(benchmark, peer, missing)
    benchmark.compare(8, 32, 0, 1)
    out = capsys.readouterr().out
    assert "webdataset, shards: skipped, No module named 'webdataset'" in out
    assert "streaming shards ÷ the decoder, per core" in out
