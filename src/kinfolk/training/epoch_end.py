"""Between epochs: refreshes and measurements.

Dimension key: N training samples, L levels, F features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering.labels import PseudoLabels
from kinfolk.data.images import HostWriter, ImageData
from kinfolk.data.labels import TEST_SPLITS, VALIDATION_SPLITS
from kinfolk.data.text import NumberedTexts
from kinfolk.detectors import Hierarchy as HierarchyDetector
from kinfolk.embedding import embed, embed_in_parts, embedding_function, share_statistics
from kinfolk.errors import UsageError
from kinfolk.evaluation.detection import Normaliser, label_nmi, mtpr_mtnr, nmi
from kinfolk.evaluation.probes import knn_accuracy
from kinfolk.frameworks import RCL
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import evaluating
from kinfolk.seeding import draw_ids
from kinfolk.stores.per_sample import Collected
from kinfolk.training.config import TrainConfig
from kinfolk.training.launch import float32_products
from kinfolk.training.module import TrainingModule


class Knn:
    """Measures `knn`, and optionally `features_nmi` of k-means of the same features. The test or
    validation samples are classified by the training samples, or without either each training
    sample by the others. A detector that uses the accuracy receives `steering_knn`, which never
    uses the test samples."""

    def __init__(self, data: ImageData, config: TrainConfig) -> None:
        self.data, self.config, self.epochs = data, config.knn, config.epochs
        most, seed = self.config.max_samples, config.seed
        self.bank, self.queries = _parts(data, TEST_SPLITS, most, seed)
        self.steering_queries = _parts(data, VALIDATION_SPLITS, most, seed)[1]
        self._last: list[tuple[Tensor, Tensor]] = []

    def last_features(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Ascending ids, and features, of the samples that were embedded after the last epoch."""
        if not self._last:
            return None
        ids, features = (torch.cat(each) for each in zip(*self._last, strict=True))
        ids, order = ids.sort()
        return ids.numpy(), features[order].numpy()

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        every = self.config.every
        if self.bank is None or every == 0 or (epoch % every and epoch != self.epochs):
            return {}
        features, labels = self._embed(module, epoch, self.bank)

        def accuracy(queries: Tensor | None) -> float:
            x, y = (None, None) if queries is None else self._embed(module, epoch, queries)
            given = features, labels, x, y, self.config.k, self.config.temperature
            with float32_products("highest"):  # as in `kinfolk eval`
                return knn_accuracy(*given, module.device)

        found = {"knn": accuracy(self.queries)}
        if uses_knn(module.framework):
            queries, other = self.queries, self.steering_queries
            same = queries is None or (other is not None and torch.equal(queries, other))
            found["steering_knn"] = found["knn"] if same else accuracy(other)
        if self.config.nmi_seeds:
            seeds = range(self.config.nmi_seeds)
            spread = nmi(features, labels, seeds=seeds, normaliser=self.config.nmi_normaliser)
            found |= {"features_nmi": spread.mean, "features_nmi_deviation": spread.deviation}
        return found

    def _embed(self, module: TrainingModule, epoch: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self.data.labels is not None
        features = module.embed_samples(self.data, ids)
        if not features.isfinite().all():
            raise module.not_finite(f"a feature of {module.method}")
        if epoch == self.epochs:
            self._last.append((ids, features))
        return features, self.data.labels[ids]


def uses_knn(framework: Framework) -> bool:
    return any("knn" in detector.needed_metrics for detector in framework.detectors)


def require_knn(framework: Framework, knn: Knn, method: str) -> None:
    if uses_knn(framework) and (knn.config.every == 0 or knn.bank is None):
        is_off = knn.config.every == 0
        need = "`knn.every` (=0) must be at least 1" if is_off else "the data must have labels"
        raise UsageError(f"{need}: {method} uses the nearest-neighbour accuracy during training")


def _parts(
    data: ImageData, splits: tuple[str, ...], max_samples: int, seed: int
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of the labelled training samples, and of the first of `splits` that has any; each image
    once."""
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
    """Random, because samples are often sorted by class."""
    return ids[draw_ids(len(ids), limit, seed, "knn", what)]


class ClusterQuality:
    """Measures `mtpr` and `mtnr` of the pseudo-labels, where a sample that was not accepted is
    alone, and `nmi` of the clusters: of k-means at the first level, of a hierarchy at the levels 2
    … H, as `mtpr_2`."""

    def __init__(self, data: ImageData, normaliser: Normaliser = "arithmetic") -> None:
        self.normaliser = normaliser
        labels = None if data.labels is None else data.of_ids(data.labels)
        self.truth = labels if labels is not None and bool((labels >= 0).any()) else None

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        if self.truth is None:
            return {}
        found, levels_HN = pseudo_labels(module.framework), criteria_labels(module.framework)
        measured = {} if found is None else {"": (found[0][0], found[1][0])}
        for h, level_N in enumerate(() if levels_HN is None else levels_HN[1:], 2):
            measured[f"_{h}"] = level_N, level_N
        metrics: dict[str, float] = {}
        for name, (used_N, clusters_N) in measured.items():
            rates = mtpr_mtnr(used_N.cpu(), self.truth)
            metrics |= {f"mtpr{name}": rates.mtpr, f"mtnr{name}": rates.mtnr}
            metrics[f"nmi{name}"] = label_nmi(clusters_N.cpu(), self.truth, self.normaliser)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def pseudo_labels(framework: Framework) -> tuple[Tensor, Tensor] | None:
    """(L, N) pseudo-labels as the loss uses them, and (L, N) their clusters."""
    clusters = next((part for part in framework.modules() if isinstance(part, PseudoLabels)), None)
    if clusters is None or not bool(clusters.refreshed):
        return None
    return clusters.distinct, clusters.labels


def criteria_labels(framework: Framework) -> Tensor | None:
    for part in framework.modules():
        if isinstance(part, RCL):
            return part.labels
        if isinstance(part, HierarchyDetector):
            return part.clusters.labels if part.started else None
    return None


class Refresh(pl.Callback):
    """Calls `framework.refresh` before each epoch that needs it and `framework.finish` after the
    last one, and measures the time. Must come before `MetricsLog`, whose time does not include it.
    In the epoch before a refresh of streamed data, each batch is embedded without augmentation
    right after its step, and only what the epoch left out is read again."""

    def __init__(self, data: ImageData | NumberedTexts) -> None:
        self.data = data
        self.seconds: float | None = None
        self.collected: Collected | None = None
        self._returning = HostWriter(self._collect)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self.data.stream is None:
            return
        assert isinstance(module, TrainingModule)
        framework, coming = module.framework, trainer.current_epoch + 1
        is_due = framework.due(coming) if coming < module.epochs else _finishes(framework)
        if framework.collects or not is_due:
            return
        device, projected = module.device, framework.space == "projected"
        dtype, model = module.autocast, framework.refresh_model
        with evaluating(framework), torch.no_grad(), torch.autocast(device.type, enabled=False):
            views = module.views.evaluate(batch["pixels"], batch["aspect"])
            with torch.autocast(device.type, dtype, dtype is not None, cache_enabled=False):
                z = embedding_function(model, projected)(views)
        ids, z = distributed.gather_all(batch["ids"].to(device), z.float())
        self._returning.add(ids, z)

    def _collect(self, ids: Tensor, z: Tensor) -> None:
        if self.collected is None:
            self.collected = Collected(self.data.num_train)
        self.collected.write(ids, z)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        epoch, framework = trainer.current_epoch, module.framework
        framework.set_progress(epoch, module.epochs)
        self.seconds = None
        if not framework.due(epoch):
            return
        self._time_refresh(
            module, lambda features: framework.refresh(features, epoch / module.epochs)
        )
        for optimizer in trainer.optimizers:
            for parameter in framework.reinitialised:
                optimizer.state.pop(parameter, None)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        if trainer.current_epoch + 1 >= module.epochs and _finishes(module.framework):
            self._time_refresh(module, module.framework.finish)

    def _time_refresh(
        self, module: TrainingModule, refresh: Callable[[Tensor | None], object]
    ) -> None:
        start = time.perf_counter()
        features = self._features(module)
        with float32_products("highest"):  # TF32 rounds away the distance of near neighbours
            refresh(features)
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - start

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        return {} if self.seconds is None else {"refresh_seconds": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        self._returning.finish()
        collected = None if self.collected is None else self.collected.state_dict()
        return {"seconds": self.seconds, "collected": collected}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = state["seconds"]
        if state.get("collected") is not None:
            self.collected = Collected(self.data.num_train)
            self.collected.load_state_dict(state["collected"])

    def _features(self, module: TrainingModule) -> Tensor | None:
        """(N, F), equal on all ranks; None if the framework has its own."""
        framework = module.framework
        self._returning.finish()
        if framework.collects:
            return None
        projected = framework.space == "projected"
        if projected and framework.known_features is not None:
            return framework.known_features
        where: dict[str, Any] = {"device": module.device, "autocast": module.autocast}
        where["projected"] = projected
        model, number = framework.refresh_model, self.data.num_train
        if self.collected is None:
            return embed_in_parts(model, self.data, module.views, number, **where)
        features, left_out = self.collected.features, (~self.collected.seen).nonzero()[:, 0]
        self.collected = None
        if len(left_out):
            share_statistics(framework)
            features[left_out] = embed(model, self.data, module.views, left_out, **where)
        return features


def _finishes(framework: Framework) -> bool:
    return any(detector.refreshed_at_end for detector in framework.detectors)
