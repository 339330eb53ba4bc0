"""A few steps of every composition, framework × detector × action, as numbers: what any change of
the engine must leave as it is.

    python -m tests.reference.compositions record FILE          # losses, gradients, counts and state of all of them, in full
    python -m tests.reference.compositions compare FILE         # the same again, against the file
    python -m tests.reference.compositions digest               # writes compositions.json, which the tests go by

Dimension key: V views, B batch, N data set.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kinfolk.detectors import DETECTORS, IFND
from kinfolk.errors import KinfolkError
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.rcl import SupportFramework
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.pairs import ACTIONS
from tests.ranks import end_rank, spawn


def rounded(x: Tensor) -> Tensor:
    """To ten binary places: what processors draw from one seed differs in the last places of a
    number."""
    return (x * 1024).round() / 1024


DIGEST = Path(__file__).with_name("compositions.json")
NUM_SAMPLES, EPOCHS, STEPS, SIZES = 24, 3, 2, (7, 5)
LABELS = torch.where(torch.arange(NUM_SAMPLES) == 5, -1, torch.arange(NUM_SAMPLES) % 3)
FEATURES = rounded(torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(4)))
OF_DETECTOR: dict[str, dict[str, Any]] = {
    "glofnd": {"alpha": 0.15, "init": "quantile"},
    "glofnd, adam": {"alpha": 0.15, "rule": "adam", "lr": 0.3},
    "glofnd, shared": {"alpha": 0.15, "rule": "adam", "init": "quantile", "shared": True},
    "glofnd, late": {"alpha": 0.15, "init": "quantile", "start_epoch": 2, "update_from": 1},
    "fnc": {"top_k": 2},
    "fnc, above": {"min_similarity": 0.2},
    "fnc, all": {"min_similarity": -1.0},
    "cave": {"num_clusters": 3},
    "known": {"pairs": torch.tensor([[0, 2], [4, 8], [3, 5], [7, 9], [10, 23], [1, 6], [11, 12]])},
    "ifnd": {"num_clusters": (3, 5), "schedule": "constant", "final_rate": 0.8},
    "ring": {"lower": 0.3, "upper": 0.8},
    "ring, clusters": {"lower": 0.3, "upper": 0.8, "num_clusters": (3, 4)},
    "neighbours": {"num_clusters": 4, "num_clusterings": 2, "num_background": 9},
    "guide": {"features": FEATURES, "alpha": 0.15},
    "guide, soft": {"features": FEATURES, "temperature": 0.3},
    "hierarchy": {"levels": 3, "warmup_epochs": 1, "radii": [0.5, 0.9], "min_samples": 2},
}
OF_FRAMEWORK: dict[str, dict[str, Any]] = {
    "moco": {"queue_size": 17, "momentum": 0.5},
    "ir": {"num_negatives": 20, "bank_momentum": 0.0},
    "cmc": {"num_negatives": 20},
    "pcl": {
        "queue_size": 17,
        "momentum": 0.5,
        "num_clusters": (3, 5),
        "warmup_epochs": 1,
        "num_prototypes": 4,
    },
    "la": {"num_clusters": 5, "num_clusterings": 2, "num_background": 14, "warmup_epochs": 1},
    "nnclr": {"queue_size": 17, "momentum": 0.5},
    "rcl": {
        "queue_size": 17,
        "momentum": 0.5,
        "warmup_epochs": 1,
        "radii": [0.5, 0.9],
        "min_samples": 2,
        "num_keys": 2,
    },
    "spcl": {"num_clusters": (4,), "reinitialise": ()},
    "siglip": {"bias": -1.0},
}
OF_IMAGES = [name for name, kind in FRAMEWORKS.items() if "image" in kind.modalities]
"""All frameworks but `pairs`, which is the loss of `clip` on one encoder."""
DETECTED = {**{name: {} for name in DETECTORS}, **OF_DETECTOR}
RANKED = ("moco", "ir", "simclr", "sogclr", "clip", "fastclip", "rcl", "la")
"""Frameworks that are run on two ranks too, with every detector."""
GROUPS = torch.arange(NUM_SAMPLES) // 3
SET: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((f"simclr+fnc:{a}", {"prior": 0.1}, {}) for a in ACTIONS),
    *((f"simclr+fnc:{a}", {"hardness": 0.5}, {}) for a in ACTIONS),
    ("simclr+oracle:attract", {"prior": 0.2, "hardness": 1.0, "decoupled": True}, {}),
    *((f"{f}+fnc:{a}", {"decoupled": True}, {}) for f in ("simclr", "clip") for a in ACTIONS),
    *((f"simclr+{d}:eliminate", {"rescale_kept": True}, {}) for d in ("fnc", "oracle", "fnc, all")),
    *(
        (f"{f}+fnc:attract", {"own_weight": 0.3}, {})
        for f in ("simclr", "sogclr", "clip", "fastclip", "moco")
    ),
    ("simclr+guide, soft:attract", {"own_weight": 0.3}, {}),
    ("moco+teacher:attract", {"own_weight": 0.2}, {}),
    *(
        (f"{f}+fnc, all:eliminate", {"min_negatives": 3}, {})
        for f in ("simclr", "sogclr", "clip", "siglip", "moco")
    ),
    *(
        (f"{f}+oracle:reweight", {"kin_weight": 0.0}, {})
        for f in ("simclr", "sogclr", "clip", "siglip", "la")
    ),
    *(
        (f"{f}+fnc:eliminate", {"groups": True}, {})
        for f in ("simclr", "sogclr", "moco", "ir", "rcl")
    ),
    *(
        (f"simclr+{d}:attract", {"second_head": True}, {})
        for d in ("fnc", "components", "glofnd, adam", "guide")
    ),
    *(
        (f"{f}+{d}:attract", {"pool_kin": True}, {})
        for f in ("ir", "cmc")
        for d in ("oracle", "ring")
    ),
    ("clip+fnc:eliminate", {"learnable": False}, {}),
    *(
        (f"fastclip{d}", {"temperature_gradient": "exact"}, {})
        for d in ("", "+fnc:attract", "+oracle:reweight")
    ),
]
"""Compositions with further settings of the framework and of the detector."""


def with_settings(name: str, *settings: dict[str, Any]) -> str:
    """`composition | setting=value, …`."""
    return f"{name} | " + ", ".join(
        f"{k}={'…' if isinstance(v, Tensor) else v}" for each in settings for k, v in each.items()
    )


SETTINGS = {with_settings(*each): each for each in SET}


def names() -> list[str]:
    """`framework`, or `framework+detector[, how]:action`."""
    return [
        *OF_IMAGES,
        *(f"{f}+{d}:{a}" for f in OF_IMAGES for d in DETECTED for a in ACTIONS),
        *SETTINGS,
    ]


def kept() -> list[str]:
    """Those whose digests are kept: every framework alone and with GloFND, every detector and
    action on one, some on others, and all further settings."""
    chosen = {
        *OF_IMAGES,
        *(f"{f}+glofnd:eliminate" for f in OF_IMAGES),
        *(f"simclr+{d}:{a}" for d in DETECTED for a in ACTIONS),
    }
    chosen |= (
        {f"sogclr+{d}:reweight" for d in DETECTED}
        | {f"clip+{d}:eliminate" for d in DETECTED}
        | {f"la+{d}:attract" for d in DETECTED}
    )
    chosen |= {"moco+teacher:reweight", "mocov3+teacher:attract", *SETTINGS}
    return [name for name in names() if name in chosen]


def kept_on_ranks() -> list[str]:
    """Those whose digests of two ranks are kept too."""
    chosen = {
        *RANKED,
        *(f"{f}+glofnd:eliminate" for f in RANKED),
        *(f"simclr+{d}:attract" for d in DETECTED),
    }
    return [name for name in kept() if name in chosen]


def made(name: str, dtype: torch.dtype = torch.float64) -> Framework:
    """The composition on a small encoder; the same weights each time."""
    torch.manual_seed(0)
    name, more, detector_more = SETTINGS.get(name, (name, {}, {}))
    framework, _, rest = name.partition("+")
    detector, _, action = rest.partition(":")
    method = parse(framework if not rest else f"{framework}+{detector.partition(',')[0]}:{action}")
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU())
    text = nn.EmbeddingBag(30, 8), nn.Linear(8, 4)
    context = Context(
        NUM_SAMPLES, LABELS, text, second_head=nn.Linear(8, 5) if more.get("second_head") else None
    )
    arguments = {"temperature": 0.3, **OF_FRAMEWORK.get(framework, {}), **more}
    grouped = arguments.pop("groups", False)
    arguments.pop("second_head", None)
    if framework not in ("spcl",):
        arguments["block_rows"] = 6
    built = build(
        method,
        encoder,
        nn.Linear(8, 4),
        context,
        arguments,
        {**DETECTED.get(detector, {}), **detector_more},
    )
    if isinstance(built, SupportFramework):  # a norm over the batch would differ between ranks
        built.predictors = nn.ModuleList(nn.Linear(4, 4) for _ in built.predictors)
    built.set_eval_labels(LABELS)
    built.set_groups(GROUPS if grouped else None)
    built.to(dtype)
    with torch.no_grad():
        for value in (*built.parameters(), *built.buffers()):
            if value.is_floating_point():
                value.copy_(rounded(value))
    for part in built.modules():
        if isinstance(part, IFND):
            part.clusters.to(torch.float32)  # it clusters in single precision
    return built


def batch(step: int, views: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Views, ids and captions of one step of all ranks; one sample is there twice."""
    g = torch.Generator().manual_seed(step)
    number = sum(SIZES)
    images = (
        torch.randn(views, number, 3, 2, 2, dtype=torch.float64, generator=g)
        + torch.arange(number).view(1, -1, 1, 1, 1) / 9
    )
    ids = torch.randperm(NUM_SAMPLES, generator=g)[:number]
    if step == 2:
        ids[0] = ids[-1]
    texts = {
        "tokens": torch.randint(30, (number, 5), generator=g),
        "groups": torch.where(ids % 4 == 0, ids % 2, -1),
    }
    return rounded(images).to(dtype), ids, texts


