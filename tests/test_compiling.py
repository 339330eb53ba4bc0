"""Compiled losses are the same losses: one graph for all sizes of batch and queue, no break in it, and eager where there is no compiler."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kinfolk import compiling
from kinfolk.detectors import FNC, Cave, Detector, GloFND, Known, Oracle, Ring
from kinfolk.objectives import CLIPLoss, NTXent, SogCLR
from kinfolk.pairs import ACTIONS, Action

N = 40
DETECTORS: dict[str, Callable[[], Detector | None]] = {
    "none": lambda: None,
    "interval": lambda: FNC(min_similarity=0.1),
    "glofnd": lambda: GloFND(N, alpha=0.1),
    "keys": lambda: Oracle(torch.arange(N) % 5),
    "places": lambda: Known(N, torch.tensor([[0, 2], [4, 8], [3, 5]])),
    "mask and drop": lambda: Ring(0.3, 0.8),
    "drop": lambda: refreshed(Cave(N, num_clusters=3)),
}


def refreshed(detector: Cave) -> Cave:
    detector.refresh(torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), 0.0)
    return detector


def views(number: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    one, other = torch.randn(2, number, 6, generator=g)
    return one.requires_grad_(), other, torch.randperm(N, generator=g)[:number]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compiles without making kernels, and refuses a break in the graph; holds the number of operations of each graph that was made."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    made = functools.cache(lambda function: torch.compile(function, backend=backend, dynamic=True, fullgraph=True))
    monkeypatch.setattr(compiling, "_compiled", made)
    monkeypatch.setattr(compiling, "can_compile", lambda: True)
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("action", ACTIONS)
def test_one_graph_serves_all_sizes(traced: list[int], detector: str, action: Action) -> None:
    compiled, eager = (NTXent(0.2, detector=DETECTORS[detector](), action=action, compile=which) for which in (True, False))
    for number in (9, 12, 7, 11):
        one, other, ids = views(number)
        losses = [loss_fn(one, other, ids) for loss_fn in (compiled, eager)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, one)[0] for loss in losses))
    assert len(traced) == (2 if detector == "glofnd" else 1), "one graph of the block, and one of the detector's own"


SCRIPT = """
import torch
from kinfolk.detectors import GloFND
from kinfolk.objectives import NTXent

compiled, eager = (NTXent(0.2, detector=GloFND(40, alpha=0.1), compile=which) for which in (True, False))
for number in (9, 12, 7):
    one, other = torch.randn(2, number, 6, generator=torch.Generator().manual_seed(number))
    torch.testing.assert_close(compiled(one, other, torch.arange(number)), eager(one, other, torch.arange(number)))
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.skipif(not compiling.can_compile(), reason="there is no C++ compiler")
def test_one_set_of_kernels_serves_all_sizes() -> None:
    """By the real compiler, which makes graphs anew for numbers that it takes for constants; in a process where no device is pretended."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert len(set(done.stdout.split())) == 1, done.stdout


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler itself
@pytest.mark.parametrize("make", [lambda: SogCLR(N, 0.2), lambda: CLIPLoss(0.2)])
def test_a_loss_inside_a_compiled_step_is_the_same(make: Callable[[], torch.nn.Module]) -> None:
    """A user's own `torch.compile` around it: breaks in the graph are allowed, other results are not."""
    torch._dynamo.reset()
    plain, inside = make(), make()
    step = torch.compile(lambda *given: inside(*given) * 2, backend="eager")
    for number in (9, 7):
        one, other, ids = views(number)
        expected, found = plain(one, other, ids) * 2, step(one, other, ids)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, one), torch.autograd.grad(expected, one))
    torch._dynamo.reset()


def test_without_a_compiler_it_is_eager_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kinfolk.compiling.shutil.which", lambda name: None)
    compiling.can_compile.cache_clear()
    one, other, ids = views(9)
    with caplog.at_level(logging.WARNING, "kinfolk.compiling"):
        losses = [NTXent(0.2, compile=which)(one, other, ids) for which in (True, True, False)]
    compiling.can_compile.cache_clear()
    assert torch.equal(losses[0], losses[2])
    assert [record.message for record in caplog.records] == [
        "no C++ compiler was found, so losses are not compiled; install g++ to make them faster"
    ]


def test_repr_shows_it() -> None:
    assert repr(NTXent(0.1, compile=True)) == "NTXent(temperature=0.1, compile=True)"
