"""The once-per-epoch step of methods that use all samples at once, such as those that cluster them.

Dimension key: N training samples, F features.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from kinfolk import distributed
from kinfolk.data.images import ImageData, Returning
from kinfolk.data.text import NumberedTexts
from kinfolk.embedding import (
    embed,
    embed_in_parts,
    embedding_function,
    evaluating,
    share_statistics,
)
from kinfolk.frameworks import Framework
from kinfolk.stores.per_sample import Collected
from kinfolk.training.launch import float32_products
from kinfolk.training.module import TrainingModule


class Refresh(pl.Callback):
    """Calls `framework.refresh` before each epoch that needs it and `framework.finish` after the
    last one, and measures the time.

    The result of a refresh is state of the framework: an epoch that is resumed in its middle is not
    refreshed again. The optimiser drops the momentum of parameters that the framework has replaced.
    This callback must come before `MetricsLog`, whose time of an epoch does not include it.

    Streamed data is not read a second time: in the epoch before a refresh each batch is embedded
    without augmentation right after its step. The few samples that the epoch left out are read.
    """

    def __init__(self, data: ImageData | NumberedTexts) -> None:
        self.data = data
        self.seconds: float | None = None
        self.collected: Collected | None = None
        self._returning = Returning(self._collect)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Embeds the batch of a streamed epoch that a refresh will follow."""
        if self.data.stream is None:
            return
        assert isinstance(module, TrainingModule)
        framework, coming = module.framework, trainer.current_epoch + 1
        is_due = framework.due(coming) if coming < module.epochs else _finishes(framework)
        if framework.collects or not is_due:
            return
        device, projected = module.device, framework.space == "projected"
        with evaluating(framework), torch.no_grad(), torch.autocast(device.type, enabled=False):
            views = module.views.evaluate(batch["pixels"], batch["aspect"])
            dtype, model = module.autocast, framework.refresh_model
            is_cast = dtype is not None
            with torch.autocast(device.type, dtype=dtype, enabled=is_cast, cache_enabled=False):
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
        start = time.perf_counter()
        features = self._features(module)
        with float32_products("highest"):  # TF32 rounds away the distance of near neighbours
            framework.refresh(features, epoch / module.epochs)
        for optimizer in trainer.optimizers:
            for parameter in framework.reinitialised:
                optimizer.state.pop(parameter, None)
        self.seconds = time.perf_counter() - start

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        framework = module.framework
        if trainer.current_epoch + 1 < module.epochs or not _finishes(framework):
            return
        start = time.perf_counter()
        features = self._features(module)
        with float32_products("highest"):
            framework.finish(features)
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - start

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        """A measurement: `refresh_seconds` of the epoch, if it was refreshed."""
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
        """(N, F) the features to cluster, equal on all ranks; None if the framework has its own."""
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
    """Whether a detector is refreshed once more after the last epoch."""
    return any(detector.refreshed_at_end for detector in framework.detectors)
