"""Snapshots: the embeddings of a few samples at a few epochs of a training, for the maps of the report.

Dimension key: S samples, D embedding, N training samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kinfolk.data.augmentation.views import Views
from kinfolk.data.images import ImageData
from kinfolk.data.sample_table import samples_digest
from kinfolk.embedding import embed
from kinfolk.errors import KinfolkError
from kinfolk.files import check_safetensors, write_safetensors
from kinfolk.seeding import generator
from kinfolk.training.config import SnapshotConfig
from kinfolk.training.epoch_metrics import accepted_labels
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run, epoch_of, snapshot_file

SAMPLES = "kinfolk.samples"
"""Key of the digest of the list of samples that the ids refer to."""


@dataclass(frozen=True)
class Snapshot:
    """The snapshot of one epoch: ids (S,), unit-norm projected embeddings (S, D) in 16 bits and, for methods that cluster, pseudo-labels
    (S,), −1 where none is accepted."""

    epoch: int
    ids: NDArray[np.int64]
    embedding: NDArray[np.float16]
    pseudo: NDArray[np.int64] | None


class Snapshots:
    """Writes `snapshots/epoch-NNNN.safetensors` after the first epoch, the last one and some equally spaced epochs between them.

    The samples are the same every time, and the training does not depend on them. A measurement that adds no metric."""

    def __init__(
        self, run: Run, data: ImageData, views: Views, config: SnapshotConfig, *, epochs: int, seed: int, autocast: torch.dtype | None
    ) -> None:
        self.run, self.data, self.views, self.autocast = run, data, views, autocast
        self.epochs = snapshot_epochs(config.epochs, epochs)
        order = torch.randperm(data.num_train, generator=generator(seed, "snapshots"))
        self.ids = order[: config.samples].sort().values
        self.samples = samples_digest(data.samples) if self.epochs else ""

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        if epoch not in self.epochs:
            return {}
        embedding_SD = embed(
            module.framework, self.data, self.views, self.ids, device=module.device, autocast=self.autocast, projected=True
        )
        tensors = {"ids": self.ids, "embedding": embedding_SD.half()}
        labels_N = accepted_labels(module.framework)
        if labels_N is not None:
            tensors["pseudo"] = labels_N.cpu()[self.ids]
        write_safetensors(snapshot_file(self.run.snapshots, epoch), tensors, {SAMPLES: self.samples})
        return {}


def snapshot_epochs(number: int, epochs: int) -> set[int]:
    """The epochs, counted from 1, after which a snapshot is written.

    Example:
        >>> sorted(snapshot_epochs(4, 100))
        [1, 34, 67, 100]
    """
    if number < 2:
        return {epochs} if number else set()
    return {1 + round(at * (epochs - 1) / (number - 1)) for at in range(number)}


def read_snapshots(folder: Path, samples: str | None = None) -> list[Snapshot]:
    """All snapshots of a run in order. Unreadable files are left out, and so are snapshots of other samples if the digest `samples` is
    given."""
    found = (_read(path, samples) for path in sorted(folder.glob("epoch-*.safetensors"), key=epoch_of))
    return [snapshot for snapshot in found if snapshot is not None]


def _read(path: Path, samples: str | None) -> Snapshot | None:
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            check_safetensors(path, about, own=True)
            if samples is not None and about.get(SAMPLES) != samples:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dictionary
        return Snapshot(epoch_of(path), arrays["ids"], arrays["embedding"], arrays.get("pseudo"))
    except (KinfolkError, SafetensorError, OSError, KeyError):
        return None
