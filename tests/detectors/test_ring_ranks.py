"""Two gloo processes with unequal batches equal one on the joined batch: the ring,
annealed in two ways, and Cave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk.detectors import Cave, Detector, Ring
from kinfolk.objectives import NTXentLoss
from kinfolk.pairs import Pairs
from tests.ranks import end_rank, spawn

NUM_SAMPLES, SIZES, STEPS = 30, (5, 3), 6
NAMES = ["exact", "linear", "loss", "clusters", "cave", "queue"]


def detector(name: str) -> Detector:
    made: dict[str, Ring | Cave] = {
        "exact": Ring(lower=0.3, upper=0.8),
        "queue": Ring(lower=0.3, upper=0.8),
        "linear": Ring(
            lower=0.6,
            upper=0.8,
            anneal="linear",
            start_upper=0.7,
            anneal_epochs=2,
        ),
        "loss": Ring(
            lower=0.6,
            upper=0.8,
            anneal="loss",
            anneal_epochs=2,
        ),
        "clusters": Ring(lower=0.3, upper=0.8, num_samples=NUM_SAMPLES, num_clusters=(3, 4)),
        "cave": Cave(num_samples=NUM_SAMPLES, num_clusters=3),
    }
    if made[name].due(0):
        made[name].refresh(
            torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(9)), 0.0
        )
    return made[name]


def run(name: str, rank: int | None) -> dict[str, Any]:
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=detector(name),
        action="attract" if name == "clusters" else "eliminate",
    ).double()
    queue, queue_ids = (
        torch.randn(20, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64),
        torch.arange(20),
    )
    losses, gradients = [], []
    for step in range(STEPS):
        loss_fn.set_progress(step / 2, 3)
        g = torch.Generator().manual_seed(step)
        z, ids = (
            torch.randn(2, sum(SIZES), 4, generator=g, dtype=torch.float64),
            torch.randperm(NUM_SAMPLES, generator=g)[: sum(SIZES)],
        )
        if step == 3:
            ids[-1] = ids[0]  # one sample on both ranks
        mine = slice(None) if rank is None else slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        x: Tensor = z[:, mine].clone().requires_grad_()
        loss = (
            loss_fn.on(Pairs(x[0], queue, x[1].unsqueeze(1), ids[mine], queue_ids))
            if name == "queue"
            else loss_fn(x[0], x[1], ids[mine])
        )
        loss.backward()
        assert x.grad is not None
        losses.append(loss.item())
        gradients.append(x.grad)
    return {"loss": losses, "gradient": gradients, "state": loss_fn.state_dict()}


def child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({name: run(name, rank) for name in NAMES}, f"{folder}/{rank}.pt")
    end_rank()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(child, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], name: str) -> None:
    single = run(name, None)
    for rank in ranks:
        assert rank[name]["loss"] == pytest.approx(single["loss"], rel=1e-10)
        assert rank[name]["state"].keys() == single["state"].keys()
        for key, value in single["state"].items():
            torch.testing.assert_close(rank[name]["state"][key], value, equal_nan=True, msg=key)
            torch.testing.assert_close(
                rank[name]["state"][key],
                ranks[0][name]["state"][key],
                rtol=0,
                atol=0,
                equal_nan=True,
                msg=key,
            )
    # the ranks' average is the gradient: each rank's is twice its part
    for step, whole in enumerate(single["gradient"]):
        torch.testing.assert_close(
            torch.cat([rank[name]["gradient"][step] for rank in ranks], 1) / 2, whole
        )
