"""Checkpoints: saving and reading them."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from kinfolk import distributed
from kinfolk.data.views import Views
from kinfolk.errors import InterruptedRunError, KinfolkError, plural, short
from kinfolk.files import (
    UNFINISHED,
    DamagedFileError,
    check_sealed_zip,
    explain_write_errors,
    move_into_place,
    why_failed,
    write_sealed_zip,
)
from kinfolk.frameworks.clip import ImageText
from kinfolk.models.heads import evaluating
from kinfolk.models.weights import why_unreadable
from kinfolk.training.config import TrainConfig
from kinfolk.training.module import TrainingModule


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Runs no code from the checkpoint; a damaged one raises `DamagedFileError`."""
    try:
        check_sealed_zip(path)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("state_dict", "loops", "kinfolk"):
            checkpoint[name].keys()
        for name in ("samples", "settings", "num_samples", "epoch", "step"):
            checkpoint["kinfolk"][name]
    except FileNotFoundError:
        raise KinfolkError(f"there is no checkpoint at {path}") from None
    except Exception as error:  # pickle may raise anything
        raise DamagedFileError(
            f"the checkpoint {path} is damaged or was not written by this version of kinfolk:"
            f" {why_unreadable(error)}"
        ) from error
    return checkpoint


def restore_error(error: Exception, path: Path) -> KinfolkError:
    lines = str(error).splitlines()
    listed = len(lines) > 1 and "loading state_dict" in lines[0]
    reason = lines[1].strip(" \t.") if listed else why_failed(error)
    return KinfolkError(
        f"the checkpoint {path} does not fit this run: {short(reason, 400)}; put the run's own"
        " checkpoint back, or start a new run"
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        write_sealed_zip(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


NOTHING, SAVE, STOP = 0, 1, 2
AGREE_EVERY = 10
"""Steps between two agreements of several GPUs; the host waits for the answer."""
CHECKED_SAMPLES = 16
"""Samples of the last batch whose features must be finite before a checkpoint is saved."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CheckpointSaver(pl.Callback):
    """Saves checkpoints, and ends the training after the current step when a signal arrives, at
    once at a second Ctrl-C. Nothing is saved within an accumulation of gradients, before the
    metrics of an epoch are written, or if the state is not finite. `export` is called on rank zero
    with the finished epochs and steps before each checkpoint; `state`: of the checkpoint that is
    resumed."""

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        identity: Mapping[str, Any],
        export: Callable[[int, int], None],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.identity, self.export = path, identity, export
        self.epochs, self.settings, self.state = config.epochs, config.checkpoint, state
        self.every_seconds = 60 * (self.settings.every_minutes or math.inf)
        self.received: signal.Signals | None = None
        self._last = None if state is None else (int(state["step"]), int(state["epoch"]))
        self._finished, self._saved_at = 0, time.monotonic()
        self.is_rank_zero = True
        self._inputs: dict[str, torch.Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replaces Lightning's signal handlers, which communicate in the middle of a step."""
        assert isinstance(module, TrainingModule)
        # Lightning starts from the beginning where the position is missing
        found = trainer.global_step, trainer.current_epoch
        if self.state is not None and found != (self.state["step"], self.state["epoch"]):
            reason = f"its position is step {found[0]} of epoch {found[1]}"
            raise restore_error(ValueError(reason), self.path)
        module.started = True
        self._finished = trainer.current_epoch
        self.is_rank_zero = trainer.is_global_zero
        self._saved_at = time.monotonic()
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
        names = ("pixels", "aspect", "tokens")
        self._inputs = {name: batch[name][:CHECKED_SAMPLES] for name in names if name in batch}
        done = batch_idx + 1
        if done >= trainer.num_training_batches or done % trainer.accumulate_grad_batches:
            return
        waits = distributed.world_size() > 1 and module.device.type != "cpu"
        if waits and trainer.global_step % AGREE_EVERY:
            return
        action = self._agreed_action(module.device)
        if action == NOTHING:
            return
        self._save(trainer, module)
        if action == STOP:
            raise self._interruption(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._finished = trainer.current_epoch + 1
        action = self._agreed_action(module.device)
        due = self._finished % self.settings.every_epochs == 0 or self._finished == self.epochs
        if action != NOTHING or due:
            self._save(trainer, module)
        if action == STOP and self._finished < self.epochs:
            raise self._interruption(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["kinfolk"] = {
            "epoch": self._finished,
            "step": trainer.global_step,
            "epochs": self.epochs,
            "finished": self._finished >= self.epochs,
            **self.identity,
        }

    def describe_saved(self) -> str:
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

    def _shift(self) -> None:
        """A run that is killed now continues from `last-1.ckpt`."""
        numbers = range(1, self.settings.keep)
        kept = [self.path, *(self.path.with_name(f"last-{number}.ckpt") for number in numbers)]
        for new, old in pairwise(reversed(kept)):
            if old.exists():
                os.replace(old, new)
        # left from a run that kept more
        for path in set(self.path.parent.glob("last-*.ckpt")) - set(kept):
            path.unlink()

    def _require_finite(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        found = not_finite(module.framework, trainer.optimizers)
        if found is None and self._inputs is not None:
            found = not_finite_feature(module, self._inputs)
        if distributed.max_over_ranks(int(found is not None), module.device):
            raise module.not_finite(
                f"no checkpoint is saved: {found or 'the state of another rank'} of {module.method}"
            )

    def _agreed_action(self, device: torch.device) -> int:
        due = time.monotonic() - self._saved_at > self.every_seconds
        action = STOP if self.received is not None else SAVE if due else NOTHING
        return distributed.max_over_ranks(action, device)

    def _interruption(self, trainer: pl.Trainer) -> InterruptedRunError:
        _ignore_signals()  # one in the clean-up would only print a traceback
        why = "a signal to another rank" if self.received is None else self.received.name
        return InterruptedRunError(
            f"the training was ended by {why.replace('SIGINT', 'Ctrl-C')} after step"
            f" {trainer.global_step} (epoch {trainer.current_epoch + 1} of {self.epochs});"
            f" everything is saved in {self.path}, resume it (--resume) to go on exactly from"
            " there",
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
            saving = "a checkpoint is saved after the current step"
            os.write(2, f"\nCtrl-C: {saving}; press Ctrl-C again to end at once\n".encode())
        self.received = signal.Signals(number)


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)


def not_finite(framework: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Only BatchNorm's buffers count: others, such as thresholds, may be infinite on purpose."""
    named: dict[str, Any] = dict(framework.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for path, part in framework.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            buffers = part.named_buffers(recurse=False)
            named |= {f"{path}.{name}": buffer for name, buffer in buffers}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            of = names.get(id(parameter), "a parameter")
            named |= {f"the optimiser's {key} of {of}": value for key, value in state.items()}
    finite = {
        name: value.detach().isfinite().all()
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    on_device = [each.to(next(iter(finite.values())).device) for each in finite.values()]
    if not finite or bool(torch.stack(on_device).all()):  # one wait for the device
        return None
    return next(name for name, is_finite in finite.items() if not is_finite)


@torch.no_grad()
def not_finite_feature(module: TrainingModule, batch: dict[str, torch.Tensor]) -> str | None:
    """Products of finite weights may overflow."""
    device, framework = module.device, module.framework
    if not isinstance(module.views, Views):
        return None
    stance = getattr(torch.compiler, "set_stance", None)  # no compilation for a few images
    eager = nullcontext() if stance is None else stance("force_eager")
    with evaluating(framework), torch.autocast(device.type, enabled=False), eager:
        images = module.views.evaluate(batch["pixels"].to(device), batch["aspect"].to(device))
        found = {
            "an image feature": framework.features(images),
            "an image embedding": framework.embed(images),
        }
        if isinstance(framework, ImageText) and "tokens" in batch:
            found["a caption embedding"] = framework.embed_text(batch["tokens"].to(device))
    return next((name for name, value in found.items() if not value.isfinite().all()), None)