def run(name: str, dtype: torch.dtype = torch.float64, rank: int | None = None) -> dict[str, Any]:
    """Losses, gradients and counts of every step, and the state they lead to. `rank`: of two, which
    share the batch."""
    framework = made(name, dtype)
    params = {key: p for key, p in framework.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    mine = slice(None) if rank is None else slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    everything = rounded(
        torch.randn(
            NUM_SAMPLES, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(99)
        )
    ).to(dtype)
    out: dict[str, Any] = {"loss": [], "gradient": [], "counts": []}
    for epoch in range(EPOCHS):
        framework.set_progress(epoch, EPOCHS)
        if framework.due(epoch):
            framework.eval()
            with torch.no_grad():
                features = (
                    framework.embed(everything)
                    if framework.space == "projected"
                    else framework.features(everything)
                )
            framework.train()
            framework.refresh(None if framework.collects else features, epoch / EPOCHS)
        for step in range(epoch * STEPS, epoch * STEPS + STEPS):
            torch.manual_seed(step)
            images, ids, texts = batch(step, framework.num_views, dtype)
            given = (
                {key: value[mine] for key, value in texts.items()}
                if "text" in framework.modalities
                else {}
            )
            optimizer.zero_grad()
            loss = framework(images[:, mine], ids[mine], **given)
            loss.backward()
            if rank is not None:  # as DDP does
                for p in params.values():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)
                    p.grad /= len(SIZES)
            out["loss"].append(loss.detach())
            out["gradient"].append(
                {key: p.grad.clone() for key, p in params.items() if p.grad is not None}
            )
            out["counts"].append(framework.stats.counts)
            optimizer.step()
            framework.after_step()
    out["state"] = {key: value.clone() for key, value in framework.state_dict().items()}
    return out


