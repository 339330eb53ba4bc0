"""Checkpoints: written whole or not at all, with a digest of all their bytes, and read without running code of theirs.

Saving: at the end of an epoch, every so many minutes, and when the process is asked to end.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from kinfolk import distributed
from kinfolk.errors import KinfolkError
from kinfolk.files import UNFINISHED, DamagedFileError, check_sealed_zip, sync_folder, telling, write_by_name, write_sealed_zip
from kinfolk.models.weights import why_unreadable
from kinfolk.training.config import CheckpointConfig
from kinfolk.training.module import TrainingModule

FORMAT = 2
"""1 had neither digest nor the run's settings."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint without running any code from it; a damaged file is refused in one sentence."""
    try:
        check_sealed_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except Exception as error:  # pickle raises any
        raise DamagedFileError(
            f"the checkpoint {path} is damaged or was not written by this version of kinfolk: {why_unreadable(error)}"
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "kinfolk"} <= checkpoint.keys():
        raise KinfolkError(f"the checkpoint {path} was not written by kinfolk's training; give a run folder of `kinfolk train`")
    return checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the disk, made atomic; loads with `weights_only=True` whatever it is asked."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_sealed_zip(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))


NOTHING, SAVE, LEAVE = 0, 1, 2
BEST = "best.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedRunError(KinfolkError):
    """The training was asked to end before its last epoch; it can be resumed from its last checkpoint.

    Args:
        signal: the number of the signal that asked.
    """

    def __init__(self, message: str, signal: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signal = int(signal)


class Keeper(pl.Callback):
    """Writes the checkpoint, and ends the training after the current step when a signal asks for it.

    Only between two optimiser steps is everything in the checkpoint, so within an accumulation nothing is saved; and on the last batch of
    an epoch the end of the epoch is waited for, so that its line of metrics is written. A second Ctrl-C ends at once. A state that is not
    finite is never saved: the checkpoints before it stay.

    Args:
        path: of the checkpoint. Older ones beside it are `last-1.ckpt`, `last-2.ckpt`, …
        epochs: of the whole training.
        settings: when to save, and how many to keep.
        identity: which run the checkpoint belongs to; see `changes.py`.
        export: called with the number of finished epochs, on rank zero, before each checkpoint at the end of an epoch.
        accuracy: the kNN accuracy of the epoch that has just ended, on rank zero; None where it was not measured.
        state: what the checkpoint that is resumed says of itself; None at the start of a run.
    """

    def __init__(
        self,
        path: Path,
        epochs: int,
        settings: CheckpointConfig,
        identity: Mapping[str, Any],
        export: Callable[[int], None],
        accuracy: Callable[[], float | None],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.epochs, self.identity, self.export, self.accuracy = path, epochs, identity, export, accuracy
        self.every_epochs, self.keep, self.keep_best = settings.every_epochs, settings.keep, settings.best
        self.every_seconds = float("inf") if settings.every_minutes is None else 60 * settings.every_minutes
        self.asked: signal.Signals | None = None
        self.best = None if state is None else state.get("best")
        self._last = None if state is None else (int(state["step"]), int(state["epoch"]))
        self._finished = 0
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Takes the signals over from Lightning, whose handler talks to other ranks in the middle of whatever the step is doing.
        Lightning's teardown gives them back to whom they belonged before the training."""
        self._finished = trainer.current_epoch
        self._saved_at = time.monotonic()
        assert isinstance(module, TrainingModule)
        module.kept = self.kept
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._ask)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        wish = self._agreed_wish(module.device)
        last = batch_idx + 1 >= trainer.num_training_batches
        if wish == NOTHING or last or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._save(trainer, module)
        if wish == LEAVE:
            raise self._interruption(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._finished = trainer.current_epoch + 1
        wish = self._agreed_wish(module.device)
        better = self._is_better(module.device)
        if wish != NOTHING or better or self._finished % self.every_epochs == 0 or self._finished == self.epochs:
            self._require_finite(trainer, module)
            if trainer.is_global_zero:
                self.export(self._finished)
            self._save(trainer, module, checked=True)
            if better and trainer.is_global_zero:
                write_by_name(self.path.with_name(BEST), lambda copy: _linked(self.path, copy))
        if wish == LEAVE and self._finished < self.epochs:
            raise self._interruption(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kinfolk"] = {
            "format": FORMAT,
            "epoch": self._finished,
            "step": trainer.global_step,
            "epochs": self.epochs,
            "finished": self._finished >= self.epochs,
            "best": self.best,
            **self.identity,
        }

    def kept(self) -> str:
        """What there is to go on from, in words."""
        if self._last is None:
            return "no checkpoint had been saved yet"
        step, epoch = self._last
        older = [path.name for path in sorted(self.path.parent.glob("last-*.ckpt"))]
        also = f", with {', '.join(older)} before it" if older else ""
        return f"{self.path} holds the state after step {step} ({epoch} of {self.epochs} epochs done){also}"

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, checked: bool = False) -> None:
        """Writes the checkpoint beside its place, then moves it there; the one before becomes `last-1.ckpt`, and so on."""
        if not checked:
            self._require_finite(trainer, module)
        new = self.path.with_name(self.path.name + UNFINISHED)
        trainer.save_checkpoint(new, weights_only=False)
        if trainer.is_global_zero:
            with telling(self.path):
                self._shift()
                os.replace(new, self.path)
                sync_folder(self.path.parent)
        self._last = trainer.global_step, self._finished
        self._saved_at = time.monotonic()

    def _shift(self) -> None:
        """`last-1.ckpt` becomes `last-2.ckpt`, and `last.ckpt` gets the second name `last-1.ckpt`: at no moment is there none."""
        older = [self.path.with_name(f"{self.path.stem}-{number}.ckpt") for number in range(1, self.keep)]
        for new, old in pairwise(reversed(older)):
            if old.exists():
                os.replace(old, new)
        for path in set(self.path.parent.glob(f"{self.path.stem}-*.ckpt")) - set(older):  # of a run that kept more
            path.unlink()
        if older and self.path.exists():
            older[0].unlink(missing_ok=True)
            _linked(self.path, older[0])

    def _require_finite(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raises on all ranks if on any of them weights, BatchNorm statistics or the optimiser's state are not finite."""
        assert isinstance(module, TrainingModule)
        found = not_finite(module.framework, trainer.optimizers)
        failed = torch.tensor(int(found is not None), device=module.device)
        if distributed.world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            raise module.not_finite(
                f"{found or 'the state of another rank'} of {module.method} is not finite, so it is not saved,", *module.last
            )

    def _is_better(self, device: torch.device) -> bool:
        """Whether the epoch that has ended has the highest accuracy so far; the same on all ranks."""
        if not self.keep_best:
            return False
        accuracy = self.accuracy()
        better = accuracy is not None and (self.best is None or accuracy > self.best)
        if distributed.world_size() > 1:
            agreed = torch.tensor([float(better), accuracy or 0.0], dtype=torch.float64, device=device)
            dist.broadcast(agreed, 0)
            better, accuracy = bool(agreed[0]), float(agreed[1])
        if better:
            self.best = accuracy
        return better

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
            f"everything is saved in {self.path}, resume it to go on exactly from there",
            self.asked or signal.SIGTERM,
        )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            for each in SIGNALS:  # whoever presses it a third time need not end the clearing up
                signal.signal(each, signal.SIG_IGN)
            raise InterruptedRunError(f"the training was ended at once by a second Ctrl-C; {self.kept()}", signal.SIGINT)
        self.asked = signal.Signals(number)


def not_finite(framework: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """The name of the first parameter, BatchNorm statistic or state of the optimiser that is not finite; None where all are.

    Other buffers are not looked at: thresholds and levels may be infinite by intention.
    """
    named: dict[str, torch.Tensor] = dict(framework.named_parameters())
    for path, part in framework.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            named |= {f"{path}.{name}": buffer for name, buffer in part.named_buffers(recurse=False)}
    names = {id(parameter): name for name, parameter in named.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            of = names.get(id(parameter), "a parameter")
            named |= {f"the optimiser's {key} of {of}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    floats = {name: value.detach() for name, value in named.items() if value.is_floating_point()}
    if not floats or bool(torch.stack([value.isfinite().all() for value in floats.values()]).all()):
        return None
    return next(name for name, value in floats.items() if not value.isfinite().all())


def _linked(path: Path, name: Path) -> None:
    """A second name for a file, or a copy of it where the system has no second names."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
