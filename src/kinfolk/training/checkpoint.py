"""Checkpoints: the callback that saves them, and the reading of one.

A checkpoint is saved at the end of an epoch, every few minutes within one, and when a signal asks the process to end. It is written
atomically with a digest of all its bytes, and reading it never runs code from the file.
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
from typing import Any, final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from kinfolk import distributed
from kinfolk.data.transfer import HostCopy
from kinfolk.errors import InterruptedRunError, KinfolkError, counted
from kinfolk.files import (
    UNFINISHED,
    DamagedFileError,
    check_sealed_zip,
    explain_write_errors,
    move_into_place,
    write_by_name,
    write_sealed_zip,
)
from kinfolk.models.weights import why_unreadable
from kinfolk.training.config import CheckpointConfig
from kinfolk.training.module import TrainingModule

FORMAT = 2
"""Format 1 had neither a digest nor the settings of the run."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint without running any code from it. Raises `DamagedFileError` for a damaged file."""
    try:
        check_sealed_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except Exception as error:  # pickle may raise anything
        raise DamagedFileError(
            f"the checkpoint {path} is damaged or was not written by this version of kinfolk: {why_unreadable(error)}"
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "kinfolk"} <= checkpoint.keys():
        raise KinfolkError(f"the checkpoint {path} was not written by kinfolk's training; give a run folder of `kinfolk train`")
    return checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file access, with atomic writing; always loads with `weights_only=True`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_sealed_zip(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))


