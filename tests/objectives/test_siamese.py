"""The siamese loss equals the loops over its equation; who is drawn for whom; several processes
equal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk.objectives.siamese import Partners, SiameseMetric, draw_partners, siamese_metric
from tests.ranks import end_rank, spawn
from tests.reference import spcl as slow

PROTOTYPES = torch.tensor([4, 9, 4, 7, 4, 9, 1, 4])
SIZES = (3, 5)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(seed: int = 0) -> tuple[Tensor, SiameseMetric]:
    torch.manual_seed(seed)
    loss_fn = SiameseMetric(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))).double()
    return torch.randn(16, 5, dtype=torch.float64, requires_grad=True), loss_fn


def listed(partners: Partners) -> list[tuple[int, int, int]]:
    rows = zip(
        partners.anchors_A.tolist(),
        partners.same_A.tolist(),
        partners.other_A.tolist(),
        strict=True,
    )
    return [(number, same, other) for number, (used, same, other) in enumerate(rows) if used]


def test_it_is_equation_3() -> None:
    h, loss_fn = made()
    loss = loss_fn(h, PROTOTYPES, draw())
    expected = slow.metric(h, listed(draw_partners(PROTOTYPES, 2, draw())), loss_fn.head)
    torch.testing.assert_close(loss, expected)
    wanted = [h, *loss_fn.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)
    )


def test_the_gradient_is_right() -> None:
    h, loss_fn = made()
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, PROTOTYPES, draw()), (h,))


@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize(
    "prototypes",
    [
        PROTOTYPES.tolist(),
        [0] * 6,
        [3, 1, 2, 0],
        [0, 0, 0, 1, 1, 1],
        [5, 5, 6, 6, 7, 7, 8, 8, 9],
        [2],
        [-5, -4, 0, 0],
    ],
)
def test_partners_are_drawn_from_other_clusters(prototypes: list[int], views: int) -> None:
    seen: dict[int, tuple[set[int], set[int]]] = {}
    for seed in range(250):
        partners = draw_partners(torch.tensor(prototypes), views, draw(seed))
        assert [anchor for anchor, *_ in listed(partners)] == [
            b * views + v for b in slow.anchors(prototypes) for v in range(views)
        ]
        for anchor, same, other in listed(partners):
            own = prototypes[anchor // views]
            assert prototypes[same // views] == own
            assert other == -1 if len(set(prototypes)) == 1 else prototypes[other // views] != own
            assert (same // views == anchor // views) is (prototypes.count(own) == 1), (
                "another sample, if there is one"
            )
            assert same != anchor or views == 1
            seen.setdefault(anchor, (set(), set()))[0].add(same)
            seen[anchor][1].add(other)
    if len(prototypes) == 6:
        for anchor, (mates_seen, strangers_seen) in seen.items():
            mates = [
                b
                for b in range(6)
                if prototypes[b] == prototypes[anchor // views] and b != anchor // views
            ]
            assert mates_seen == {b * views + v for b in mates for v in range(views)}, (
                "all of them, sooner or later"
            )
            strangers = {
                b * views + v
                for b in range(6)
                if prototypes[b] != prototypes[anchor // views]
                for v in range(views)
            }
            assert strangers_seen == (strangers or {-1})


def test_a_batch_of_one_prototype_has_no_other() -> None:
    h, loss_fn = made()
    loss = loss_fn(h, torch.zeros(8, dtype=torch.int64), draw())
    expected = slow.metric(
        h, listed(draw_partners(torch.zeros(8, dtype=torch.int64), 2, draw())), loss_fn.head
    )
    torch.testing.assert_close(loss, expected)


def test_moving_features_along_with_their_numbers_changes_nothing() -> None:
    h, loss_fn = made()
    partners = draw_partners(PROTOTYPES, 2, draw())
    order = torch.randperm(16, generator=draw(1))
    place = order.argsort()
    moved = Partners(
        partners.anchors_A[order], place[partners.same_A][order], place[partners.other_A][order]
    )
    torch.testing.assert_close(
        siamese_metric(h[order], moved, loss_fn.head), siamese_metric(h, partners, loss_fn.head)
    )


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_half_precision_is_computed_in_single(scale: float) -> None:
    h, loss_fn = made()
    x = (h.detach() * scale).bfloat16().requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = slow.metric(exact, listed(draw_partners(PROTOTYPES, 2, draw())), loss_fn.head)
    (wanted,) = torch.autograd.grad(expected, exact)
    loss = loss_fn.float()(x, PROTOTYPES, draw())
    loss.backward()
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, wanted.bfloat16(), rtol=2e-2, atol=1e-6)


def outcome(
    module: nn.Module, loss_fn: SiameseMetric, h: Tensor, prototypes: Tensor
) -> dict[str, Any]:
    x = h.detach().clone().requires_grad_()
    loss = module(x, prototypes, draw())
    loss.backward()
    return {
        "loss": loss.detach(),
        "features": x.grad,
        "head": [p.grad for p in loss_fn.parameters()],
    }


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(SIZES)
    )
    results = []
    for prototypes in (PROTOTYPES, PROTOTYPES.sort().values):
        h, loss_fn = made()
        part = torch.split(h, [2 * size for size in SIZES])[rank]
        results.append(outcome(DistributedDataParallel(loss_fn), loss_fn, part, prototypes))
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Also where one rank has no anchors at all."""
    spawn(on_rank, (str(tmp_path),), nprocs=len(SIZES))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SIZES))]
    for i, prototypes in enumerate((PROTOTYPES, PROTOTYPES.sort().values)):
        h, loss_fn = made()
        expected = outcome(loss_fn, loss_fn, h, prototypes)
        for rank in found:
            torch.testing.assert_close(rank[i]["loss"], expected["loss"])
            torch.testing.assert_close(rank[i]["head"], expected["head"])
        # DDP averages what each rank has; the features' gradient is therefore that many times as
        # large
        features = torch.cat([rank[i]["features"] for rank in found]) / len(SIZES)
        torch.testing.assert_close(features, expected["features"])
