"""The once-per-epoch step of methods that look at all samples at once, such as those that cluster them.

Dimension key: N training samples, F features.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from kinfolk.data.images import ImageData
from kinfolk.data.views import Views
from kinfolk.evaluation.embed import Tracker
from kinfolk.evaluation.embed_parts import embed_in_parts
from kinfolk.training.module import TrainingModule


class Refresh(pl.Callback):
    """Calls `framework.refresh` before each epoch that is due and `framework.finish` after the last one, and tells the journal how long
    both took.

    What a refresh leads to is state of the framework, so it is in the checkpoint: an epoch that is resumed in its middle is not refreshed
    again, and one that is resumed at its beginning is refreshed as if nothing had happened. The optimiser forgets the momentum of what the
    framework has set anew. Must come before the journal, whose seconds of an epoch do not count it.

    Args:
        data: its training samples are embedded, without augmentation, where the framework does not know their features anyway.
        views: prepares them, by `evaluate`.
        epochs: of the whole training.
        autocast: computing type of the encoder; None: that of the weights.
        progress: shows how far the embedding has come.
    """

    def __init__(
        self, data: ImageData, views: Views, *, epochs: int, autocast: torch.dtype | None, progress: bool | Tracker = False
    ) -> None:
        self.data, self.views, self.epochs, self.autocast, self.progress = data, views, epochs, autocast, progress
        self.seconds: float | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Called at the beginning of an epoch only."""
        assert isinstance(module, TrainingModule)
        epoch, framework = trainer.current_epoch, module.framework
        framework.set_progress(epoch, self.epochs)
        self.seconds = None
        if not framework.due(epoch):
            return
        start = time.perf_counter()
        framework.refresh(self._features(module), epoch / self.epochs)
        for optimizer in trainer.optimizers:
            for parameter in framework.renewed:
                optimizer.state.pop(parameter, None)
        self.seconds = time.perf_counter() - start

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """After the last epoch, before the journal's line and the checkpoint: what describes the encoder describes the finished one."""
        assert isinstance(module, TrainingModule)
        framework = module.framework
        if trainer.current_epoch + 1 < self.epochs or not any(detector.refreshed_at_end for detector in framework.detectors):
            return
        start = time.perf_counter()
        framework.finish(self._features(module))
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - start

    def __call__(self, module: TrainingModule, epoch: int) -> dict[str, float]:
        """A measurement of the journal: `refresh_seconds` of the epoch, where it was refreshed."""
        return {} if self.seconds is None else {"refresh_seconds": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = state["seconds"]

    def _features(self, module: TrainingModule) -> Tensor | None:
        """(N, F) what is clustered, the same on all ranks; None where it was collected during the epoch."""
        framework = module.framework
        if framework.collects:
            return None
        projected = framework.space == "projected"
        if projected and framework.known_features is not None:
            return framework.known_features
        return embed_in_parts(
            framework.refresh_model,
            self.data,
            self.views,
            self.data.num_train,
            device=module.device,
            autocast=self.autocast,
            progress=self.progress,
            projected=projected,
        )
