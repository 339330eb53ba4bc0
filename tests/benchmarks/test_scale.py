"""The tables of docs/scale.md: the formulae say what the stores hold and what crosses ranks, and
the page shows what the script prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kinfolk as kf
from kinfolk import distributed
from kinfolk.clustering.labels import PseudoLabels
from kinfolk.stores import Bank, Queue
from tests.benchmarks.loading import load

ROOT = Path(__file__).parents[2]
RANKS, LOCAL, SAMPLES = 2, 8, 1000


scale = load("scale")


def held(module: nn.Module) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


@pytest.mark.parametrize("store", scale.held(), ids=lambda store: store.name)
def test_memory_is_what_the_stores_hold(store: Any) -> None:
    few, many = (held(store.make(number)) for number in (SAMPLES, 2 * SAMPLES))
    assert many - few == store.bytes(2 * SAMPLES) - store.bytes(SAMPLES)
    assert 0 <= few - store.bytes(SAMPLES) < 64, "beside what grows there are only a few numbers"


class Wire:
    """Several ranks that all hold what this one does; counts what is joined."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gathered = self.reduced = self.broadcast = 0
        for name, value in (
            ("is_initialized", lambda: True),
            ("get_world_size", lambda: RANKS),
            ("get_rank", lambda: 0),
        ):
            patch.setattr(dist, name, value)
        patch.setattr(dist, "all_reduce", self._all_reduce)
        patch.setattr(distributed, "_all_gather", self._all_gather)
        patch.setattr(distributed, "_reduce_scatter", self._reduce_scatter)
        patch.setattr(dist, "broadcast", self._broadcast)

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        gathered.view(RANKS, -1).copy_(own)
        self.gathered += RANKS * own.nbytes if own.numel() > 1 else 0

    def _reduce_scatter(self, own: Tensor, whole: Tensor) -> None:
        own.copy_(RANKS * whole.view(RANKS, *own.shape)[0])
        self.reduced += whole.nbytes

    def _all_reduce(self, own: Tensor, *how: Any) -> None:
        self.reduced += own.nbytes if own.numel() > 1 else 0

    def _broadcast(self, own: Tensor, source: int) -> None:
        self.broadcast += own.nbytes


def expected(name: str, number: int = RANKS * LOCAL) -> int:
    found: int = next(
        part.bytes(number) for part in (*scale.steps(), *scale.refreshes()) if part.name == name
    )
    return found


def step(wire: Wire, loss_fn: nn.Module) -> int:
    """What one step gathers."""
    before = wire.gathered
    generator = torch.Generator().manual_seed(0)
    z1, z2 = torch.randn(2, LOCAL, scale.D, generator=generator)
    loss_fn(z1.requires_grad_(), z2, torch.arange(LOCAL)).backward()
    return wire.gathered - before


def test_traffic_is_what_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    plain = step(wire, kf.NTXentLoss(temperature=0.1))
    assert plain == expected("embeddings and ids")
    assert wire.reduced == expected("their gradient")
    assert step(wire, kf.SogCLRLoss(num_samples=SAMPLES, temperature=0.1)) - plain == expected(
        "ids and u"
    )
    assert step(
        wire, kf.NTXentLoss(temperature=0.1, detector=kf.GloFND(num_samples=SAMPLES, alpha=0.1))
    ) - plain == expected("ids and thresholds, tracking")
    assert step(
        wire, kf.NTXentLoss(temperature=0.1, detector=kf.IFND(num_samples=SAMPLES, source="bank"))
    ) - plain == expected("collected embeddings")
    for store in (Queue(64, scale.D), Bank(SAMPLES, scale.D)):
        before, rows, ids = wire.gathered, torch.randn(LOCAL, scale.D), torch.arange(LOCAL)
        if isinstance(store, Queue):
            store.push(rows, ids)
        else:
            store.write(ids, rows)
        assert (
            wire.gathered - before == expected("rows of the queue") == expected("rows of the bank")
        )


def test_a_refresh_broadcasts_the_documented_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(SAMPLES, scale.D, generator=torch.Generator().manual_seed(0))
    wire = Wire(monkeypatch)
    detector = kf.IFND(num_samples=SAMPLES, num_clusters=scale.levels(SAMPLES), schedule="constant")
    detector.refresh(features, 1.0)
    assert wire.broadcast == expected("clusters, accepted labels, confidence", SAMPLES)
    wire.broadcast = 0
    PseudoLabels(SAMPLES, detector.num_clusters, seed=0, iterations=1).refresh(features)
    assert wire.broadcast == expected("clusters", SAMPLES)


def test_the_page_shows_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main()
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    missing = [line for line in capsys.readouterr().out.splitlines() if line not in page]
    assert not missing


PER_SAMPLE: dict[str, Callable[[int], nn.Module]] = {
    "`sogclr`": lambda N: kf.SogCLRLoss(num_samples=N),
    "`sogclr-clip`, `fastclip`": lambda N: kf.FastCLIPLoss(num_samples=N),
    "`glofnd` with `sgd`": lambda N: kf.GloFND(num_samples=N, alpha=0.1, rule="sgd"),
    "`glofnd` with `tracking` or `adam`": lambda N: kf.GloFND(num_samples=N, alpha=0.1),
    "labels of `oracle`": lambda N: kf.Oracle(torch.zeros(N, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_the_page_says_what_fits_at_a_billion_samples(name: str) -> None:
    few, many = (PER_SAMPLE[name](number) for number in (SAMPLES, 2 * SAMPLES))
    each = (held(many) - held(few)) // SAMPLES
    saved = name != "labels of `oracle`"
    row = f"| {name} | {each} | {each} | {0 if saved else 'not saved'} |"
    assert row in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    memory = {x.untyped_storage().data_ptr() for x in (*many.buffers(), *many.parameters())}
    large = [x for x in many.state_dict().values() if x.numel() >= SAMPLES]
    assert bool(large) == saved
    assert {x.untyped_storage().data_ptr() for x in large} <= memory, "saved without a copy"
