"""Several gloo processes with unequal, asymmetric batches equal one process on the joined batch:
loss, gradient of towers and temperature, state, counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk.detectors import FNC, Detector, GloFND, Guide, Oracle
from kinfolk.objectives import BimodalLoss, BimodalSogCLRLoss, CLIPLoss, FastCLIPLoss, SigLIPLoss
from tests.cover import cover
from tests.ranks import end_rank, spawn

NUM_SAMPLES, SIZES = 40, (5, 3, 7)
LABELS = torch.arange(NUM_SAMPLES) % 4
GROUPS = torch.where(torch.arange(NUM_SAMPLES) % 3 == 0, -1, torch.arange(NUM_SAMPLES) % 5)


def objective(name: str) -> BimodalLoss[Any]:
    loss, _, detection = name.partition("/")
    detectors: dict[str, Detector | None] = {
        "plain": None,
        "groups": None,
        "outside": None,
        "fnc": FNC(top_k=2),
        "everybody": FNC(min_similarity=-1.0),  # but the one that is spared
        "oracle": Oracle(LABELS),
        "guide": Guide(temperature=0.3),
        "glofnd": GloFND(num_samples=NUM_SAMPLES, alpha=0.2, init="quantile"),
    }
    detector = detectors[detection]
    action: Any = {"oracle": "attract", "guide": "reweight"}.get(detection, "eliminate")
    if loss == "clip":
        made: BimodalLoss[Any] = CLIPLoss(
            temperature=0.3, detector=detector, action=action, block_rows=4
        )
    elif loss == "siglip":
        made = SigLIPLoss(
            temperature=0.3, bias=-2.0, detector=detector, action=action, block_rows=4
        )  # type: ignore[assignment]
    elif loss == "sogclr":
        made = BimodalSogCLRLoss(
            num_samples=NUM_SAMPLES,
            temperature=0.3,
            gamma=0.9,
            decay_epochs=None,
            detector=detector,
            action=action,
            block_rows=4,
        )
    else:
        made = FastCLIPLoss(
            num_samples=NUM_SAMPLES,
            temperature=0.3,
            rho=1.0,
            gamma=0.6,
            decay_epochs=None,
            detector=detector,
            action=action,
            block_rows=4,
        )
    made.set_eval_labels(LABELS)
    return made.double()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 4).double(), nn.Linear(3, 4).double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(images), self.text(texts)


class Whole(nn.Module):
    """Towers and loss in one module, so that DDP sees the temperature and the per-sample buffers
    too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.towers, self.objective, self.grouped = (
            Towers(),
            objective(name),
            name.endswith("groups"),
        )

    def forward(self, images: Tensor, texts: Tensor, ids: Tensor) -> Tensor:
        loss: Tensor = self.objective(
            *self.towers(images, texts), ids, GROUPS[ids] if self.grouped else None
        )
        return loss


Batch = tuple[Tensor, Tensor, Tensor]


def parts(step: int, world: int) -> list[Batch]:
    """Images, texts and ids of every rank. In the second step, sample 3 is on all ranks at once."""
    g, sizes = torch.Generator().manual_seed(step), list(SIZES[:world])
    images = [
        torch.randn(size, 6, dtype=torch.float64, generator=g) * (rank + 1) + rank
        for rank, size in enumerate(sizes)
    ]
    texts = [
        torch.randn(size, 3, dtype=torch.float64, generator=g) - rank
        for rank, size in enumerate(sizes)
    ]
    ids = list(torch.split(torch.randperm(NUM_SAMPLES, generator=g)[: sum(sizes)], sizes))
    if step == 1:
        for mine in ids:
            mine[0] = 3
    return list(zip(images, texts, ids, strict=True))


def two_steps(module: nn.Module, whole: Whole, batches: list[Batch]) -> dict[str, Any]:
    out: dict[str, Any] = {"loss": [], "gradient": []}
    for data in batches:
        whole.zero_grad()
        loss = module(*data)
        loss.backward()
        out["loss"].append(loss.item())
        out["gradient"].append([p.grad.clone() for p in whole.parameters() if p.grad is not None])
    out["state"] = {name: value.clone() for name, value in whole.objective.state_dict().items()}
    out["counts"] = whole.objective.stats.counts
    return out


def wrapped(name: str, whole: Whole) -> nn.Module:
    """In DDP with all it has, or with the towers alone."""
    if not name.endswith("outside"):
        return DistributedDataParallel(whole)
    towers = whole.towers
    whole.towers = DistributedDataParallel(towers)  # type: ignore[assignment]
    return whole


def child(rank: int, world: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    results = {}
    for name in names:
        whole = Whole(name)
        results[name] = two_steps(
            wrapped(name, whole), whole, [parts(step, world)[rank] for step in range(2)]
        )
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


LOSSES = ("clip", "sogclr", "fastclip", "siglip")
NAMES = [
    f"{loss}/{detector}"
    for loss in LOSSES
    for detector in ("plain", "groups", "fnc", "oracle", "glofnd")
]
NAMES += [
    "clip/guide",
    "siglip/guide",
    "siglip/outside",
    "clip/everybody",
    "clip/outside",
    "fastclip/outside",
]


# on two ranks every loss and every detector, on three ranks all of them
FEW = cover(NAMES, lambda name: name.split("/"))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    names = FEW if request.param == 2 else NAMES
    spawn(child, (request.param, str(folder), names), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


def test_ranks_together_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    assert list(ranks[0]) == (FEW if len(ranks) == 2 else NAMES)
    for name in ranks[0]:
        whole, world = Whole(name), len(ranks)
        joined = [
            tuple(torch.cat(column) for column in zip(*parts(step, world), strict=True))
            for step in range(2)
        ]
        single = two_steps(whole, whole, joined)  # type: ignore[arg-type]
        for rank in ranks:
            assert rank[name]["loss"] == pytest.approx(single["loss"], rel=1e-10)
            torch.testing.assert_close(rank[name]["gradient"], single["gradient"])
            assert rank[name]["state"].keys() == single["state"].keys()
            for key, value in single["state"].items():
                torch.testing.assert_close(rank[name]["state"][key], value, msg=key)
                assert torch.equal(rank[name]["state"][key], ranks[0][name]["state"][key]), key
        assert torch.equal(sum(rank[name]["counts"] for rank in ranks), single["counts"])
