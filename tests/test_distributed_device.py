"""Two ranks on the pretended device with collectives that refuse CPU tensors, as NCCL does: every
framework trains, and to the same values.

The same processes count the collectives of a step where batches are equal. Two ranks whose sums
differ, as those of two kinds of processors do, have one hierarchy again when an epoch begins. A
signal to one of them stops both after the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.detectors import Hierarchy
from kinfolk.frameworks import Framework
from tests.collectives import CollectiveLog, collectives
from tests.pretended.device import AVAILABLE, on_device, pretended
from tests.pretended.methods import EPOCHS, METHODS, batch, features, made
from tests.ranks import end_rank, spawn

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")
NETWORKS = (
    "encoder",
    "head",
    "text_encoder",
    "text_head",
    "slow",
    "predictor",
    "predictors",
    "metric",
    "prototype",
)
"""What DistributedDataParallel would keep equal, which is not here."""
SCALE = Path(__file__).parents[1] / "docs" / "scale.md"
TABLE = (
    SCALE.read_text(encoding="utf-8").partition("| method | collectives |")[2].partition("\n\n")[0]
)
MOST = {
    "simclr": 3,
    "sogclr": 4,
    "sogclr+glofnd": 4,
    "moco": 2,
    "moco+glofnd": 3,
    "mocov3+glofnd": 6,
    "ir+glofnd": 3,
    "cmc": 4,
    "la": 2,
    "pcl": 3,
}
MOST |= {
    "simclr+hierarchy": 4,
    "rcl": 3,
    "nnclr": 2,
    "rcl, k-means": 3,
    "spcl": 8,
    "clip+glofnd": 9,
    "sogclr-clip+glofnd": 8,
    "fastclip": 9,
}
"""The collectives of a step with its backward pass, where all batches are equal."""


def trained(framework: Framework, rank: int, log: CollectiveLog) -> dict[str, Any]:
    """A refresh, a step of unequal batches, one of equal ones whose collectives are counted, and
    the end of the training."""
    if framework.due(0):
        framework.refresh(features(framework), 0.5)
    losses = []
    for step, (sizes, equal) in enumerate((((6, 4), False), ((5, 5), True))):
        given = {
            key: on_device(value)
            for key, value in batch(framework, step, rank, sizes[rank]).items()
        }
        torch.manual_seed(step)
        log.reset()
        with distributed.equal_batches(equal):
            loss = framework(**given)
            loss.backward()
        framework.after_step()
        losses.append(loss.detach().held.item())
    number = log.total
    if any(detector.refreshed_at_end for detector in framework.detectors):
        framework.finish(features(framework))
    framework.set_progress(1, EPOCHS)
    state = {
        key: getattr(value, "held", value).clone() for key, value in framework.state_dict().items()
    }
    return {"losses": losses, "collectives": number, "state": state}


def child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name in METHODS:
        with pretended(), collectives(device_only=True) as log:
            try:
                results[name] = trained(made(name).to("cuda"), rank, log)
            except RuntimeError as error:  # a refusal, on both ranks alike
                results[name] = {"error": str(error)}
    results["drifting"] = drifting(rank)
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


def drifting(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The labels of a hierarchy whose sums differ between ranks before every update, and its state
    at the beginning of the next epoch."""
    g, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(rank)
    with pretended(), collectives(device_only=True):
        detector = Hierarchy(num_samples=60, radii=(0.3, 0.6)).to("cuda")
        detector.refresh(torch.nn.functional.normalize(torch.randn(60, 3, generator=g), dim=1), 0.0)
        for _ in range(12):
            detector.collect(
                on_device(torch.randperm(60, generator=g)[:20]),
                on_device(torch.randn(20, 3, generator=g)),
            )
            detector.clusters.settle()
            detector.clusters.tree.sums += 0.05 * torch.randn(
                detector.clusters.tree.sums.shape, generator=noise
            )
        before: Any = detector.clusters.labels
        detector.set_progress(1, 2)
        after: Any = detector.clusters.labels
        return before.held, {"looked up": after.held, **detector.state_dict()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(child, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_nothing_but_device_tensors_is_communicated(ranks: list[dict[str, Any]]) -> None:
    for name in METHODS:
        first, second = (rank[name] for rank in ranks)
        assert "error" not in first, first["error"]
        assert first["losses"][0] == pytest.approx(second["losses"][0], rel=1e-5), (
            "both have the loss of the joined batch"
        )
        for key, value in first["state"].items():
            if key.partition(".")[0] not in NETWORKS:
                torch.testing.assert_close(value, second["state"][key], equal_nan=True, msg=key)


def test_every_rank_makes_the_expected_collectives_in_a_step(ranks: list[dict[str, Any]]) -> None:
    for name in MOST:
        for rank in ranks:
            assert rank[name]["collectives"] == MOST[name]


def test_the_documentation_has_the_number_of_collectives() -> None:
    for name in MOST.keys() - {"simclr+hierarchy"}:
        shown = f"`{name}`" if "," not in name else "`rcl` with k-means"
        rows = [row for row in TABLE.splitlines() if f" {shown}" in row]
        assert [int(row.split("|")[2]) for row in rows] == [MOST[name]], name


def test_an_epoch_begins_with_one_hierarchy_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    (first, state), (second, other) = (rank["drifting"] for rank in ranks)
    assert not torch.equal(first, second), "the noise must be large enough to matter"
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in state.items())
    assert torch.equal(state["looked up"], first), "rank zero goes on as it was"
