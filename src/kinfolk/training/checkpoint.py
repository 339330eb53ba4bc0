"""Checkpoints: the callback that saves them, and the reading of one.

A checkpoint is saved at the end of an epoch, every few minutes within one, and when a signal asks
the process to end. It is written atomically with a digest of all its bytes, and reading it never
runs code from the file.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
from kinfolk.data.augmentation.views import Views
from kinfolk.data.transfer import HostCopy
from kinfolk.embedding import evaluating
from kinfolk.errors import InterruptedRunError, KinfolkError, plural, short
from kinfolk.files import (
    UNFINISHED,
    DamagedFileError,
    check_sealed_zip,
    explain_write_errors,
    move_into_place,
    why_failed,
    write_by_name,
    write_sealed_zip,
)
from kinfolk.frameworks.clip import ImageText
from kinfolk.models.weights import why_unreadable
from kinfolk.training.config import CheckpointConfig
from kinfolk.training.module import TrainingModule

FORMAT = 2
"""Format 1 had neither a digest nor the settings of the run."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Loads a checkpoint without running any code from it. Raises `DamagedFileError` for a damaged
    file."""
    try:
        check_sealed_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except Exception as error:  # pickle may raise anything
        raise DamagedFileError(
            f"the checkpoint {path} is damaged or was not written by this version of kinfolk:"
            f" {why_unreadable(error)}"
        ) from error
    if (
        not isinstance(checkpoint, dict)
        or not {"state_dict", "loops", "kinfolk"} <= checkpoint.keys()
    ):
        raise KinfolkError(
            f"the checkpoint {path} was not written by kinfolk's training; give a run folder of"
            " `kinfolk train`"
        )
    return checkpoint


def read_complete_checkpoint(path: Path) -> dict[str, Any]:
    """As `read_checkpoint`, for resuming. A file that lacks a part of the training's state raises
    `DamagedFileError`."""
    checkpoint = read_checkpoint(path)
    fault = structure_fault(checkpoint)
    if fault is not None:
        raise DamagedFileError(f"the checkpoint {path} is incomplete or was edited: {fault}")
    return checkpoint


WHOLE_NUMBERS = ("epoch", "global_step", "kinfolk.epoch", "kinfolk.step", "kinfolk.epochs")
FIT_LOOP = "loops.fit_loop"


def structure_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """What is missing or of a wrong type in a checkpoint of a training, by name; None if it is
    complete.

    Example:
        >>> structure_fault({"kinfolk": {}, "epoch": "two"})
        '`epoch` is str instead of a whole number'
    """
    for name in WHOLE_NUMBERS:
        section, _, key = name.rpartition(".")
        place = checkpoint.get(section) if section else checkpoint
        value = place.get(key) if isinstance(place, Mapping) else None
        if type(value) is not int or value < 0:
            return _wrong(name, value, "a whole number")
    entry = checkpoint["kinfolk"]
    for name, kind in {
        "samples": str,
        "num_samples": int,
        "settings": dict,
        "settings_digest": str,
    }.items():
        # a file of an older version has none; `require_identity` says so
        if name in entry and not isinstance(entry[name], kind):
            return _wrong(f"kinfolk.{name}", entry[name], kind.__name__)
    if not isinstance(entry.get("best"), float | int | None):
        return _wrong("kinfolk.best", entry["best"], "a number")
    if entry["step"] != checkpoint["global_step"]:
        return f"`kinfolk.step` is {entry['step']} and `global_step` is {checkpoint['global_step']}"
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, Mapping) or not weights:
        return _wrong("state_dict", weights, "a mapping of names to tensors")
    for key, value in weights.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            return _wrong(f"state_dict.{key}", value, "a tensor")
    return _optimizer_fault(checkpoint) or _loop_fault(checkpoint) or _callback_fault(checkpoint)


def _optimizer_fault(checkpoint: Mapping[str, Any]) -> str | None:
    for name in ("optimizer_states", "lr_schedulers"):
        states = checkpoint.get(name)
        if not isinstance(states, list) or len(states) != 1 or not isinstance(states[0], Mapping):
            return _wrong(name, states, "a list with one state")
    state, groups = (
        checkpoint["optimizer_states"][0].get(name) for name in ("state", "param_groups")
    )
    if (
        not isinstance(groups, list)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups)
    ):
        return _wrong("optimizer_states.param_groups", groups, "a list of groups")
    for group in groups:
        if not isinstance(group.get("params"), list) or not isinstance(
            group.get("lr"), float | int
        ):
            return "`optimizer_states.param_groups` has a group without `params` or `lr`"
    # SGD without momentum has no state
    stateful = checkpoint["global_step"] > 0 and any(group.get("momentum", 1) for group in groups)
    if not isinstance(state, Mapping) or (stateful and not state):
        return _wrong("optimizer_states.state", state, "the state of each parameter")
    expected = checkpoint["kinfolk"].get("optimized", len(state))  # an earlier version has none
    if len(state) != expected:
        return f"`optimizer_states.state` has {len(state)} parameters instead of {expected}"
    for number, each in state.items():
        if not isinstance(each, Mapping) or each.keys() != next(iter(state.values())).keys():
            return f"`optimizer_states.state` has other names for parameter {number}"
        for name, value in each.items():
            if stateful and not isinstance(value, torch.Tensor | float | int):
                return _wrong(f"optimizer_states.state.{number}.{name}", value, "a tensor")
    schedule = checkpoint["lr_schedulers"][0]
    for name in ("last_epoch", "_step_count"):
        if type(schedule.get(name)) is not int:
            return _wrong(f"lr_schedulers.{name}", schedule.get(name), "a whole number")
    rates = schedule.get("base_lrs")
    if (
        not isinstance(rates, list)
        or len(rates) != len(groups)
        or not all(isinstance(rate, float | int) for rate in rates)
    ):
        return _wrong("lr_schedulers.base_lrs", rates, "a rate for each group of parameters")
    return None


def _loop_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """The position of the training. Lightning starts from the beginning where it is missing."""
    loops = checkpoint.get("loops")
    loop = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    if not isinstance(loop, Mapping):
        return _wrong(FIT_LOOP, loop, "the position of the training")
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.scheduler_progress"):
        part = loop.get(name)
        for which in ("total", "current"):
            counts = part.get(which) if isinstance(part, Mapping) else None
            if not isinstance(counts, Mapping):
                return _wrong(f"{FIT_LOOP}.{name}.{which}", counts, "whole numbers")
    if (fault := _count_fault(FIT_LOOP, loop)) is not None:
        return fault
    try:
        steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"][
            "total"
        ]["completed"]
        position = loop["state_dict"]["combined_loader"][0]
        placed = position.keys() >= {"epoch", "position"}
    except (KeyError, TypeError, IndexError, AttributeError):
        return f"`{FIT_LOOP}` has no position of the optimiser or of the loader"
    if not placed:
        return f"`{FIT_LOOP}` has no position of the loader"
    if steps != checkpoint["global_step"]:
        return f"`{FIT_LOOP}` is at step {steps} and `global_step` is {checkpoint['global_step']}"
    finished = checkpoint["kinfolk"]["epoch"]
    for name, epochs in loop["epoch_progress"]["current"].items():
        # one more has begun where a checkpoint is saved within an epoch
        if epochs > finished + (name in ("ready", "started")):
            return f"`{FIT_LOOP}` is at epoch {epochs} and `kinfolk.epoch` is {finished}"
    return None


def _count_fault(name: str, value: object) -> str | None:
    """The first part of a loop's state that is not a whole number, or of a pair of counts, `total`
    and `current`, that lacks a part."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return None if isinstance(value, int) else _wrong(name, value, "a whole number")
    for each in ("total", "current") if "total" in value or "current" in value else ():
        counts, other = value.get(each), value.get("current" if each == "total" else "total")
        if not isinstance(counts, Mapping):
            return _wrong(f"{name}.{each}", counts, "whole numbers")
        expected = {"ready", "completed", *(other if isinstance(other, Mapping) else ())}
        if missing := sorted(expected - counts.keys()):
            return _wrong(f"{name}.{each}.{missing[0]}", None, "a whole number")
    faults = (_count_fault(f"{name}.{key}", part) for key, part in value.items())
    return next((fault for fault in faults if fault is not None), None)


