"""The losses and detectors that several tests go through, for `N` samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kinfolk.detectors import DETECTORS as REGISTERED
from kinfolk.detectors import (
    FNC,
    IFND,
    Cave,
    Components,
    Detector,
    GloFND,
    Guide,
    Hierarchy,
    Known,
    Neighbours,
    Oracle,
    PositiveMargin,
    Ring,
    StartAt,
    Teacher,
    Union,
)
from kinfolk.frameworks.registry import Context, build_detector, parse
from kinfolk.objectives import (
    BimodalSogCLRLoss,
    CLIPLoss,
    FastCLIPLoss,
    LocalAggregationLoss,
    NTXentLoss,
    RelativeContrastLoss,
    SigLIPLoss,
    SogCLRLoss,
)

N = 24
STATE: dict[str, Any] = {"num_samples": N, "gamma": 0.7, "decay_epochs": None}
LOSSES: dict[str, Callable[..., Any]] = {
    "ntxent": NTXentLoss,
    "prior": lambda **given: NTXentLoss(prior=0.1, hardness=0.5, **given),
    "local": LocalAggregationLoss,
    "relative": RelativeContrastLoss,
    "sogclr": lambda **given: SogCLRLoss(num_samples=N, gamma=0.7, **given),
    "siglip": lambda **given: SigLIPLoss(bias=-2.0, **given),
    "clip": CLIPLoss,
    "clip, prior": lambda **given: CLIPLoss(prior=0.1, hardness=0.5, **given),
    "bimodal": lambda **given: BimodalSogCLRLoss(**STATE, **given),
    "fastclip": lambda **given: FastCLIPLoss(rho=1.5, epsilon=0.1, **STATE, **given),
}
LABELS = torch.where(torch.arange(N) == 5, -1, torch.arange(N) % 4)
PAIRS = torch.tensor([[0, 2], [4, 8], [3, 5], [7, 9]])

DETECTORS: dict[str, Callable[[], Detector | None]] = {
    "none": lambda: None,
    "oracle": lambda: Oracle(LABELS),
    "fnc": lambda: FNC(top_k=2),
    "fnc, all": lambda: FNC(min_similarity=-1.0),
    "glofnd": lambda: GloFND(num_samples=N, alpha=0.2, init="quantile"),
    "glofnd, adam": lambda: GloFND(num_samples=N, alpha=0.2, rule="adam", init="quantile"),
    "glofnd, shared": lambda: GloFND(num_samples=N, alpha=0.2, rule="sgd", shared=True),
    "glofnd, late": lambda: StartAt(GloFND(num_samples=N, alpha=0.2), epoch=1, update_from=0),
    "ifnd": lambda: IFND(num_samples=N, num_clusters=(3, 5), schedule="constant"),
    "ifnd, bank": lambda: IFND(num_samples=N, num_clusters=(3,), source="bank"),
    "ring": lambda: Ring(lower=0.3, upper=0.8),
    "ring, clusters": lambda: Ring(lower=0.3, upper=0.8, num_samples=N, num_clusters=(3, 4)),
    "ring, drawn": lambda: Ring(lower=0.3, upper=0.8, draw=3),
    "cave": lambda: Cave(num_samples=N, num_clusters=3),
    "neighbours": lambda: Neighbours(
        num_samples=N, num_clusters=4, num_clusterings=2, num_background=9
    ),
    "hierarchy": lambda: Hierarchy(
        num_samples=N, levels=3, warmup_epochs=0, radii=[0.5, 0.9], min_samples=2
    ),
    "known": lambda: Known(num_samples=N, pairs=PAIRS),
    "components": Components,
    "positive_margin": lambda: PositiveMargin(margin=0.3),
    "teacher, soft": Teacher,
    "guide": lambda: Guide(
        torch.randn(N, 5, generator=torch.Generator().manual_seed(4)), alpha=0.2
    ),
    "guide, degrees": lambda: Guide(
        torch.randn(N, 5, generator=torch.Generator().manual_seed(4)), alpha=0.2, degrees=True
    ),
    "union": lambda: Union(
        GloFND(num_samples=N, alpha=0.1, init="quantile"),
        IFND(num_samples=N, num_clusters=(3, 5), schedule="constant"),
        StartAt(Guide(torch.eye(N)[:, :5] + 0.1, alpha=0.1), epoch=1),
    ),
    "guide, soft": lambda: Guide(
        torch.randn(N, 5, generator=torch.Generator().manual_seed(4)), temperature=0.2
    ),
}


def _by_defaults(name: str) -> Callable[[], Detector | None]:
    return lambda: build_detector(parse(f"simclr+{name}"), Context(N, LABELS), {})


_listed = {type(found.inner) for make in DETECTORS.values() if (found := make()) is not None}
DETECTORS |= {name: _by_defaults(name) for name, kind in REGISTERED.items() if kind not in _listed}
