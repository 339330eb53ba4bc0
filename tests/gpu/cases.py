"""Every loss with representative detectors and actions, and steps of it on small batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kinfolk as kf

D = 8
Make = Callable[..., Any]
Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A loss, made from the number of samples and from arguments that all losses share; how it is
    called with two embeddings of each sample and the ids; and the batches of its steps."""

    make: Make
    call: Call = lambda loss_fn, one, other, ids: loss_fn(one, other, ids)
    sizes: tuple[int, ...] = (9, 11, 7)
    num_samples: int = 14


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def glofnd(N: int, **more: Any) -> kf.GloFND:
    return kf.GloFND(num_samples=N, alpha=0.2, **({"init": "quantile"} | more))


def oracle(N: int) -> kf.Oracle:
    return kf.Oracle(torch.arange(N) % 4)


def cave(N: int) -> kf.Cave:
    detector = kf.Cave(num_samples=N, num_clusters=3)
    detector.refresh(random(N, 4), 0.0)
    return detector


def ifnd(N: int) -> kf.IFND:
    """Two levels of clusters."""
    detector = kf.IFND(num_samples=N, num_clusters=(3, 5), schedule="constant")
    detector.refresh(random(N, 4), 0.0)
    return detector


def neighbours(N: int) -> kf.Neighbours:
    detector = kf.Neighbours(num_samples=N, num_clusters=3, num_clusterings=2, num_background=9)
    detector.refresh(random(N, 4), 0.0)
    return detector