def _callback_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """The metrics of an epoch that is not finished, and the time of its refresh."""
    callbacks = checkpoint.get("callbacks")
    log = callbacks.get("Journal") if isinstance(callbacks, Mapping) else None
    refresh = callbacks.get("Refresh") if isinstance(callbacks, Mapping) else None
    if not isinstance(log, Mapping) or not isinstance(refresh, Mapping):
        return _wrong("callbacks", None, "the metrics of the epoch")
    kinds: dict[str, Any] = {
        "loss": torch.Tensor,
        "counts": torch.Tensor,
        "steps": int,
        "seconds": float | int,
    }
    wrong = next(
        (name for name, kind in kinds.items() if not isinstance(log.get(name), kind)), None
    )
    if wrong is not None:
        return _wrong(f"callbacks.Journal.{wrong}", log.get(wrong), "a number")
    if log["loss"].ndim:
        return f"`callbacks.Journal.loss` has the shape {tuple(log['loss'].shape)} instead of ()"
    return None


def _wrong(name: str, value: object, expected: str) -> str:
    if value is None:
        return f"`{name}` is missing"
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str) and not value:
        return f"`{name}` is empty instead of {expected}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"`{name}` is {value} instead of {expected}"
    return f"`{name}` is {type(value).__name__} instead of {expected}"


