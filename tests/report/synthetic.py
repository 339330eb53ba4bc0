"""A run folder as `kinfolk train` leaves it, made up, for the tests of the report and of the
command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import nn

import kinfolk as kf
from kinfolk.data.images import ImageData
from kinfolk.data.prepare import write_quarantine
from kinfolk.data.sample_table import Samples
from kinfolk.frameworks import SimCLR

HOSTILE = [
    "<script>window.hacked=1</script>.png",
    "</script><script>window.hacked=2</script>",
    "\"><img src=x onerror='window.hacked=3'>",
    "'; window.hacked=4; //",
    "{{ 7 * 7 }} ${7*7} <%= 7 %> &lt;b&gt;",
    "\u202eגנפ.אבג\u202c شجرة",
    "🦊🪺 <!-- --!> ]]>",
    "undecodable-\udce9.jpg",
    "x" * 500,
    "%{y} <b>bold</b>\u2028\u2029\\u003c",
]
"""File names and labels that want to be more than text."""

CONFIG: dict[str, Any] = {
    "method": "simclr",
    "epochs": 12,
    "batch_size": 64,
    "seed": 3,
    "data": {"source": "digits", "labels_from_folders": False, "workers": None},
    "views": {"preset": "simclr", "size": 16, "options": {}},
    "model": {"name": "resnet10", "stem": "cifar", "width": 8, "pretrained": False},
    "optimizer": {"name": "sgd", "lr": 0.03, "betas": [0.9, 0.999]},
    "framework": {},
    "detector": {},
}


def images(
    num: int = 80, classes: list[str] | None = None, keys: list[str] | None = None, size: int = 12
) -> ImageData:
    """Noise in a colour of its class; every fourth sample is for testing; twice as wide as high,
    squashed in the cache."""
    rng = np.random.default_rng(0)
    labels = None if classes is None else (np.arange(num) % len(classes)).astype(np.int64)
    cache = rng.integers(0, 80, (num, size, size, 3), dtype=np.uint8)
    cache[..., 0] += (np.arange(num, dtype=np.uint8) % 4 * 40)[:, None, None]
    num_train = num - num // 4
    samples = Samples(
        ids=np.arange(num, dtype=np.int64),
        keys=[(keys[i % len(keys)] if keys else f"animals/{i:04d}.png") for i in range(num)],
        widths=np.full(num, 2 * size, dtype=np.int64),
        heights=np.full(num, size, dtype=np.int64),
        labels=labels,
        classes=classes,
        splits=["train"] * num_train + ["test"] * (num - num_train),
        sizes_bytes=np.full(num, 100, dtype=np.int64),
        modified_ns=np.zeros(num, dtype=np.int64),
        digests=["0" * 16] * num,
    )
    return ImageData(samples, torch.from_numpy(cache), None, [])


def all_features(data: ImageData) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The features of all samples, with their ids."""
    return np.arange(len(data)), features(data)


def features(data: ImageData) -> NDArray[np.float32]:
    """(N, 16) with the classes apart."""
    labels = (
        np.zeros(len(data), dtype=np.int64) if data.samples.labels is None else data.samples.labels
    )
    noise = np.random.default_rng(1).normal(0, 0.4, (len(data), 16))
    return (noise + np.eye(16)[labels % 16] * 3).astype(np.float32)


def metrics(epochs: int = 12) -> list[dict[str, float]]:
    """All metrics a training can write."""
    rows: list[dict[str, float]] = []
    for epoch in range(1, epochs + 1):
        row = {
            "epoch": epoch,
            "step": epoch * 10,
            "loss": 4 + math.exp(-epoch / 3),
            "lr": 0.03 * (1 - epoch / epochs),
        }
        row |= {
            "flagged": 0.01,
            "precision": 0.7,
            "recall": 0.1 + epoch / 100,
            "f1": 0.2,
            "images_per_second": 900.0,
            "seconds": 2.5,
        }
        row |= {"anchor_precision": 0.75, "anchor_recall": 0.3, "anchor_f1": 0.43}
        row |= {"tp_similarity": 0.9 - 0.3 / epoch, "fn_similarity": 0.2 - epoch / 100}
        row |= {"mtpr": epoch / 30, "mtnr": 0.99, "nmi": 0.2 + epoch / 40, "refresh_seconds": 0.5}
        rows.append(row | ({"knn": 1 - math.exp(-epoch / 4)} if epoch % 2 == 0 else {}))
    return rows


def method(data: ImageData, detector: bool = True) -> SimCLR:
    """A trained method, as far as the page can tell; its detector flags every similarity above
    0.9."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8))
    found = kf.GloFND(num_samples=data.num_train, alpha=0.1) if detector else None
    if found is not None:
        found.store.threshold.fill_(0.9)
    return SimCLR(encoder, nn.Identity(), detector=found).eval()


def make_run(
    path: Path,
    *,
    bare: bool = False,
    data: ImageData | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the folder; `bare` leaves out all but config.yaml."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump(config or CONFIG, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    if bare:
        return path
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics()), encoding="utf-8"
    )
    (path / "model.json").write_text(
        json.dumps({"format": 1, "parameters": 300_000, "meta": {}}), encoding="utf-8"
    )
    (path / "eval").mkdir()
    for protocol, accuracy in (("knn", 0.93), ("linear", 0.95)):
        result = {"protocol": protocol, "accuracy": accuracy, "seed": 0, "strengths": [0.1, 1.0]}
        (path / "eval" / f"{protocol}.json").write_text(json.dumps(result), encoding="utf-8")
    write_quarantine(
        [
            ("bad/one.jpg", "truncated"),
            ("bad/two.jpg", "zero bytes"),
            ("bad/three.jpg", "truncated"),
        ],
        path / "quarantine.csv",
    )
    if data is not None:
        safe = [key.encode("utf-8", "replace").decode() for key in data.samples.keys]
        replace(data.samples, keys=safe).to_parquet(path / "samples.parquet")
    return path
