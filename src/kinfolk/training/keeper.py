"""Saving: at the end of an epoch, every so many minutes, and when the process is asked to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from kinfolk import distributed
from kinfolk.errors import KinfolkError

NOTHING, SAVE, LEAVE = 0, 1, 2
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedRunError(KinfolkError):
    """The training was asked to end before its last epoch; it saved and can be resumed."""


class Keeper(pl.Callback):
    """Writes the checkpoint, and ends the training after the current step when a signal asks for it.

    Only between two optimiser steps is everything in the checkpoint, so within an accumulation nothing is saved; and on the last batch of
    an epoch the end of the epoch is waited for, so that its line of metrics is written. A second Ctrl-C ends at once.

    Args:
        path: of the checkpoint.
        epochs: of the whole training.
        every_epochs, every_minutes: when to save.
        export: called with the number of finished epochs, on rank zero, before each checkpoint at the end of an epoch.
    """

    def __init__(self, path: Path, epochs: int, every_epochs: int, every_minutes: float | None, export: Callable[[int], None]) -> None:
        self.path, self.epochs, self.every_epochs, self.export = path, epochs, every_epochs, export
        self.every_seconds = float("inf") if every_minutes is None else 60 * every_minutes
        self.asked: signal.Signals | None = None
        self._finished = 0
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Takes the signals over from Lightning, whose handler talks to other ranks in the middle of whatever the step is doing.
        Lightning's teardown gives them back to whom they belonged before the training."""
        self._finished = trainer.current_epoch
        self._saved_at = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._ask)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        wish = self._agreed_wish(module.device)
        last = batch_idx + 1 >= trainer.num_training_batches
        if wish == NOTHING or last or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._save(trainer)
        if wish == LEAVE:
            raise self._interruption(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._finished = trainer.current_epoch + 1
        wish = self._agreed_wish(module.device)
        if wish != NOTHING or self._finished % self.every_epochs == 0 or self._finished == self.epochs:
            if trainer.is_global_zero:
                self.export(self._finished)
            self._save(trainer)
        if wish == LEAVE and self._finished < self.epochs:
            raise self._interruption(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kinfolk"] = {
            "format": 1,
            "epoch": self._finished,
            "step": trainer.global_step,
            "finished": self._finished >= self.epochs,
        }

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at = time.monotonic()

    def _agreed_wish(self, device: torch.device) -> int:
        """The strongest wish of any rank: to leave, to save, or nothing."""
        due = time.monotonic() - self._saved_at > self.every_seconds
        wish = LEAVE if self.asked is not None else SAVE if due else NOTHING
        if distributed.world_size() == 1:
            return wish
        agreed = torch.tensor(wish, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def _interruption(self, trainer: pl.Trainer) -> InterruptedRunError:
        why = "Ctrl-C" if self.asked == signal.SIGINT else self.asked.name if self.asked is not None else "a signal to another rank"
        return InterruptedRunError(
            f"the training was ended by {why} after step {trainer.global_step} (epoch {trainer.current_epoch + 1} of {self.epochs}); "
            f"everything is saved in {self.path}, resume it to go on exactly from there"
        )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number)
