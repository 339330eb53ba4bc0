"""Every framework and every detector in a training of seconds: what is killed, resumed and
compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.detectors import DETECTORS
from tests.training.pairs_of import SMALL as SMALL_PAIRS
from tests.training.pairs_of import write_pairs
from tests.training.small import SMALL

TINY: dict[str, Any] = {
    **SMALL,
    "knn.every": 1,
    "knn.k": 5,
    "trainer.precision": "32",
    "trainer.loggers": [],
    "checkpoint.every_minutes": 1e-9,
}
"""A checkpoint after every step, so that a kill finds one being written."""

IMAGES: dict[str, dict[str, Any]] = {
    "simclr+oracle": {},
    "simclr+fnc": {"detector.top_k": 2},
    "simclr+positive_margin": {"detector.margin": 0.3},
    "sogclr+glofnd": {"detector.alpha": 0.1, "detector.init": "quantile"},
    "simclr+ifnd": {"detector.num_clusters": 6},
    "simclr+hierarchy": {},
    "simclr+known": {},
    "simclr+components": {},
    "moco+teacher": {"framework.queue_size": 40},
    "moco+glofnd": {"framework.queue_size": 40, "detector.alpha": 0.1},
    "moco+ring": {"framework.queue_size": 40},
    "mocov3+glofnd": {"detector.alpha": 0.1},
    "ir+ring": {"framework.num_negatives": None},
    "ir+cave": {"framework.num_negatives": None, "detector.num_clusters": 6},
    "ir+neighbours": {"framework.num_negatives": 40},
    "pcl+glofnd": {
        "framework.queue_size": 40,
        "framework.warmup_epochs": 1,
        "framework.num_prototypes": 3,
        "framework.num_clusters": [4, 8],
    },
    "cmc+ring": {"framework.num_negatives": None, "views.options.grey": 0.0},
    "la": {},
    "nnclr+glofnd": {"framework.queue_size": 40},
    "rcl+glofnd": {
        "framework.queue_size": 40,
        "framework.warmup_epochs": 1,
        "framework.predictor_size": 16,
        "framework.radii": [0.2, 0.4],
    },
    "spcl+glofnd": {"framework.num_clusters": [8, 4], "framework.warmup_epochs": 1},
}
TEXT: dict[str, dict[str, Any]] = {
    "clip+glofnd": {"detector.alpha": 0.1},
    "sogclr-clip+fnc": {"detector.top_k": 2},
    "fastclip+glofnd": {"detector.alpha": 0.1},
    "siglip+guide": {"detector.alpha": 0.1},
}
IMAGES |= {  # a new detector
    f"simclr+{name}": {}
    for name in DETECTORS
    if name not in {method.partition("+")[2] for method in (*IMAGES, *TEXT)}
}
METHODS = (*IMAGES, *TEXT)


def write_data(folder: Path) -> None:
    """The samples of all trainings: 48 images of 8 × 8 with labels, some known pairs, and 24 images
    with captions."""
    if folder.exists():  # its times of modification stand in samples.parquet
        return
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    np.savez(
        folder / "images.npz",
        x_train=random.integers(0, 256, (48, 8, 8, 3), dtype=np.uint8),
        y_train=np.arange(48) % 4,
    )
    lines = "".join(f"{anchor},{anchor + 4}\n" for anchor in range(0, 40, 3))
    (folder / "pairs.csv").write_text(f"anchor,kin\n{lines}", encoding="utf-8")
    write_pairs(folder / "text", 24, captions=1)


def arguments(method: str, data: Path, out: Path) -> dict[str, Any]:
    """The arguments of `train`: two epochs of three or four steps."""
    shared = {"method": method, "out": out, "epochs": 2, "progress": False}
    if method in TEXT:
        settings = {
            **SMALL_PAIRS,
            "model.width": 4,
            **TEXT[method],
            "trainer.loggers": [],
            "checkpoint.every_minutes": 1e-9,
        }
        return {
            **shared,
            "data": str(data / "text" / "pairs.csv"),
            "batch_size": 6,
            "settings": settings,
        }
    settings = {**TINY, **IMAGES[method]}
    if method.endswith("+known"):
        settings["detector.pairs"] = str(data / "pairs.csv")
    return {**shared, "data": str(data / "images.npz"), "batch_size": 12, "settings": settings}
