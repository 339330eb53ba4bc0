"""Every loss with representative detectors and actions, and steps of it on small batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import kinfolk as kf
from kinfolk.objectives import LocalAggregationLoss, RelativeContrastLoss
from kinfolk.objectives.base import Objective
from kinfolk.pairs import Pairs

D = 8
Make = Callable[[int], nn.Module]
Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A loss for N samples, and how it is called with two embeddings of each sample and the ids."""

    make: Make
    call: Call = lambda loss_fn, one, other, ids: loss_fn(one, other, ids)


def glofnd(N: int, **more: Any) -> kf.GloFND:
    return kf.GloFND(num_samples=N, alpha=0.2, **({"init": "quantile"} | more))


def oracle(N: int) -> kf.Oracle:
    return kf.Oracle(torch.arange(N) % 4)


def cave(N: int) -> kf.Cave:
    detector = kf.Cave(num_samples=N, num_clusters=3)
    detector.refresh(torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), 0.0)
    return detector


def relative(loss_fn: Any, one: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Two keys for each anchor, the second one positive to half."""
    keys = torch.stack((other, other.roll(1, 0)), 1)
    degree = torch.tensor([[1.0, 0.5]]).expand(len(ids), 2)
    found: Tensor = loss_fn.on(Pairs(one, one, keys, ids, ids, degree=degree))
    return found


def bank(loss_fn: Any, one: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Anchors against a bank of all samples, as in Local Aggregation."""
    number = loss_fn.detector.num_samples
    rows = torch.randn(number, D, generator=torch.Generator().manual_seed(5))
    found: Tensor = loss_fn.on(Pairs(one, rows, other.unsqueeze(1), ids, torch.arange(number)))
    return found


def ntxent(detector: Callable[[int], Any] = lambda N: None, **more: Any) -> Case:
    return Case(lambda N: kf.NTXentLoss(temperature=0.2, detector=detector(N), **more))


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
    "NTXent + FNC": ntxent(lambda N: kf.FNC(top_k=2), action="attract"),
    "NTXent + Oracle": ntxent(oracle, action="attract"),
    "NTXent + Known": ntxent(
        lambda N: kf.Known(torch.tensor([[0, 2], [4, 8], [3, 5]]), num_samples=N)
    ),
    "NTXent + Ring": ntxent(lambda N: kf.Ring(lower=0.3, upper=0.8)),
    "NTXent + Ring learned": ntxent(
        lambda N: kf.Ring(lower=0.3, upper=0.8, num_samples=N, boundaries="learned")
    ),
    "NTXent + Cave": ntxent(cave),
    "SogCLR": Case(lambda N: kf.SogCLRLoss(num_samples=N)),
    "SogCLR + GloFND": Case(lambda N: kf.SogCLRLoss(num_samples=N, detector=glofnd(N))),
    "SogCLR + Oracle attract": Case(
        lambda N: kf.SogCLRLoss(num_samples=N, detector=oracle(N), action="attract")
    ),
    "CLIP + GloFND": Case(lambda N: kf.CLIPLoss(detector=glofnd(N))),
    "BimodalSogCLR + GloFND": Case(
        lambda N: kf.BimodalSogCLRLoss(num_samples=N, detector=glofnd(N))
    ),
    "FastCLIP + GloFND": Case(
        lambda N: kf.FastCLIPLoss(num_samples=N, detector=glofnd(N), action="reweight")
    ),
    "FastCLIP individual": Case(lambda N: kf.FastCLIPLoss(num_samples=N, individual_lr=0.01)),
    "SigLIP": Case(lambda N: kf.SigLIPLoss()),
    "SigLIP + GloFND attract": Case(lambda N: kf.SigLIPLoss(detector=glofnd(N), action="attract")),
    "LocalAggregation": Case(
        lambda N: LocalAggregationLoss(detector=cave(N), action="attract"), bank
    ),
    "RelativeContrast": Case(lambda N: RelativeContrastLoss(temperature=0.2), relative),
    "RelativeContrast + Oracle": Case(
        lambda N: RelativeContrastLoss(temperature=0.2, detector=oracle(N), action="attract"),
        relative,
    ),
}
FEW = ("NTXent + GloFND", "CLIP + GloFND")
"""Those that `make test` runs where Triton is installed."""


class Step(NamedTuple):
    """What a step computed: the loss, and the gradient of embeddings and parameters."""

    loss: Tensor
    gradients: list[Tensor]


def steps(
    case: Case, sizes: list[int], N: int, run: Callable[[], Any] | None
) -> tuple[list[Step], dict[str, Tensor]]:
    """Steps with batches of these sizes, and the state after them. `run`: makes the compiled block
    function of each direction of the loss; None: eager."""
    torch.manual_seed(0)
    loss_fn = case.make(N)
    for module in loss_fn.modules():
        if isinstance(module, Objective) and run is not None:
            module._block_loss = run()
    found, parameters = list[Step](), list(loss_fn.parameters())
    for seed, number in enumerate(sizes):
        g = torch.Generator().manual_seed(seed)
        one = torch.randn(number, D, generator=g)
        other = (one + 0.7 * torch.randn(number, D, generator=g)).requires_grad_()
        ids = torch.randperm(N, generator=g)[:number]
        loss = case.call(loss_fn, one.requires_grad_(), other, ids)
        inputs = [one, other, *parameters]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        found.append(Step(loss.detach(), list(gradients)))
    return found, {name: value.detach().clone() for name, value in loss_fn.state_dict().items()}
