"""Measurements at the end of an epoch: nearest-neighbour accuracy of the features, agreement of
pseudo-labels with the labels, and snapshots of embeddings for the maps of the report.

Dimension key: N training samples, L levels, S samples of a snapshot, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kinfolk.clustering.hierarchy import OnlineHierarchy
from kinfolk.clustering.labels import PseudoLabels
from kinfolk.data.images import ImageData
from kinfolk.data.labels import TEST_SPLITS, VALIDATION_SPLITS
from kinfolk.data.sample_table import samples_digest
from kinfolk.detectors import Hierarchy as HierarchyDetector
from kinfolk.embedding import embed
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.evaluation.detection import Normaliser, label_nmi, mtpr_mtnr, nmi
from kinfolk.evaluation.probes import knn_accuracy
from kinfolk.files import check_safetensors, write_safetensors
from kinfolk.frameworks import RCL
from kinfolk.frameworks.base import Framework
from kinfolk.seeding import generator
from kinfolk.training.config import TrainConfig
from kinfolk.training.launch import float32_products
from kinfolk.training.module import TrainingModule
from kinfolk.training.run_folder import Run, epoch_of, snapshot_file


class Knn:
    """Measures `knn` every few epochs and after the last one, and optionally `features_nmi` of
    k-means of the same features with the labels. Nothing is measured without labels.

    The test samples, or those of a validation split, are classified by the training samples.
    Without either, each training sample is classified by the others. A detector that uses the
    accuracy receives `steering_knn` instead, which never uses the test samples.
    """

    def __init__(self, data: ImageData, config: TrainConfig) -> None:
        self.data, self.config, self.epochs = data, config.knn, config.epochs
        most, seed = self.config.max_samples, config.seed
        self.bank, self.queries = _parts(data, TEST_SPLITS, most, seed)
        self.steering_queries = _parts(data, VALIDATION_SPLITS, most, seed)[1]
        steering = self.steering_queries
        self.has_steering_queries = self.queries is not None and (
            steering is None or not torch.equal(self.queries, steering)
        )
        self._last: list[tuple[Tensor, Tensor]] = []

    def last_features(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Ids, ascending, and features of the samples that were embedded after the last epoch."""
        if not self._last:
            return None
        ids, features = (torch.cat(each) for each in zip(*self._last, strict=True))
        ids, order = ids.sort()
        return ids.numpy(), features[order].numpy()

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        every = self.config.every
        if self.bank is None or every == 0 or (epoch % every and epoch != self.epochs):
            return {}
        features, labels = self._embedded(module, epoch, self.bank)
        found = {"knn": self._accuracy(module, epoch, features, labels, self.queries)}
        if steered_by_knn(module.framework):
            found["steering_knn"] = found["knn"]
            if self.has_steering_queries:
                queries = self.steering_queries
                found["steering_knn"] = self._accuracy(module, epoch, features, labels, queries)
        if self.config.nmi_seeds:
            seeds = range(self.config.nmi_seeds)
            spread = nmi(features, labels, seeds=seeds, normaliser=self.config.nmi_normaliser)
            found |= {"features_nmi": spread.mean, "features_nmi_deviation": spread.deviation}
        return found

    def _accuracy(
        self,
        module: TrainingModule,
        epoch: int,
        features: Tensor,
        labels: Tensor,
        queries: Tensor | None,
    ) -> float:
        """The accuracy on `queries`; None: on the bank itself, leaving one out."""
        test_x, test_y = (None, None) if queries is None else self._embedded(module, epoch, queries)
        given = features, labels, test_x, test_y, self.config.k, self.config.temperature
        with float32_products("highest"):  # as in `kinfolk eval`
            return knn_accuracy(*given, module.device)

    def _embedded(self, module: TrainingModule, epoch: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self.data.labels is not None
        where: dict[str, Any] = {"device": module.device, "autocast": module.autocast}
        features = embed(module.framework, self.data, module.views, ids, **where)
        module.require_finite(features, "features")
        if epoch == self.epochs:
            self._last.append((ids, features))
        return features, self.data.labels[ids]


def steered_by_knn(framework: Framework) -> bool:
    """Whether a detector of the framework uses the nearest-neighbour accuracy."""
    return any("knn" in detector.wanted_metrics for detector in framework.detectors)


def require_knn(framework: Framework, knn: Knn, method: str) -> None:
    """Refuses a method that uses the nearest-neighbour accuracy if it is never measured."""
    if not steered_by_knn(framework):
        return
    if knn.config.every == 0 or knn.bank is None:
        is_off = knn.config.every == 0
        need = "`knn.every` (=0) must be at least 1" if is_off else "the data must have labels"
        raise UsageError(f"{need}: {method} uses the nearest-neighbour accuracy during training")


def _parts(
    data: ImageData, splits: tuple[str, ...], max_samples: int, seed: int
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of the labelled training samples, and of the labelled samples of the first of `splits`
    that exists; each image once."""
    if data.labels is None:
        return None, None
    labelled = data.labels >= 0
    bank = data.once(labelled[: data.num_train].nonzero()[:, 0])
    if len(bank) < 2:
        return None, None
    bank = _subsample(bank, max_samples, seed, "bank")
    for split in splits:
        ids = torch.from_numpy(data.samples.rows_of(split))
        ids = ids[labelled[ids]]
        if len(ids):
            return bank, _subsample(data.once(ids), max_samples, seed, "queries")
    return bank, None


def _subsample(ids: Tensor, limit: int, seed: int, what: str) -> Tensor:
    """At most `limit` random ids: samples are often sorted by class."""
    if len(ids) <= limit:
        return ids
    return ids[
        torch.randperm(len(ids), generator=generator(seed, "knn", what))[:limit].sort().values
    ]


class ClusterQuality:
    """Measures `mtpr` and `mtnr` of the pseudo-labels and `nmi` of the clusters against the
    training labels, of methods that cluster.

    Of k-means only the first level is measured; of a hierarchy the levels 2 … H, as `mtpr_2` and so
    on. `mtpr` and `mtnr` use the pseudo-labels as the loss does: a sample that was not accepted is
    alone. `nmi` uses the clusters of all samples.
    """

    def __init__(self, data: ImageData, normaliser: Normaliser = "arithmetic") -> None:
        self.normaliser = normaliser
        labels = None if data.labels is None else data.of_ids(data.labels)
        self.truth = labels if labels is not None and bool((labels >= 0).any()) else None

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        if self.truth is None:
            return {}
        found, levels_HN = pseudo_labels(module.framework), criteria_labels(module.framework)
        measured = {} if found is None else {"": (found[0][0], found[1][0])}
        if levels_HN is not None:
            measured |= {f"_{h}": (level_N, level_N) for h, level_N in enumerate(levels_HN[1:], 2)}
        metrics: dict[str, float] = {}
        for name, (used_N, clusters_N) in measured.items():
            rates = mtpr_mtnr(used_N.cpu(), self.truth)
            metrics |= {f"mtpr{name}": rates.mtpr, f"mtnr{name}": rates.mtnr}
            metrics[f"nmi{name}"] = label_nmi(clusters_N.cpu(), self.truth, self.normaliser)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def pseudo_labels(framework: Framework) -> tuple[Tensor, Tensor] | None:
    """(L, N) pseudo-labels as the loss uses them, and (L, N) their clusters; None before the first
    clustering."""
    clusters = next((part for part in framework.modules() if isinstance(part, PseudoLabels)), None)
    if clusters is None or not bool(clusters.refreshed):
        return None
    return clusters.distinct, clusters.labels


def criteria_labels(framework: Framework) -> Tensor | None:
    """(H, N) levels of the hierarchy of RCL or of a hierarchy detector, once there are any."""
    for part in framework.modules():
        if isinstance(part, RCL):
            return part.labels
        if isinstance(part, HierarchyDetector):
            return part.clusters.labels if part.started else None
    return None


def accepted_labels(framework: Framework) -> Tensor | None:
    """(N,) pseudo-labels of the first level that groups samples, −1 where none was accepted or the
    sample is alone; None without clusters."""
    found = pseudo_labels(framework)
    if found is not None:
        used_N, clusters_N = (levels_LN[0] for levels_LN in found)
        labels_N = used_N.where(used_N == clusters_N, -1)
    else:
        trees = [part for part in framework.modules() if isinstance(part, OnlineHierarchy)]
        tree = trees[0] if trees else None
        if tree is None or tree.levels < 2:
            return None
        labels_N = tree.labels[1]
    _, group_N, size = torch.unique(labels_N, return_inverse=True, return_counts=True)
    return labels_N.where(size[group_N] > 1, -1)


SAMPLES = "kinfolk.samples"
"""Key of the digest of the list of samples that the ids refer to."""


@dataclass(frozen=True)
class Snapshot:
    """The snapshot of one epoch: ids (S,), unit-norm projected embeddings (S, D) in 16 bits and,
    for methods that cluster, pseudo-labels (S,), −1 where none is accepted."""

    epoch: int
    ids: NDArray[np.int64]
    embedding: NDArray[np.float16]
    pseudo: NDArray[np.int64] | None


class Snapshots:
    """Writes `snapshots/epoch-NNNN.safetensors` after the first epoch, the last one and some
    equally spaced epochs between them, always of the same samples."""

    def __init__(self, run: Run, data: ImageData, config: TrainConfig) -> None:
        self.run, self.data = run, data
        self.epochs = snapshot_epochs(config.snapshots.epochs, config.epochs)
        order = torch.randperm(data.num_train, generator=generator(config.seed, "snapshots"))
        self.ids = order[: config.snapshots.samples].sort().values
        self.samples = samples_digest(data.samples) if self.epochs else ""

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        if epoch not in self.epochs:
            return {}
        where: dict[str, Any] = {"device": module.device, "autocast": module.autocast}
        embedding_SD = embed(
            module.framework, self.data, module.views, self.ids, projected=True, **where
        )
        tensors = {"ids": self.ids, "embedding": embedding_SD.half()}
        labels_N = accepted_labels(module.framework)
        if labels_N is not None:
            tensors["pseudo"] = labels_N.cpu()[self.ids]
        file = snapshot_file(self.run.snapshots, epoch)
        write_safetensors(file, tensors, {SAMPLES: self.samples})
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
    """All readable snapshots of a run in order; with a digest `samples`, of these samples only."""
    paths = sorted(folder.glob("epoch-*.safetensors"), key=epoch_of)
    found = [_read(path, samples) for path in paths]
    return [snapshot for snapshot in found if snapshot is not None]


def _read(path: Path, samples: str | None) -> Snapshot | None:
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            check_safetensors(path, about, required=True)
            if samples is not None and about.get(SAMPLES) != samples:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dictionary
        return Snapshot(epoch_of(path), arrays["ids"], arrays["embedding"], arrays.get("pseudo"))
    except (KinfolkError, SafetensorError, OSError, KeyError):
        return None
