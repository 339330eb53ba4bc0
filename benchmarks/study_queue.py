"""The queue behind `study.py`: which runs there are, in which order, and the file of their
results."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CURVES = ("knn", "precision", "recall", "f1", "flagged", "loss")
"""What is kept of every epoch."""


@dataclass(frozen=True)
class Job:
    """One training and its evaluation."""

    stage: str
    dataset: str
    method: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.dataset, self.method, self.seed

    @property
    def folder(self) -> Path:
        """Where its run lies, below the folder of the study."""
        return Path(self.dataset) / f"{folder_name(self.method)}-{self.seed}"


def folder_name(method: str) -> str:
    """`simclr+oracle:attract (by track)` as `simclr+oracle-attract_by_track`."""
    return method.replace(":", "-").replace(" ", "_").replace("(", "").replace(")", "")


def jobs(study: Mapping[str, Any], stages: list[str] | None = None) -> Iterator[Job]:
    """The runs of a document in their order, each once; `stages`: only these."""
    seen = set()
    for stage in study["stages"]:
        if stages is not None and stage["name"] not in stages:
            continue
        for seed in stage.get("seeds", [0]):
            for dataset in stage.get("datasets", study["datasets"]):
                for method in stage.get("methods", study["methods"]):
                    for part, named in (("datasets", dataset), ("methods", method)):
                        if named not in study[part]:
                            raise SystemExit(
                                f"stage {stage['name']!r} names {named!r}, which is not among the"
                                f" {part} of the study"
                            )
                    job = Job(stage["name"], dataset, method, seed)
                    if job.key not in seen:
                        seen.add(job.key)
                        yield job


class Results:
    """The records of finished runs, one for each data set, method and seed, in a JSON file that is
    replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        )

    def __contains__(self, job: Job) -> bool:
        return any((one["dataset"], one["method"], one["seed"]) == job.key for one in self.records)

    def add(
        self,
        job: Job,
        figures: Mapping[str, float],
        epochs: list[dict[str, float]],
        version: str,
        cpu_seconds: float | None = None,
    ) -> None:
        """`cpu_seconds`: of the whole training; the record has them for each epoch."""
        curves = {
            name: [_short(epoch.get(name)) for epoch in epochs]
            for name in CURVES
            if any(name in epoch for epoch in epochs)
        }
        record = {
            "dataset": job.dataset,
            "method": job.method,
            "seed": job.seed,
            "stage": job.stage,
            "version": version,
            "epochs": len(epochs),
            **({} if cpu_seconds is None else {"cpu_seconds": _short(cpu_seconds / len(epochs))}),
            "figures": {name: _short(value) for name, value in sorted(figures.items())},
            "curves": curves,
        }
        self.records.append(record)
        self.records.sort(key=lambda one: (one["dataset"], one["method"], one["seed"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in self.records)
        partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        os.replace(partial, self.path)

    def figures(self, dataset: str) -> dict[str, list[dict[str, float]]]:
        """The figures of a data set by method, seed by seed."""
        rows: dict[str, list[dict[str, float]]] = {}
        for one in self.records:
            if one["dataset"] == dataset:
                rows.setdefault(one["method"], []).append(one["figures"])
        return rows


def version() -> str:
    """The commit the code was made from, marked where files differ from it; the release where there
    is no repository."""
    import kinfolk

    command = [
        "git",
        "-C",
        str(Path(kinfolk.__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{kinfolk.__version__} {found.stdout.strip()}".strip()


def corrupted(labels: np.ndarray, precision: float, recall: float, seed: int = 0) -> np.ndarray:
    """Labels of which about the share `precision` of the pairs with an equal label have an equal
    class, and which have an equal label for about the share `recall` of the pairs of one class.
    Exact for balanced classes in expectation, where such a grouping exists.

    Classes are joined in groups where the recall is above the precision, then every sample keeps
    its group or takes any other, and each group is split at random.
    """
    generator = np.random.default_rng(seed)
    num_classes = int(labels.max()) + 1
    joined = max(1, math.ceil(recall / precision - 1e-9))
    group = (generator.permutation(num_classes) // joined)[labels]
    number = int(group.max()) + 1
    agree = min(1.0, precision * joined)  # of two samples of one group, to keep one group
    keep = (
        1.0
        if number == 1
        else (1 + math.sqrt(max(0.0, (number * agree - 1) * (number - 1)))) / number
    )
    moved = generator.random(len(labels)) >= keep
    other = generator.integers(0, max(1, number - 1), len(labels))
    group = np.where(moved, other + (other >= group), group) if number > 1 else group
    parts = max(1, round(agree / recall))
    return np.asarray(group * parts + generator.integers(0, parts, len(labels)))


def agreement(labels: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Precision and recall over all pairs of a grouping against the classes."""
    table = np.zeros((int(labels.max()) + 1, int(truth.max()) + 1))
    np.add.at(table, (labels, truth), 1)
    both, given, wanted = (
        float((part * (part - 1)).sum()) for part in (table, table.sum(1), table.sum(0))
    )
    return both / given, both / wanted


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