def restore_error(error: Exception, path: Path) -> KinfolkError:
    """The error for a state that cannot be loaded, such as a store of another size. `error` is the
    one of torch or Lightning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = (
        lines[1].rstrip(". ")
        if len(lines) > 1 and "loading state_dict" in lines[0]
        else why_failed(error)
    )
    return KinfolkError(
        f"the checkpoint {path} does not fit this run: {short(why, 400)}; put the run's own"
        " checkpoint back, or start a new run"
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file access, with atomic writing; always loads with `weights_only=True`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        write_sealed_zip(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        if Path(path).name == ".temp.ckpt":  # the weights that a forked process hands to its parent
            weights: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return weights
        return read_checkpoint(Path(path))


NOTHING, SAVE, STOP = 0, 1, 2
AGREE_EVERY, AGREE_SECONDS = 10, 5.0
"""Several GPUs agree on what to do after this many steps or seconds, whichever is less: each
agreement is a collective."""
CHECKED_SAMPLES = 16
"""Samples of the last batch whose features must be finite before a checkpoint is saved."""
BEST = "best.ckpt"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CheckpointSaver(pl.Callback):
    """Saves checkpoints, and ends the training after the current step when a signal arrives.

    A checkpoint is complete only between two optimiser steps, so nothing is saved within an
    accumulation. On the last batch of an epoch the callback waits for the end of the epoch, so that
    its line of metrics is written. A second Ctrl-C ends at once. A state that is not finite, or
    whose features of a batch are not finite, is never saved: the checkpoints before it stay.

    Args:
        path: the file of the checkpoint. Older ones next to it are `last-1.ckpt`, `last-2.ckpt`, …
        epochs: number of epochs of the whole training.
        settings: when to save, and how many checkpoints to keep.
        identity: the run that the checkpoint belongs to; see `settings.identity`.
        export: called on rank zero with the numbers of finished epochs and steps before each
            checkpoint.
        accuracy: returns the kNN accuracy of the epoch that has just ended, on rank zero; None if
            it was not measured.
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
        self.path, self.epochs, self.identity, self.export, self.accuracy = (
            path,
            epochs,
            identity,
            export,
            accuracy,
        )
        self.every_epochs, self.keep, self.keep_best = (
            settings.every_epochs,
            settings.keep,
            settings.best,
        )
        self.every_seconds = (
            float("inf") if settings.every_minutes is None else 60 * settings.every_minutes
        )
        self.received: signal.Signals | None = None
        self.best = None if state is None else state.get("best")
        self._last = None if state is None else (int(state["step"]), int(state["epoch"]))
        self._finished = 0
        self.is_rank_zero = True
        self.started = False  # whether the state of a resumed training has been restored
        self._saved_at = time.monotonic()
        self._agreement = Agreement()
        # pixels, aspects and tokens of some samples of the last batch
        self._inputs: dict[str, torch.Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replaces Lightning's signal handlers, which communicate with other ranks in the middle of
        a step. Lightning's teardown restores the handlers from before the training."""
        self.started = True
        self._require_fitting_optimizer(trainer)
        self._finished = trainer.current_epoch
        self.is_rank_zero = trainer.is_global_zero
        self._saved_at = time.monotonic()
        assert isinstance(module, TrainingModule)
        module.describe_saved = self.describe_saved
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._inputs = {
            name: batch[name][:CHECKED_SAMPLES]
            for name in ("pixels", "aspect", "tokens")
            if name in batch
        }
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
        if (
            action != NOTHING
            or better
            or self._finished % self.every_epochs == 0
            or self._finished == self.epochs
        ):
            self._save(trainer, module)
            if better and trainer.is_global_zero:
                write_by_name(
                    self.path.with_name(BEST), lambda copy: _link_or_copy(self.path, copy)
                )
        if action == STOP and self._finished < self.epochs:
            raise self._interruption(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["kinfolk"] = {
            "format": FORMAT,
            "epoch": self._finished,
            "step": trainer.global_step,
            "epochs": self.epochs,
            "finished": self._finished >= self.epochs,
            "best": self.best,
            "optimized": len(trainer.optimizers[0].state),
            **self.identity,
        }

    def describe_saved(self) -> str:
        """Describes the last checkpoint in words, for messages."""
        if self._last is None:
            return "no checkpoint had been saved yet"
        step, epoch = self._last
        older = [path.name for path in sorted(self.path.parent.glob("last-*.ckpt"))]
        also = f", with {', '.join(older)} before it" if older else ""
        return (
            f"{self.path} holds the state after step {step} ({epoch} of"
            f" {plural(self.epochs, 'epoch')} done){also}"
        )

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Writes the checkpoint under a temporary name and renames it; the previous one becomes
        `last-1.ckpt`, and so on."""
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
        """`last-1.ckpt` becomes `last-2.ckpt`, and `last.ckpt` gets the second name `last-1.ckpt`,
        so `last.ckpt` exists at all times."""
        older = [
            self.path.with_name(f"{self.path.stem}-{number}.ckpt") for number in range(1, self.keep)
        ]
        for new, old in pairwise(reversed(older)):
            if old.exists():
                os.replace(old, new)
        # left from a run that kept more
        for path in set(self.path.parent.glob(f"{self.path.stem}-*.ckpt")) - set(older):
            path.unlink()
        if older and self.path.exists():
            older[0].unlink(missing_ok=True)
            _link_or_copy(self.path, older[0])

    def _require_fitting_optimizer(self, trainer: pl.Trainer) -> None:
        """Refuses a restored state of the optimiser that lacks a setting, or whose tensors have
        other shapes than its parameters."""
        for optimizer in trainer.optimizers:
            faults = [
                f"the optimiser's `{name}` is {group.get(name)}"
                for group in optimizer.param_groups
                for name, default in optimizer.defaults.items()
                if name not in group
                or (isinstance(default, float | int) and not isinstance(group[name], float | int))
            ]
            faults += [
                f"the optimiser's {key} has the shape {tuple(value.shape)}, and its parameter"
                f" {tuple(parameter.shape)}"
                for parameter, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape
            ]
            if faults:
                raise KinfolkError(
                    f"the checkpoint {self.path} does not fit this run: {faults[0]}; put the run's"
                    " own checkpoint back, or start a new run"
                )

    def _require_finite(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raises on all ranks if weights, BatchNorm statistics, the state of the optimiser or the
        features of a batch are not finite on any of them."""
        assert isinstance(module, TrainingModule)
        found = not_finite(module.framework, trainer.optimizers)
        if found is None and self._inputs is not None:
            found = not_finite_feature(module, **self._inputs)
        failed = torch.tensor(int(found is not None), device=module.device)
        if distributed.world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            raise module.not_finite(
                f"{found or 'the state of another rank'} of {module.method} is not finite, so it is"
                " not saved,",
                *module.last_batch,
            )

    def _is_better(self, device: torch.device) -> bool:
        """Whether the epoch that has ended has the highest accuracy so far; the answer is the same
        on all ranks."""
        if not self.keep_best:
            return False
        accuracy = self.accuracy()
        better = accuracy is not None and (self.best is None or accuracy > self.best)
        if distributed.world_size() > 1:
            agreed = torch.tensor(
                [float(better), accuracy or 0.0], dtype=torch.float64, device=device
            )
            dist.broadcast(agreed, 0)
            better, accuracy = bool(agreed[0]), float(agreed[1])
        if better:
            self.best = accuracy
        return better

    def _agreed_action(self, device: torch.device) -> int:
        """The strongest action that any rank wants: stop, save, or nothing. Waits for the device if
        there are several ranks."""
        action = self._wanted_action()
        return action if distributed.world_size() == 1 else int(_highest_of_ranks(action, device))

    def _wanted_action(self) -> int:
        due = time.monotonic() - self._saved_at > self.every_seconds
        return STOP if self.received is not None else SAVE if due else NOTHING

    def _interruption(self, trainer: pl.Trainer) -> InterruptedRunError:
        """The error that ends the training after its state was saved. Further signals are ignored:
        one that is raised inside of the clean-up would print a traceback and change nothing."""
        _ignore_signals()
        why = (
            "Ctrl-C"
            if self.received == signal.SIGINT
            else self.received.name
            if self.received is not None
            else "a signal to another rank"
        )
        return InterruptedRunError(
            f"the training was ended by {why} after step {trainer.global_step} (epoch"
            f" {trainer.current_epoch + 1} of {self.epochs}); everything is saved in {self.path},"
            " resume it (--resume) to go on exactly from there",
            self.received or signal.SIGTERM,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            _ignore_signals()  # a third Ctrl-C must not interrupt the clean-up
            raise InterruptedRunError(
                f"the training was ended at once by a second Ctrl-C; {self.describe_saved()}",
                signal.SIGINT,
            )
        if number == signal.SIGINT and self.is_rank_zero:
            os.write(
                2,
                b"\nCtrl-C: a checkpoint is saved after the current step; press Ctrl-C again to end"
                b" at once\n",
            )
        self.received = signal.Signals(number)


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)


@final
class Agreement:
    """The strongest action that any rank wants, known to all ranks after the same step, without a
    wait of the host in any step.

    Ranks ask each other after every `AGREE_EVERY` steps, or more often where steps are slow, and
    read the answer one step later, when the device has the next step to compute. An answer counts
    until the state is saved.
    """

    def __init__(self) -> None:
        self.action, self.interval = NOTHING, 1
        self._answer: HostCopy | None = None
        self._steps, self._since = 0, time.monotonic()

    def after_step(self, wanted: int, device: torch.device) -> int:
        """The action that all ranks agreed on so far; `wanted`: the action of this rank."""
        if self._answer is not None:
            action, often = divmod(int(self._answer.value()), AGREE_EVERY)
            self.action, self.interval, self._answer = (
                max(self.action, action),
                AGREE_EVERY - often,
                None,
            )
        self._steps += 1
        if self._steps < self.interval:
            return self.action
        seconds = (time.monotonic() - self._since) / self._steps
        interval = min(max(int(AGREE_SECONDS / max(seconds, 1e-9)), 1), AGREE_EVERY)
        # One number, of which the highest counts: the strongest action, and by it the shortest
        # interval.
        self._answer = HostCopy(
            _highest_of_ranks(wanted * AGREE_EVERY + AGREE_EVERY - interval, device)
        )
        self._steps, self._since = 0, time.monotonic()
        return self.action


def _highest_of_ranks(number: int, device: torch.device) -> torch.Tensor:
    highest = torch.full((), number, dtype=torch.int64, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest


def not_finite(framework: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """The name of the first parameter, BatchNorm statistic or state of the optimiser that is not
    finite; None where all are.

    Other buffers are not checked: thresholds and levels may be infinite on purpose.
    """
    named: dict[str, torch.Tensor] = dict(framework.named_parameters())
    for path, part in framework.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            named |= {
                f"{path}.{name}": buffer for name, buffer in part.named_buffers(recurse=False)
            }
    names = {id(parameter): name for name, parameter in named.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            of = names.get(id(parameter), "a parameter")
            named |= {
                f"the optimiser's {key} of {of}": value
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
    floats = {name: value.detach() for name, value in named.items() if value.is_floating_point()}
    if not floats or bool(torch.stack([value.isfinite().all() for value in floats.values()]).all()):
        return None
    return next(name for name, value in floats.items() if not value.isfinite().all())


@torch.no_grad()
def not_finite_feature(
    module: TrainingModule,
    pixels: torch.Tensor,
    aspect: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> str | None:
    """Which of the features in evaluation mode and float32, as `embed` and `eval` use them, are not
    finite; None where all are. Finite weights are not enough: a learning rate that is far too high
    leaves weights whose products overflow."""
    views, framework = module.views, module.framework
    if not isinstance(views, Views):
        return None
    stance = getattr(torch.compiler, "set_stance", None)  # no compilation for a few images
    eager = nullcontext() if stance is None else stance("force_eager")
    with evaluating(framework), torch.autocast(module.device.type, enabled=False), eager:
        images = views.evaluate(pixels.to(module.device), aspect.to(module.device))
        found = {"an image feature": framework.features(images).isfinite().all()}
        found["an image embedding"] = framework.embed(images).isfinite().all()
        if isinstance(framework, ImageText) and tokens is not None:
            embedding = framework.embed_text(tokens.to(module.device))
            found["a caption embedding"] = embedding.isfinite().all()
    return next((name for name, is_finite in found.items() if not is_finite), None)


def _link_or_copy(path: Path, name: Path) -> None:
    """Makes a hard link to a file, or a copy of it where the file system has no hard links."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
