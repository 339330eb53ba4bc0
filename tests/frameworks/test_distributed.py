"""Queue and bank over several gloo processes with unequal, asymmetric batches: all equal to one
process on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk.frameworks import LA, Framework, MoCoV3
from kinfolk.frameworks.rcl import SupportFramework
from kinfolk.frameworks.registry import Context, build, parse
from tests.ranks import end_rank, spawn

NUM_SAMPLES, SIZES, STEPS = 40, (5, 3, 7), 3
LABELS = torch.arange(NUM_SAMPLES) % 4
GUIDE = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(7))
ARGUMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "moco": ("moco", {"queue_size": 11, "momentum": 0.5}, {}),
    "moco, tiny queue": ("moco", {"queue_size": 4, "momentum": 0.5}, {}),
    "moco, symmetric": ("moco", {"queue_size": 35, "momentum": 0.5, "symmetric": True}, {}),
    "moco+glofnd": (
        "moco+glofnd",
        {"queue_size": 20, "momentum": 0.5},
        {"alpha": 0.2, "init": "quantile"},
    ),
    "moco+fnc": ("moco+fnc:attract", {"queue_size": 20, "momentum": 0.5}, {"alpha": 0.2}),
    "ir": ("ir", {"num_negatives": 25}, {}),
    "ir, whole bank": ("ir", {"num_negatives": None, "bank_momentum": 0.0}, {}),
    "ir+oracle": ("ir+oracle:reweight", {"num_negatives": None}, {}),
    "ir+glofnd": ("ir+glofnd", {"num_negatives": 25}, {"alpha": 0.2, "init": "quantile"}),
    "cmc": ("cmc", {"num_negatives": 25}, {}),
    "cmc+glofnd": ("cmc+glofnd", {"num_negatives": None}, {"alpha": 0.2, "init": "quantile"}),
    "la": (
        "la",
        {"num_clusters": 5, "num_clusterings": 2, "num_background": 20, "warmup_epochs": 0},
        {},
    ),
    "mocov3": ("mocov3", {"momentum": 0.5}, {}),
    "mocov3+fnc": ("mocov3+fnc:attract", {"momentum": 0.5}, {"alpha": 0.2}),
    "mocov3+glofnd": ("mocov3+glofnd", {"momentum": 0.5}, {"alpha": 0.2, "init": "quantile"}),
    "simclr, debiased": ("simclr", {"prior": 0.1, "hardness": 0.5}, {}),
    "simclr+guide": (
        "simclr+guide:attract",
        {"own_weight": 0.4},
        {"features": GUIDE, "temperature": 0.3},
    ),
    "sogclr+guide": ("sogclr+guide", {}, {"features": GUIDE, "alpha": 0.2}),
    "simclr+teacher": ("simclr+teacher", {}, {"momentum": 0.5}),
    "simclr+components": ("simclr+components", {}, {}),
    "moco+teacher": ("moco+teacher", {"queue_size": 20, "momentum": 0.5}, {}),
    "mocov3+teacher": ("mocov3+teacher", {"momentum": 0.5}, {}),
    "nnclr": ("nnclr", {"queue_size": 20, "momentum": 0.5}, {}),
    "rcl": (
        "rcl",
        {"queue_size": 35, "momentum": 0.5, "warmup_epochs": 0, "radii": [0.5, 0.9], "num_keys": 2},
        {},
    ),
    "rcl, k-means": (
        "rcl",
        {"queue_size": 20, "momentum": 0.5, "warmup_epochs": 0, "hierarchy": "kmeans"},
        {},
    ),
    "rcl+glofnd": (
        "rcl+glofnd",
        {"queue_size": 20, "momentum": 0.5, "shared_predictor": True},
        {"alpha": 0.2, "init": "quantile"},
    ),
}


def made(name: str) -> Framework:
    torch.manual_seed(0)
    method, framework_args, detector_args = ARGUMENTS[name]
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU())
    framework = build(
        parse(method),
        encoder,
        nn.Linear(8, 4),
        Context(NUM_SAMPLES, LABELS),
        {"block_rows": 4, **framework_args},
        detector_args,
    )
    if isinstance(framework, SupportFramework):  # a norm over the batch would differ between ranks
        framework.predictors = nn.ModuleList(nn.Linear(4, 4) for _ in framework.predictors)
    if isinstance(framework, MoCoV3):
        framework.predictor = nn.Sequential(nn.Linear(4, 4))
    framework.set_eval_labels(LABELS)
    return framework.double()


def parts(step: int, world: int, views: int) -> list[tuple[Tensor, Tensor]]:
    """Views and ids of every rank. In the second step, sample 3 is on all ranks at once."""
    g = torch.Generator().manual_seed(step)
    made = [
        torch.randn(views, n, 3, 2, 2, dtype=torch.float64, generator=g) * (r + 1) + r
        for r, n in enumerate(SIZES[:world])
    ]
    ids = list(
        torch.split(
            torch.randperm(NUM_SAMPLES, generator=g)[: sum(SIZES[:world])], list(SIZES[:world])
        )
    )
    if step == 1:
        for mine in ids:
            mine[0] = 3
    return list(zip(made, ids, strict=True))


def trained(
    module: nn.Module, framework: Framework, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """A few steps of everything; the state holds the momentum copy, the queue, its ids and pointer,
    the bank, the thresholds."""
    params = [p for p in framework.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    out: dict[str, Any] = {"loss": [], "gradient": []}
    if framework.due(0):
        others = torch.randn(
            NUM_SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
        )
        framework.refresh(framework.bank.features if isinstance(framework, LA) else others, 0.0)
    for views, ids in batches:
        optimizer.zero_grad()
        loss = module(views, ids)
        loss.backward()
        out["loss"].append(loss.item())
        out["gradient"].append([p.grad.clone() for p in params if p.grad is not None])
        optimizer.step()
        framework.after_step()
    out["state"] = {name: value.clone() for name, value in framework.state_dict().items()}
    out["counts"] = framework.stats.counts
    return out


def child(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    results = {}
    for name in ARGUMENTS:
        framework = made(name)
        batches = [parts(step, world, framework.num_views)[rank] for step in range(STEPS)]
        results[name] = trained(
            DistributedDataParallel(framework, broadcast_buffers=False), framework, batches
        )
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


def test_ranks_together_equal_one_process(tmp_path: Path) -> None:
    world = len(SIZES)
    spawn(child, (world, str(tmp_path)), nprocs=world)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for name in ARGUMENTS:
        framework = made(name)
        steps = [parts(step, world, framework.num_views) for step in range(STEPS)]
        joined = [
            (torch.cat([views for views, _ in step], 1), torch.cat([ids for _, ids in step]))
            for step in steps
        ]
        single = trained(framework, framework, joined)
        for rank in ranks:
            assert rank[name]["loss"] == pytest.approx(single["loss"], rel=1e-10)
            torch.testing.assert_close(rank[name]["gradient"], single["gradient"])
            assert rank[name]["state"].keys() == single["state"].keys()
            for key, value in single["state"].items():
                torch.testing.assert_close(rank[name]["state"][key], value, msg=key)
                assert torch.equal(rank[name]["state"][key], ranks[0][name]["state"][key]), key
        assert torch.equal(sum(rank[name]["counts"] for rank in ranks), single["counts"])
