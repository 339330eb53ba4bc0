"""Several gloo processes with unequal, asymmetric batches equal one process on the joined batch:
loss, encoder gradient, state."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk import distributed
from kinfolk.detectors import FNC, Detector, GloFND, Oracle, Union
from kinfolk.objectives import NTXentLoss, Objective, SogCLRLoss
from kinfolk.pairs import two_views
from tests.ranks import end_rank, spawn

NUM_SAMPLES, SIZES = 40, (5, 3, 7)
LABELS = torch.arange(NUM_SAMPLES) % 4


def objective(name: str) -> Objective:
    detectors: dict[str, Detector | None] = {
        "plain": None,
        "groups": None,
        "fnc": FNC(top_k=2),
        "local": FNC(top_k=2),
        "all": FNC(min_similarity=-1.0),
        "oracle": Oracle(LABELS),
        "glofnd": GloFND(num_samples=NUM_SAMPLES, alpha=0.2, init="quantile"),
        "shared": GloFND(num_samples=NUM_SAMPLES, alpha=0.2, rule="adam", lr=0.3, shared=True),
        "union": Union(
            GloFND(num_samples=NUM_SAMPLES, alpha=0.2, init="quantile"), Oracle(LABELS % 2)
        ),
    }
    detector, action = (
        detectors[name.partition("/")[2]],
        "attract" if "oracle" in name else "eliminate",
    )
    shared: dict[str, Any] = {
        "temperature": 0.3,
        "detector": detector,
        "action": action,
        "block_rows": 4,
    }
    shared |= {
        "min_negatives": 3 if name.endswith("all") else 1,
        "gather": False if name.endswith("local") else None,
    }
    made: Objective = (
        NTXentLoss(**shared)
        if name.startswith("ntxent")
        else SogCLRLoss(num_samples=NUM_SAMPLES, **shared)
    )
    made.set_eval_labels(LABELS)
    return made.double()


class Whole(nn.Module):
    """Encoder and loss in one module, so that DDP sees the per-sample buffers too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 4).double()
        self.objective, self.grouped = objective(name), name.endswith("groups")

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        pairs = two_views(self.encoder(views[0]), self.encoder(views[1]), ids)
        if self.grouped:  # known positives, over ranks too
            pairs = replace(pairs, groups=ids % 5, candidate_groups=ids.repeat_interleave(2) % 5)
        return self.objective.on(pairs)


def parts(step: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Views and ids of every rank. In the second step, sample 3 is on all ranks at once."""
    g = torch.Generator().manual_seed(step)
    views = [
        torch.randn(2, size, 6, dtype=torch.float64, generator=g) * (rank + 1) + rank
        for rank, size in enumerate(SIZES[:world])
    ]
    order = torch.randperm(NUM_SAMPLES, generator=g)
    ids = list(torch.split(order[: sum(SIZES[:world])], list(SIZES[:world])))
    if step == 1:
        for mine in ids:
            mine[0] = 3
    return list(zip(views, ids, strict=True))


def distinct(step: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """The same without a sample on several ranks."""
    together = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(step + 7))
    starts = [sum(SIZES[:rank]) for rank in range(world)]
    return [
        (views, together[start : start + len(ids)])
        for start, (views, ids) in zip(starts, parts(step, world), strict=True)
    ]


def two_steps(
    module: nn.Module, whole: Whole, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    out: dict[str, Any] = {"loss": [], "gradient": []}
    for views, ids in batches:
        whole.zero_grad()
        loss = module(views, ids)
        loss.backward()
        out["loss"].append(loss.item())
        out["gradient"].append(
            [p.grad.clone() for p in whole.encoder.parameters() if p.grad is not None]
        )
    out["state"] = {name: value.clone() for name, value in whole.objective.state_dict().items()}
    out["counts"] = whole.objective.stats.counts
    return out


def child(rank: int, world: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    results = {}
    for name in names:
        whole = Whole(name)
        results[name] = two_steps(
            DistributedDataParallel(whole), whole, [parts(step, world)[rank] for step in range(2)]
        )
    for name in LOCAL:
        whole = Whole(name)
        results[name] = two_steps(
            DistributedDataParallel(whole),
            whole,
            [distinct(step, world)[rank] for step in range(2)],
        )
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


NAMES = [
    f"{base}/{detector}"
    for base in ("ntxent", "sogclr")
    for detector in ("plain", "groups", "fnc", "all", "oracle", "glofnd", "shared", "union")
]
LOCAL = ["ntxent/local", "sogclr/local"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, world = tmp_path_factory.mktemp("ranks"), len(SIZES)
    spawn(child, (world, str(folder), NAMES), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def test_ranks_together_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in NAMES:
        whole, world = Whole(name), len(ranks)
        joined = [
            (torch.cat([v for v, _ in batch], 1), torch.cat([i for _, i in batch]))
            for batch in (parts(step, world) for step in range(2))
        ]
        single = two_steps(whole, whole, joined)
        for rank in ranks:
            assert rank[name]["loss"] == pytest.approx(single["loss"], rel=1e-10)
            torch.testing.assert_close(rank[name]["gradient"], single["gradient"])
            assert rank[name]["state"].keys() == single["state"].keys()
            for key, value in single["state"].items():
                torch.testing.assert_close(rank[name]["state"][key], value, msg=key)
                assert torch.equal(rank[name]["state"][key], ranks[0][name]["state"][key]), key
        assert torch.equal(sum(rank[name]["counts"] for rank in ranks), single["counts"])


@pytest.mark.parametrize("name", LOCAL)
def test_without_gathering_each_rank_has_its_own_loss_and_all_have_one_state(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """The gradient is the mean of the ranks', and each sample has the state of the rank that had
    it."""
    world = len(ranks)
    whole, alone = Whole(name), [Whole(name) for _ in range(world)]
    for step in range(2):
        expected = dict(whole.objective.state_dict())
        gradients = []
        for mine, rank, (views, ids) in zip(alone, ranks, distinct(step, world), strict=True):
            mine.load_state_dict(whole.state_dict())
            found = two_steps(mine, mine, [(views, ids)])
            assert rank[name]["loss"][step] == pytest.approx(found["loss"][0], rel=1e-10)
            gradients.append(found["gradient"][0])
            for key, value in expected.items():
                value[ids] = found["state"][key][ids]
        for rank in ranks:
            means = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
            torch.testing.assert_close(rank[name]["gradient"][step], means)
        whole.objective.load_state_dict(expected)
    for rank in ranks:
        torch.testing.assert_close(rank[name]["state"], dict(whole.objective.state_dict()))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, 2), ({"LOCAL_WORLD_SIZE": "4"}, 4), ({"TORCHELASTIC_RUN_ID": "7"}, 6)],
)
def test_work_of_one_rank_has_the_threads_of_those_that_wait(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the machine's ranks; all cores where torchrun has set one thread by itself."""
    used: list[int] = []
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"OMP_NUM_THREADS": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    with distributed.threads_of_waiting_ranks():
        assert used == [expected]
    assert used == [expected, 1]
