"""Small trainings of every framework, with the detectors that communicate or cluster, for the tests
on the pretended device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.detectors import DETECTORS
from kinfolk.frameworks import Framework
from kinfolk.frameworks.registry import Context, build, parse

NUM_SAMPLES, BATCH, EPOCHS = 40, 6, 4
LABELS = torch.arange(NUM_SAMPLES) % 4
GLOFND: dict[str, Any] = {"alpha": 0.2, "init": "quantile"}
QUEUE: dict[str, Any] = {"queue_size": 20, "momentum": 0.5}
RADII: dict[str, Any] = {"warmup_epochs": 0, "radii": [0.5, 0.9], "min_samples": 2}
ESTIMATE: dict[str, Any] = {"prior": 0.1, "hardness": 0.5}
FEATURES = torch.eye(8)[torch.arange(NUM_SAMPLES) % 8]
PAIRS = torch.stack((torch.arange(NUM_SAMPLES), (torch.arange(NUM_SAMPLES) + 7) % NUM_SAMPLES), 1)
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "simclr": ("simclr", {}, {}),
    "simclr+oracle": ("simclr+oracle:attract", {}, {}),
    "simclr+fnc": ("simclr+fnc", {}, {"top_k": 2}),
    "simclr+positive_margin": ("simclr+positive_margin", {}, {"margin": 0.3}),
    "simclr+glofnd": ("simclr+glofnd", {}, GLOFND),
    "simclr+ifnd": ("simclr+ifnd", {}, {"num_clusters": (3, 5), "schedule": "constant"}),
    "simclr+ifnd, bank": (
        "simclr+ifnd",
        {},
        {"num_clusters": (3, 5), "schedule": "constant", "source": "bank"},
    ),
    "simclr+ring": ("simclr+ring", {}, {}),
    "simclr+cave": ("simclr+cave", {}, {"num_clusters": 3}),
    "simclr+neighbours": (
        "simclr+neighbours",
        {},
        {"num_clusters": 4, "num_clusterings": 2, "num_background": 9},
    ),
    "simclr+hierarchy": ("simclr+hierarchy", {}, RADII),
    "simclr+hierarchy, fitted": (
        "simclr+hierarchy:reweight",
        {},
        {"warmup_epochs": 0, "min_samples": 2},
    ),
    "simclr+components": ("simclr+components", {}, {}),
    "simclr+guide": (
        "simclr+guide",
        {},
        {
            "features": torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(2)),
            "alpha": 0.2,
        },
    ),
    "moco+teacher": ("moco+teacher", QUEUE, {}),
    "sogclr": ("sogclr", {}, {}),
    "sogclr+glofnd": ("sogclr+glofnd", {}, GLOFND),
    "moco": ("moco", QUEUE, {}),
    "moco+glofnd": ("moco+glofnd", QUEUE, GLOFND),
    "moco, symmetric": ("moco", {**QUEUE, "symmetric": True}, {}),
    "mocov3+glofnd": ("mocov3+glofnd", {"momentum": 0.5}, GLOFND),
    "nnclr": ("nnclr", QUEUE, {}),
    "rcl": ("rcl", {**QUEUE, "warmup_epochs": 0, "radii": [0.5, 0.9], "num_keys": 2}, {}),
    "rcl, k-means": ("rcl", {**QUEUE, "warmup_epochs": 0, "hierarchy": "kmeans"}, {}),
    "rcl, dbscan": (
        "rcl",
        {**QUEUE, "warmup_epochs": 0, "hierarchy": "dbscan", "radii": [0.5, 0.9]},
        {},
    ),
    "ir+glofnd": ("ir+glofnd", {"num_negatives": 15}, GLOFND),
    "cmc": ("cmc", {"num_negatives": 15}, {}),
    "la": (
        "la",
        {"num_clusters": 5, "num_clusterings": 2, "num_background": 20, "warmup_epochs": 0},
        {},
    ),
    "pcl": ("pcl", {**QUEUE, "num_clusters": (3, 5), "warmup_epochs": 0}, {}),
    "pcl, drawn": (
        "pcl",
        {"queue_size": 0, "num_clusters": (3, 9), "warmup_epochs": 0, "num_prototypes": 4},
        {},
    ),
    "spcl": ("spcl", {"num_clusters": (3, 5)}, {}),
    "clip+glofnd": ("clip+glofnd", {}, GLOFND),
    "sogclr-clip+glofnd": ("sogclr-clip+glofnd", {}, GLOFND),
    "siglip": ("siglip", {}, {}),
    "fastclip": ("fastclip", {}, {}),
    "siglip+glofnd": ("siglip+glofnd", {}, GLOFND),
    "simclr, prior": ("simclr", ESTIMATE, {}),
    "ir, prior": ("ir", {**ESTIMATE, "num_negatives": 15}, {}),
    "clip, prior": ("clip", ESTIMATE, {}),
    "moco+guide, soft": ("moco+guide:attract", QUEUE, {"features": FEATURES, "temperature": 0.2}),
    "clip+guide": ("clip+guide:reweight", {}, {"alpha": 0.2}),
    "simclr+teacher": ("simclr+teacher", {}, {}),
    "simclr+known": (
        "simclr+known:attract",
        {},
        {"pairs": PAIRS},
    ),
    "pairs+glofnd": ("pairs+glofnd", {}, GLOFND),
}
_listed = {parse(method).detector for method, *_ in METHODS.values()}
METHODS |= {
    f"simclr+{name}": (f"simclr+{name}", {}, {}) for name in DETECTORS if name not in _listed
}


def made(name: str) -> Framework:
    torch.manual_seed(0)
    method, framework_args, detector_args = METHODS[name]
    encoder, text = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU()),
        (nn.Linear(6, 8), nn.Linear(8, 4)),
    )
    framework = build(
        parse(method),
        encoder,
        nn.Linear(8, 4),
        Context(NUM_SAMPLES, LABELS, text),
        framework_args,
        detector_args,
    )
    framework.set_eval_labels(LABELS)
    framework.set_progress(0, EPOCHS)
    return framework


def features(framework: Framework) -> Tensor | None:
    """(N, F) what a refresh receives: on the host, as an embedding pass returns it."""
    if framework.collects:
        return None
    size = 8 if framework.space == "features" else 4
    return torch.nn.functional.normalize(
        torch.randn(NUM_SAMPLES, size, generator=torch.Generator().manual_seed(1)), dim=1
    )


def batch(framework: Framework, step: int, rank: int = 0, size: int = BATCH) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    made = {
        "views": torch.randn(framework.num_views, size, 3, 2, 2, generator=g),
        "ids": torch.randperm(NUM_SAMPLES, generator=g)[:size],
    }
    if "text" in framework.modalities:
        made["tokens"], made["groups"] = torch.randn(size, 6, generator=g), torch.arange(size) // 2
    if "image" not in framework.modalities:  # one encoder for both sides, and a negative
        made["tokens"] = torch.randn(size, 2, 3, 2, 2, generator=g)
        made["negative_ids"] = torch.randperm(NUM_SAMPLES, generator=g)[:size].unsqueeze(1)
    return made