def attempt(
    name: str, dtype: torch.dtype = torch.float64, rank: int | None = None
) -> dict[str, Any]:
    """What `run` gives, or the sentence by which the composition is refused."""
    try:
        return run(name, dtype, rank)
    except (ValueError, AssertionError, KinfolkError) as error:
        return {"refused": str(error)}


def child(rank: int, folder: str, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(SIZES)
    )
    torch.save({name: attempt(name, rank=rank) for name in chosen}, f"{folder}/{rank}.pt")
    end_rank()


def record(chosen: Iterable[str]) -> dict[str, Any]:
    """All of them: in float64, in float32, and those of `RANKED` on two ranks."""
    chosen = list(chosen)
    out: dict[str, Any] = {}
    for name in chosen:
        out[name] = attempt(name)
        out[f"{name} (float32)"] = attempt(name, torch.float32)
    several = [
        name for name in chosen if name.partition("+")[0] in RANKED and "refused" not in out[name]
    ]
    return out | on_ranks(several)


def on_ranks(chosen: list[str]) -> dict[str, Any]:
    """What `attempt` gives on each of two ranks."""
    out: dict[str, Any] = {}
    if chosen:
        with tempfile.TemporaryDirectory() as folder:
            spawn(child, (folder, chosen), nprocs=len(SIZES))
            for rank in range(len(SIZES)):
                found = torch.load(f"{folder}/{rank}.pt")
                out |= {f"{name} (rank {rank})": value for name, value in found.items()}
    return out


