"""Compiled losses are the same losses: one graph for all sizes, no break in it, however many losses
there are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.detectors import FNC, GloFND, Guide, Known, Oracle, Ring, StartAt, Union
from kinfolk.objectives import (
    BimodalSogCLRLoss,
    CLIPLoss,
    LocalAggregationLoss,
    NTXentLoss,
    RelativeContrastLoss,
    SogCLRLoss,
)
from kinfolk.objectives.base import Objective
from tests.ranks import run_program
from tests.scripted import Scripted, same_class

# of the compiler itself
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
N, COMPILE = 40, torch.compile
LOSSES: dict[str, Callable[[bool], Any]] = {
    "eliminated": lambda c: NTXentLoss(detector=GloFND(num_samples=N, alpha=0.1), compile=c),
    "estimated, attracted": lambda c: NTXentLoss(
        prior=0.1,
        hardness=0.5,
        detector=FNC(top_k=3),
        action="attract",
        own_weight=0.4,
        compile=c,
    ),
    "levels": lambda c: SogCLRLoss(
        num_samples=N,
        detector=Scripted(same_class(3), same_class(4)),
        action="reweight",
        min_negatives=3,
        compile=c,
    ),
    "united": lambda c: NTXentLoss(
        detector=Union(
            StartAt(GloFND(num_samples=N, alpha=0.1), epoch=0),
            Guide(torch.eye(N)[:, :5] + 0.1, alpha=0.2, degrees=True),
            Ring(lower=0.3, upper=0.8),
        ),
        action="attract",
        compile=c,
    ),
    "annealed": lambda c: NTXentLoss(
        detector=Ring(lower=0.3, upper=0.8, anneal="linear"), compile=c
    ),
    "two directions": lambda c: CLIPLoss(
        detector=Known(torch.tensor([[0, 2], [4, 8], [3, 5]]), num_samples=N), compile=c
    ),
}
GRAPHS = {"two directions": 2}


def views(number: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    one, other = torch.randn(2, number, 6, generator=g)
    return one.requires_grad_(), other, torch.randperm(N, generator=g)[:number]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compiles without making kernels, and refuses a break in the graph and a function that has too
    many variants; holds the number of operations of each graph that was made."""
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        made.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    strict = functools.partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", strict)
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LOSSES)
def test_one_graph_serves_all_sizes_and_epochs(graphs: list[int], name: str) -> None:
    compiled, eager = (LOSSES[name](which) for which in (True, False))
    for step, number in enumerate((9, 12, 7, 11)):
        one, other, ids = views(number)
        losses = []
        for loss_fn in (compiled, eager):
            loss_fn.set_progress(step / 2, 6)
            losses.append(loss_fn(one, other, ids))
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, one)[0] for loss in losses))
        assert torch.equal(compiled.stats.counts, eager.stats.counts)
    torch.testing.assert_close(
        dict(compiled.state_dict()), dict(eager.state_dict()), equal_nan=True
    )
    assert len(graphs) == GRAPHS.get(name, 1)


def test_more_losses_than_the_compiler_keeps_variants_of_a_function_are_all_compiled(
    graphs: list[int],
) -> None:
    """It keeps eight, here three, and then silently runs the function as it is. A copy of a loss is
    one more."""
    one, other, ids = views(5)
    settings: list[dict[str, Any]] = [{}, {"prior": 0.1}, {"hardness": 0.5}]
    made: list[list[Objective]] = [
        [NTXentLoss(**given, compile=which) for which in (True, False)] for given in settings
    ]
    made += [
        [kind(compile=which) for which in (True, False)]
        for kind in (LocalAggregationLoss, RelativeContrastLoss)
    ]
    made += [copy.deepcopy(made[0])]
    with torch._dynamo.config.patch(recompile_limit=3):
        assert len(made) > torch._dynamo.config.recompile_limit + 2
        for number, (compiled, eager) in enumerate(made, 1):
            torch.testing.assert_close(compiled(one, other, ids), eager(one, other, ids))
            assert len(graphs) == number


def test_a_detector_that_starts_late_makes_one_more_graph(graphs: list[int]) -> None:
    loss_fn = NTXentLoss(detector=StartAt(FNC(top_k=2), epoch=3), compile=True)
    for epoch in range(6):
        loss_fn.set_progress(epoch, 6)
        loss_fn(*views(5))
    assert len(graphs) == 2


def run_compiled() -> None:
    """Prints, after each size, how many graphs and breaks there are. The kernels use no vector
    instructions, so the compiler need not try out which of them this machine has."""
    torch._inductor.config.cpp.vec_isa_ok = False
    torch._inductor.config.compile_threads = 1
    compiled, eager = (
        NTXentLoss(detector=FNC(min_similarity=0.3), compile=c) for c in (True, False)
    )
    for number in (9, 12, 7):
        one, other, ids = views(number)
        found = [loss_fn(one, other, ids) for loss_fn in (compiled, eager)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, one)[0] for loss in found), rtol=1e-4, atol=1e-5
        )
        counters = torch._dynamo.utils.counters
        print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), flush=True)  # noqa: T201


def test_one_set_of_kernels_serves_all_sizes(tmp_path: Path) -> None:
    """By the real compiler, which makes graphs anew for numbers that it takes for constants; in a
    process in which no device is pretended."""
    ended = run_program(run_compiled, tmp_path)
    assert not ended.code, ended.err
    assert ended.out.split("\n") == ["1 0", "1 0", "1 0", ""]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler itself
@pytest.mark.parametrize(
    "make",
    [
        lambda: CLIPLoss(temperature=0.2, detector=Oracle(torch.arange(N) % 5)),
        lambda: BimodalSogCLRLoss(num_samples=N, temperature=0.2, compile=True),
    ],
)
def test_a_loss_inside_a_compiled_step_is_the_same(
    make: Callable[[], torch.nn.Module], graphs: list[int]
) -> None:
    """A user's own `torch.compile` around it: breaks in the graph are allowed, other results are
    not."""
    plain, inside = make(), make()
    step = COMPILE(lambda *given: inside(*given) * 2, backend="eager")
    for number in (9, 7):
        one, other, ids = views(number)
        expected, found = plain(one, other, ids) * 2, step(one, other, ids)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, one), torch.autograd.grad(expected, one)
        )
    torch.testing.assert_close(dict(inside.state_dict()), dict(plain.state_dict()))


def test_repr_and_copies_say_that_a_loss_is_compiled() -> None:
    loss_fn = NTXentLoss(temperature=0.2, compile=True)
    assert (
        repr(copy.deepcopy(loss_fn)) == repr(loss_fn) == "NTXentLoss(temperature=0.2, compile=True)"
    )