NOTHING, SAVE, STOP = 0, 1, 2
AGREE_EVERY, AGREE_SECONDS = 10, 5.0
"""Several GPUs agree on what to do after so many steps or seconds, whichever is less: each agreement is a collective."""
BEST = "best.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CheckpointSaver(pl.Callback):
    """Saves checkpoints, and ends the training after the current step when a signal arrives.

    A checkpoint is complete only between two optimiser steps, so nothing is saved within an accumulation. On the last batch of an epoch the
    callback waits for the end of the epoch, so that its line of metrics is written. A second Ctrl-C ends at once. A state that is not
    finite is never saved: the checkpoints before it stay.

    Args:
        path: the file of the checkpoint. Older ones beside it are `last-1.ckpt`, `last-2.ckpt`, …
        epochs: number of epochs of the whole training.
        settings: when to save, and how many checkpoints to keep.
        identity: the run that the checkpoint belongs to; see `settings.identity`.
        export: called on rank zero with the numbers of finished epochs and steps before each checkpoint.
        accuracy: returns the kNN accuracy of the epoch that has just ended, on rank zero; None if it was not measured.
        state: the `kinfolk` entry of the checkpoint that is resumed; None at the start of a run.
    """

    def __init__(
        self,
        path: Path,
        epochs: int,
        settings: CheckpointConfig,
        identity: Mapping[str, Any],
        export: Callable[[int, int], None],
        accuracy: Callable[[], float | None],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.epochs, self.identity, self.export, self.accuracy = path, epochs, identity, export, accuracy
        self.every_epochs, self.keep, self.keep_best = settings.every_epochs, settings.keep, settings.best
        self.every_seconds = float("inf") if settings.every_minutes is None else 60 * settings.every_minutes
        self.received: signal.Signals | None = None
        self.best = None if state is None else state.get("best")
        self._last = None if state is None else (int(state["step"]), int(state["epoch"]))
        self._finished = 0
        self.is_rank_zero = True
        self._saved_at = time.monotonic()
        self._agreement = Agreement()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replaces Lightning's signal handlers, which communicate with other ranks in the middle of a step. Lightning's teardown restores
        the handlers from before the training."""
        self._finished = trainer.current_epoch
        self.is_rank_zero = trainer.is_global_zero
        self._saved_at = time.monotonic()
        assert isinstance(module, TrainingModule)
        module.describe_saved = self.describe_saved
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if distributed.world_size() == 1 or module.device.type == "cpu":
            action = self._agreed_action(module.device)
        else:
            action = self._agreement.after_step(self._wanted_action(), module.device)
        last = batch_idx + 1 >= trainer.num_training_batches
        if action == NOTHING or last or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._save(trainer, module)
        if action == STOP:
            raise self._interruption(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._finished = trainer.current_epoch + 1
        action = self._agreed_action(module.device)
        better = self._is_better(module.device)
        if action != NOTHING or better or self._finished % self.every_epochs == 0 or self._finished == self.epochs:
            self._save(trainer, module)
            if better and trainer.is_global_zero:
                write_by_name(self.path.with_name(BEST), lambda copy: _link_or_copy(self.path, copy))
        if action == STOP and self._finished < self.epochs:
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

    def describe_saved(self) -> str:
        """Describes the last checkpoint in words, for messages."""
        if self._last is None:
            return "no checkpoint had been saved yet"
        step, epoch = self._last
        older = [path.name for path in sorted(self.path.parent.glob("last-*.ckpt"))]
        also = f", with {', '.join(older)} before it" if older else ""
        return f"{self.path} holds the state after step {step} ({epoch} of {counted(self.epochs, 'epoch')} done){also}"

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Writes the checkpoint under a temporary name and renames it; the previous one becomes `last-1.ckpt`, and so on."""
        self._require_finite(trainer, module)
        if trainer.is_global_zero:
            self.export(self._finished, trainer.global_step)
        new = self.path.with_name(self.path.name + UNFINISHED)
        trainer.save_checkpoint(new, weights_only=False)
        if trainer.is_global_zero:
            with explain_write_errors(self.path):
                self._shift()
                move_into_place(new, self.path)
        self._last = trainer.global_step, self._finished
        self._saved_at = time.monotonic()
        self._agreement = Agreement()

    def _shift(self) -> None:
        """`last-1.ckpt` becomes `last-2.ckpt`, and `last.ckpt` gets the second name `last-1.ckpt`, so `last.ckpt` exists at all times."""
        older = [self.path.with_name(f"{self.path.stem}-{number}.ckpt") for number in range(1, self.keep)]
        for new, old in pairwise(reversed(older)):
            if old.exists():
                os.replace(old, new)
        for path in set(self.path.parent.glob(f"{self.path.stem}-*.ckpt")) - set(older):  # left from a run that kept more
            path.unlink()
        if older and self.path.exists():
            older[0].unlink(missing_ok=True)
            _link_or_copy(self.path, older[0])

    def _require_finite(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raises on all ranks if weights, BatchNorm statistics or the state of the optimiser are not finite on any of them."""
        assert isinstance(module, TrainingModule)
        found = not_finite(module.framework, trainer.optimizers)
        failed = torch.tensor(int(found is not None), device=module.device)
        if distributed.world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            raise module.not_finite(
                f"{found or 'the state of another rank'} of {module.method} is not finite, so it is not saved,", *module.last_batch
            )

    def _is_better(self, device: torch.device) -> bool:
        """Whether the epoch that has ended has the highest accuracy so far; the answer is the same on all ranks."""
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

    def _agreed_action(self, device: torch.device) -> int:
        """The strongest action that any rank wants: stop, save, or nothing. Waits for the device if there are several ranks."""
        action = self._wanted_action()
        return action if distributed.world_size() == 1 else int(_highest_of_ranks(action, device))

    def _wanted_action(self) -> int:
        due = time.monotonic() - self._saved_at > self.every_seconds
        return STOP if self.received is not None else SAVE if due else NOTHING

    def _interruption(self, trainer: pl.Trainer) -> InterruptedRunError:
        why = (
            "Ctrl-C" if self.received == signal.SIGINT else self.received.name if self.received is not None else "a signal to another rank"
        )
        return InterruptedRunError(
            f"the training was ended by {why} after step {trainer.global_step} (epoch {trainer.current_epoch + 1} of {self.epochs}); "
            f"everything is saved in {self.path}, resume it (--resume) to go on exactly from there",
            self.received or signal.SIGTERM,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            for each in SIGNALS:  # a third Ctrl-C must not interrupt the clean-up
                signal.signal(each, signal.SIG_IGN)
            raise InterruptedRunError(f"the training was ended at once by a second Ctrl-C; {self.describe_saved()}", signal.SIGINT)
        if number == signal.SIGINT and self.is_rank_zero:
            os.write(2, b"\nCtrl-C: a checkpoint is saved after the current step; press Ctrl-C again to end at once\n")
        self.received = signal.Signals(number)


@final
class Agreement:
    """The strongest action that any rank wants, known to all ranks after the same step, without a wait of the host in any step.

    Ranks ask each other after every `AGREE_EVERY` steps, or more often where steps are slow, and read the answer one step later, when the
    device has the next step to compute. An answer counts until the state is saved.
    """

    def __init__(self) -> None:
        self.action, self.interval = NOTHING, 1
        self._answer: HostCopy | None = None
        self._steps, self._since = 0, time.monotonic()

    def after_step(self, wanted: int, device: torch.device) -> int:
        """The action that all ranks agreed on so far; `wanted`: the action of this rank."""
        if self._answer is not None:
            action, often = divmod(int(self._answer.value()), AGREE_EVERY)
            self.action, self.interval, self._answer = max(self.action, action), AGREE_EVERY - often, None
        self._steps += 1
        if self._steps < self.interval:
            return self.action
        seconds = (time.monotonic() - self._since) / self._steps
        interval = min(max(int(AGREE_SECONDS / max(seconds, 1e-9)), 1), AGREE_EVERY)
        # One number, of which the highest counts: the strongest action, and by it the shortest interval.
        self._answer = HostCopy(_highest_of_ranks(wanted * AGREE_EVERY + AGREE_EVERY - interval, device))
        self._steps, self._since = 0, time.monotonic()
        return self.action


def _highest_of_ranks(number: int, device: torch.device) -> torch.Tensor:
    highest = torch.full((), number, dtype=torch.int64, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest


def not_finite(framework: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """The name of the first parameter, BatchNorm statistic or state of the optimiser that is not finite; None where all are.

    Other buffers are not checked: thresholds and levels may be infinite on purpose.
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


def _link_or_copy(path: Path, name: Path) -> None:
    """Makes a hard link to a file, or a copy of it where the file system has no hard links."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