def differences(old: Any, new: Any, rtol: float, where: str = "") -> list[str]:
    """Where two records differ by more than rounding, and by how much."""
    if isinstance(old, dict):
        if not isinstance(new, dict) or old.keys() != new.keys():
            return [f"{where}: keys {sorted(set(old) ^ set(new))}"]
        return [
            line for key in old for line in differences(old[key], new[key], rtol, f"{where}.{key}")
        ]
    if isinstance(old, list):
        return [
            line
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for line in differences(a, b, rtol, f"{where}[{i}]")
        ]
    if not isinstance(old, Tensor):
        return [] if old == new else [f"{where}: {old!r} is now {new!r}"]
    if old.shape != new.shape:
        return [f"{where}: shape {tuple(old.shape)} is now {tuple(new.shape)}"]
    a, b = old.double(), new.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    bound = rtol * (1 + a.abs().nan_to_num(0, 0, 0).amax() if a.numel() else 1)
    worst = float(apart.max()) if apart.numel() else 0.0
    return [] if worst <= bound else [f"{where}: by {worst:.3g}"]


def digest(found: dict[str, Any]) -> list[float]:
    """Four numbers that change where anything does: losses, gradients and state projected on a
    fixed direction, and the counts."""
    if "refused" in found:
        return []
    losses = {str(i): loss for i, loss in enumerate(found["loss"])}
    gradients = {
        f"{i}.{name}": value
        for i, each in enumerate(found["gradient"])
        for name, value in each.items()
    }
    counts = float(sum(counts.double()[:5].sum() for counts in found["counts"]))
    return [_projected(losses), _projected(gradients), counts, _projected(found["state"])]


def _projected(tensors: dict[str, Tensor]) -> float:
    total = 0.0
    for name, value in sorted(tensors.items()):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        direction = torch.rand(
            value.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        finite = value.detach().double().flatten().nan_to_num(0, 7, -7)
        # seeds are large
        scale = (
            1.0
            if value.is_floating_point() or not finite.numel()
            else max(1.0, float(finite.abs().max()))
        )
        total += float((finite * direction).sum()) / scale
    return total


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    command, *rest = sys.argv[1:]
    if command == "digest":
        found = {name: attempt(name) for name in kept()} | on_ranks(kept_on_ranks())
        lines = [
            f"{json.dumps(name)}: {json.dumps([float(f'{x:.15g}') for x in digest(value)])}"
            for name, value in found.items()
        ]
        DIGEST.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return
    chosen = [name for name in names() if all(part in name for part in rest[1:])]
    found = record(chosen)
    if command == "record":
        torch.save(found, rest[0])
        return
    old = torch.load(rest[0])
    apart = 0
    for name, value in found.items():
        lines = differences(old[name], value, 1e-4 if "float32" in name else 1e-12)
        apart += bool(lines)
        if lines:
            _say(f"{name}: {len(lines)} differ; {'; '.join(lines[:4])}")
    _say(f"{len(found)} records, {apart} differ")


if __name__ == "__main__":
    main()
