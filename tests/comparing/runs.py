"""Run folders with made-up figures, as `kinfolk train` and `kinfolk eval` leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kinfolk.data.sample_table import Samples
from kinfolk.evaluation.protocols import write_result
from kinfolk.training.config import TrainConfig


def make_run(
    folder: Path,
    method: str,
    seed: int = 0,
    linear: float | None = None,
    *,
    settings: dict[str, Any] | None = None,
    epoch: dict[str, float] | None = None,
    source: str = "photos",
    num_samples: int = 6,
    **result: Any,
) -> Path:
    """A run of `method`; `linear` is the accuracy of its probe, `settings` its configuration,
    `epoch` what its last epoch says."""
    folder.mkdir(parents=True)
    config = TrainConfig(method=method, seed=seed).with_settings(
        {"data.source": source, **(settings or {})}
    )
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    rows = [
        {"epoch": 1, "step": 2, "seconds": 4.0},
        {"epoch": 2, "step": 4, "seconds": 2.0, **(epoch or {})},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    samples(num_samples).to_parquet(folder / "samples.parquet")
    if linear is not None:
        write_result(
            folder,
            "linear",
            {"accuracy": linear, "test": 10, "measured_on": "test split", "data": source, **result},
        )
    return folder


def samples(number: int) -> Samples:
    ones = np.ones(number, dtype=np.int64)
    return Samples(
        ids=np.arange(number),
        keys=[f"{i}.png" for i in range(number)],
        widths=ones,
        heights=ones,
        labels=None,
        classes=None,
        splits=["train"] * number,
        sizes_bytes=ones,
        modified_ns=ones,
        digests=[f"{i:x}" for i in range(number)],
    )