def relative(loss_fn: Any, one: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Two keys for each anchor, the second one positive to half."""
    keys = torch.stack((other, other.roll(1, 0)), 1)
    degree = torch.tensor([[1.0, 0.5]]).expand(len(ids), 2)
    found: Tensor = loss_fn.on(kf.Pairs(one, one, keys, ids, ids, degree=degree))
    return found


def bank(loss_fn: Any, one: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Anchors against a bank of all samples, as in Local Aggregation."""
    rows = random(N := loss_fn.detector.num_samples, D)
    found: Tensor = loss_fn.on(kf.Pairs(one, rows, other.unsqueeze(1), ids, torch.arange(N)))
    return found


def bf16(loss_fn: Any, one: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Embeddings as an encoder under autocast returns them."""
    found: Tensor = loss_fn(one.bfloat16(), other.bfloat16(), ids)
    return found


def ntxent(
    detector: Callable[[int], Any] = lambda N: None,
    call: Call = lambda loss_fn, one, other, ids: loss_fn(one, other, ids),
    **more: Any,
) -> Case:
    return Case(
        lambda N, **shared: kf.NTXentLoss(temperature=0.2, detector=detector(N), **more, **shared),
        call,
    )


CASES: dict[str, Case] = {
    "NTXent": ntxent(),
    "NTXent debiased": ntxent(prior=0.1),
    "NTXent hard": ntxent(hardness=0.5),
    "NTXent decoupled": ntxent(decoupled=True),
    "NTXent + GloFND": ntxent(glofnd),
    "NTXent + GloFND adam": ntxent(lambda N: glofnd(N, rule="adam")),
    "NTXent + GloFND sgd": ntxent(lambda N: glofnd(N, rule="sgd")),
    "NTXent + GloFND attract": ntxent(glofnd, action="attract"),
    "NTXent + GloFND reweight": ntxent(glofnd, action="reweight"),
    "NTXent with a bank + GloFND": ntxent(glofnd, bank),
    # more candidates than a kernel reads at once, so that it loops over them
    "NTXent with a long bank + GloFND": ntxent(glofnd, bank)._replace(
        sizes=(5, 4, 6), num_samples=2100
    ),
    "NTXent in blocks + GloFND": ntxent(glofnd, block_rows=6)._replace(
        sizes=(9, 12, 15), num_samples=16
    ),
    "NTXent in bf16 + GloFND": ntxent(glofnd, bf16),
    "NTXent + FNC": ntxent(lambda N: kf.FNC(top_k=2), action="attract"),
    "NTXent + Oracle": ntxent(oracle, action="attract"),
    "NTXent + Known": ntxent(
        lambda N: kf.Known(torch.tensor([[0, 2], [4, 8], [3, 5]]), num_samples=N)
    ),
    "NTXent + PositiveMargin": ntxent(lambda N: kf.PositiveMargin(margin=0.3)),
    "NTXent + Guide, degrees": ntxent(
        lambda N: kf.Guide(random(N, 4), temperature=0.5), action="attract"
    ),
    "NTXent + Union": ntxent(lambda N: kf.Union(kf.FNC(top_k=2), oracle(N))),
    "NTXent + Ring": ntxent(lambda N: kf.Ring(lower=0.3, upper=0.8)),
    "NTXent + Cave": ntxent(cave),
    "NTXent + IFND, two levels": ntxent(ifnd, action="attract"),
    "SogCLR": Case(lambda N, **more: kf.SogCLRLoss(num_samples=N, **more)),
    "SogCLR + GloFND": Case(
        lambda N, **more: kf.SogCLRLoss(num_samples=N, detector=glofnd(N), **more)
    ),
    "SogCLR + Oracle attract": Case(
        lambda N, **more: kf.SogCLRLoss(num_samples=N, detector=oracle(N), action="attract", **more)
    ),
    "CLIP + GloFND": Case(lambda N, **more: kf.CLIPLoss(detector=glofnd(N), **more)),
    "BimodalSogCLR + GloFND": Case(
        lambda N, **more: kf.BimodalSogCLRLoss(num_samples=N, detector=glofnd(N), **more)
    ),
    "FastCLIP + GloFND": Case(
        lambda N, **more: kf.FastCLIPLoss(
            num_samples=N, detector=glofnd(N), action="reweight", **more
        )
    ),
    "SigLIP": Case(lambda N, **more: kf.SigLIPLoss(**more)),
    "SigLIP + GloFND attract": Case(
        lambda N, **more: kf.SigLIPLoss(detector=glofnd(N), action="attract", **more)
    ),
    "LocalAggregation + Neighbours": Case(
        lambda N, **more: kf.LocalAggregationLoss(detector=neighbours(N), action="attract", **more),
        bank,
    ),
    "RelativeContrast": Case(
        lambda N, **more: kf.RelativeContrastLoss(temperature=0.2, **more), relative
    ),
    "RelativeContrast + Oracle": Case(
        lambda N, **more: kf.RelativeContrastLoss(
            temperature=0.2, detector=oracle(N), action="attract", **more
        ),
        relative,
    ),
}
FEW = ("NTXent + GloFND", "CLIP + GloFND")
"""Those that `make test` runs where Triton is installed."""


class Step(NamedTuple):
    """What a step computed: the loss, the gradient of embeddings and parameters, and the number of
    flagged pairs."""

    loss: Tensor
    gradients: list[Tensor]
    flagged: int


def steps(case: Case, compile: bool) -> tuple[list[Step], dict[str, Tensor]]:
    """Steps with batches of the case's sizes, and the state after them."""
    torch.manual_seed(0)
    N = case.num_samples
    loss_fn = case.make(N, compile=compile)
    found, parameters = list[Step](), list(loss_fn.parameters())
    for seed, number in enumerate(case.sizes):
        g = torch.Generator().manual_seed(seed)
        one = torch.randn(number, D, generator=g)
        other = (one + 0.7 * torch.randn(number, D, generator=g)).requires_grad_()
        ids = torch.randperm(N, generator=g)[:number]
        loss = case.call(loss_fn, one.requires_grad_(), other, ids)
        inputs = [one, other, *parameters]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        found.append(Step(loss.detach(), list(gradients), int(loss_fn.stats.flagged)))
    return found, {name: value.detach().clone() for name, value in loss_fn.state_dict().items()}
