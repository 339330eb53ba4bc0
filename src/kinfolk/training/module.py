"""GradCache: batches whose activations do not fit into memory, with the exact gradient of the whole batch.

Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021. The encoder sees the batch in chunks and keeps no
activations; the loss, and its gradient with respect to the embeddings, is taken once over the joined embeddings; then each chunk is
computed again, this time with its activations, and the gradient is propagated through it. The cost is one more forward pass of the encoder.

Each chunk is a checkpoint of `torch.utils.checkpoint` (the form without a nested backward pass): autograd computes the chunks one after
the other, last chunk first, and gives every parameter its gradient once, summed over chunks, so DistributedDataParallel needs nothing
special. Nothing here depends on the loss, the detector or the framework.

The Lightning module: makes views of a batch on the device, asks the framework for the loss, and stops on one that is not finite.

Dimension key: B batch, V views, N data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinfolk import distributed
from kinfolk.errors import KinfolkError
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.moco import MomentumCopy
from kinfolk.seeding import derive_seed, generator
from kinfolk.stores.per_sample import finite
from kinfolk.training.loader import BatchLoader, PixelSource, TextSource

if TYPE_CHECKING:
    from kinfolk.frameworks.base import Framework


@contextmanager
def in_chunks(modules: Iterable[nn.Module], number: int) -> Iterator[None]:
    """Within this context each of `modules` processes the rows of its first argument in `number` chunks.

    The backward pass may come after the context. A chunk holds every `number`-th row, so that both views of a sample are in one chunk
    where the batch is a multiple of `number`. Random numbers (dropout) are the same in both passes over a chunk, and buffers such as the
    running statistics of BatchNorm are updated by the first pass only.

    BatchNorm within `modules` normalises each chunk by its own statistics, as it does on that many devices without `sync_batchnorm`: the
    gradient is exact for that function, which is not the function of the whole batch. Networks without BatchNorm give the loss and the
    gradient of the whole batch to rounding.

    Args:
        modules: networks whose activations take the memory; their first argument and their result have the batch in front.
        number: of chunks; 1 changes nothing.

    Example:
        >>> encoder = nn.Linear(3, 2)
        >>> with in_chunks([encoder], 2):
        ...     loss = encoder(torch.ones(4, 3)).sum()
        >>> loss.backward()
        >>> encoder.bias.grad.tolist()
        [4.0, 4.0]
    """
    if number < 1:
        raise ValueError(f"`number` (={number}) must be at least 1")
    with ExitStack() as stack:
        for module in modules if number > 1 else ():
            stack.enter_context(_replaced_forward(module, number))
        yield


def encoders_of(framework: Framework) -> list[nn.Module]:
    """The networks of a framework that see images or tokens: encoder, text encoder, and the momentum copy's encoder. Heads and predictors
    are small; they process the whole batch."""
    found = [framework.encoder]
    text = getattr(framework, "text_encoder", None)
    if isinstance(text, nn.Module):
        found.append(text)
    return [*found, *(part.encoder for part in framework.modules() if isinstance(part, MomentumCopy))]


@contextmanager
def _replaced_forward(module: nn.Module, number: int) -> Iterator[None]:
    """An attribute of the instance hides the class's `forward` for a while; the names in `state_dict` stay as they are."""
    forward: Callable[..., Tensor] = module.forward
    own = module.__dict__.get("forward")

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _kept_buffers(module)

    def one_chunk(chunk: Tensor, format_: torch.memory_format, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        return forward(chunk.contiguous(memory_format=format_), *args, **options)

    def chunked(rows: Tensor, *args: Any, **options: Any) -> Tensor:
        wide = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
        format_ = torch.channels_last if wide else torch.contiguous_format
        step = max(1, min(number, len(rows)))
        run = partial(checkpoint, use_reentrant=False, context_fn=contexts) if torch.is_grad_enabled() else _call
        done = [run(one_chunk, rows[k::step], format_, args, options) for k in range(step)]
        order = torch.arange(len(rows), device=rows.device)
        return torch.cat(done).index_select(0, torch.cat([order[k::step] for k in range(step)]).argsort())

    module.forward = chunked
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Within this context the module works on copies of its buffers."""
    held = [(part, name, value) for part in module.modules() for name, value in part._buffers.items() if value is not None]
    for part, name, value in held:
        part._buffers[name] = value.clone()
    try:
        yield
    finally:
        for part, name, value in held:
            part._buffers[name] = value


class NonFiniteLossError(KinfolkError):
    """The loss of a step was not a finite number."""


class ViewMaker(Protocol):
    """What the module needs of the views; `Views` has it."""

    def __call__(self, pixels: Tensor, generator: torch.Generator, aspect: Tensor | None = None, num_views: int = 2) -> Tensor: ...


class TrainingModule(pl.LightningModule):
    """A framework in training.

    All randomness of a step is a function of seed, epoch, step and rank: the views have a generator of their own, and torch's global
    generator, which dropout and the like draw from, is set anew before every step. A resumed training therefore needs none of it restored.

    Args:
        framework: what is trained; the whole state of the training is its `state_dict`.
        data: the samples.
        views: makes the views from uint8 pixels.
        optimizers: (framework, steps per epoch) → what `configure_optimizers` returns.
        method: its name, for messages.
        batch_size: over all ranks together.
        epochs, seed: of the whole training.
        channels_last: memory layout of views and encoder.
        text: the samples' captions, for a framework that learns from them.
        chunk_size: samples of this rank whose activations are held at a time; None: the whole batch. See `grad_cache.py`.
        look_every: steps after which an accelerator is asked whether all losses were finite.
    """

    def __init__(
        self,
        framework: Framework,
        data: PixelSource,
        views: ViewMaker,
        optimizers: Callable[[Framework, int], Any],
        *,
        method: str,
        batch_size: int,
        epochs: int,
        seed: int,
        channels_last: bool = True,
        text: TextSource | None = None,
        chunk_size: int | None = None,
        look_every: int = 50,
    ) -> None:
        super().__init__()
        self.text, self.chunk_size, self.look_every = text, chunk_size, look_every
        self.framework, self.data, self.views, self.optimizer_factory = framework, data, views, optimizers
        self.method, self.batch_size, self.epochs, self.seed = method, batch_size, epochs, seed
        self.loader: BatchLoader | None = None
        self.last: tuple[int, int, Tensor] = (0, 0, torch.zeros(0))
        self.kept: Callable[[], str] = lambda: "no checkpoint was saved"
        self._broken: Tensor | None = None  # on an accelerator: the number of the first step whose loss is not finite, −1 before it
        self.channels_last = channels_last and not _crashes_channels_last(framework)
        for part in framework.modules():
            if type(part) is nn.Conv2d and part.kernel_size != (1, 1):
                part.__class__ = OnePixelConv2d
        if self.channels_last:
            framework.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def setup(self, stage: str) -> None:
        # DDP copies rank 0's buffers to all ranks before every forward. For the running statistics of BatchNorm that is wanted; thresholds,
        # moving averages, queues and banks are equal on all ranks already, and copying N rows a step would cost more than the step.
        self._ddp_params_and_buffers_to_ignore = _buffers_outside_norms(self)

    def train_dataloader(self) -> BatchLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self.loader = BatchLoader(self.data, self.batch_size, self.seed, rank, world_size, self.framework.batches, self.text)
        return self.loader

    def configure_optimizers(self) -> Any:
        return self.optimizer_factory(self.framework, self.data.num_train // self.batch_size)

    def on_train_epoch_start(self) -> None:
        """Called at the beginning of an epoch only; in the middle of one, Lightning restores the loader's position instead."""
        assert self.loader is not None
        self.loader.set_epoch(self.current_epoch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        epoch, step = batch["epoch"], batch["step"]
        assert (epoch, step) == (self.current_epoch, batch_idx), "the loader and Lightning disagree on where the training is"
        torch.manual_seed(derive_seed(self.seed, "step", epoch, step, self.global_rank))
        self.framework.set_progress(epoch, self.epochs)
        self.framework.on_metric("epoch", epoch + step / self._steps_per_epoch)  # schedules that move by the step
        texts = {name: batch[name] for name in ("tokens", "groups") if name in batch}
        share = self.batch_size // distributed.world_size()  # not the rows that are left: all ranks have as many chunks, for SyncBatchNorm
        chunks = 1 if self.chunk_size is None else math.ceil(share / self.chunk_size)
        with in_chunks(encoders_of(self.framework), chunks):
            loss: Tensor = self.framework(self.make_views(batch), batch["ids"], **texts)
        self.last = batch["epoch"], batch["step"], batch["ids"]
        self._look_at(loss)
        return loss

    def make_views(self, batch: dict[str, Any]) -> Tensor:
        """(V, B, 3, H, W) the views of one batch, in full precision whatever the training's."""
        draw = generator(self.seed, "views", batch["epoch"], batch["step"], self.global_rank, device=self.device)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            views = self.views(batch["pixels"], draw, aspect=batch["aspect"], num_views=self.framework.num_views)
        if self.channels_last:
            return views.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(views.shape)
        return views

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.framework.after_step()

    def _look_at(self, loss: Tensor) -> None:
        """Raises on all ranks if any rank's loss is not finite; the step is then not taken, and the last checkpoint stays as it is.

        On an accelerator the host would have to wait for it in every step. There it is noted on the device, and read now and then and
        before every checkpoint (`require_sound`); the state per sample takes nothing from a broken step in any case."""
        failed = (~finite(loss)).to(torch.int64)
        if distributed.world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.device.type == "cpu":
            if failed:
                raise self.not_finite(f"the loss of {self.method} is {loss.item()}", *self.last)
            return
        number = self.last[0] * self._steps_per_epoch + self.last[1]
        before = torch.full_like(failed, -1) if self._broken is None else self._broken
        self._broken = torch.where((failed > 0) & (before < 0), number, before)

    def require_sound(self) -> None:
        """Raises if a loss was not finite in any step so far. Waits for the device."""
        first = -1 if self._broken is None else int(self._broken)
        if first >= 0:
            epoch, step = divmod(first, self._steps_per_epoch)
            assert self.loader is not None
            raise self.not_finite(f"the loss of {self.method} is not finite", epoch, step, self.loader.ids(epoch, step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.look_every == 0 or batch_idx + 1 == self._steps_per_epoch:
            self.require_sound()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.require_sound()

    @property
    def _steps_per_epoch(self) -> int:
        return self.data.num_train // self.batch_size

    def require_finite(self, values: Tensor, what: str) -> None:
        """Raises if what the encoder gave after the last step is not finite; called on rank zero between two steps."""
        if not values.isfinite().all():
            raise self.not_finite(f"the {what} that {self.method} learns are not finite", *self.last)

    def not_finite(self, what: str, epoch: int, step: int, ids: Tensor) -> NonFiniteLossError:
        """The error of a training that diverged: what, where, what there is to go on from, and what to do."""
        return NonFiniteLossError(
            f"{what} at step {self.global_step} (epoch {epoch + 1}, batch {step + 1}); {self.kept()}. With the same "
            "settings it would come to the same: try a lower learning rate or a higher temperature. "
            f"Sample ids of the batch: {', '.join(map(str, ids.tolist()[:512]))}"
        )


class OnePixelConv2d(nn.Conv2d):
    """A convolution that is computed in 32 bits where its input is one pixel wide or high, on a CPU under autocast.

    There oneDNN leaves the gradient of the taps that see only padding unwritten, in bfloat16: strided 3×3 and any 5×5 kernels gave random
    numbers up to NaN, in both memory layouts (oneDNN v3.12, torch 2.13). Small views through a stem for large ones come to that.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.device.type != "cpu" or min(input.shape[-2:]) > 1 or not torch.is_autocast_enabled("cpu"):
            out: Tensor = super()._conv_forward(input, weight, bias)
            return out
        with torch.autocast("cpu", enabled=False):
            out = super()._conv_forward(input.float(), weight.float(), None if bias is None else bias.float())
        return out


def _crashes_channels_last(module: nn.Module) -> bool:
    """Whether a part is a strided 1×1 convolution of 2 to 15 channels a group. Its weight gradient in channels-last layout makes oneDNN
    write beyond its workspace on a CPU: with AVX-512 below 16 channels, with AVX2 below 8 (oneDNN issue 6035, open in v3.12 with
    torch 2.13). From 9 channels on it was not seen to crash."""
    convolutions = (part for part in module.modules() if isinstance(part, nn.Conv2d))
    return any(1 < part.in_channels // part.groups < 16 and part.kernel_size == (1, 1) and part.stride != (1, 1) for part in convolutions)


def _buffers_outside_norms(module: nn.Module) -> list[str]:
    """Names of all buffers that do not belong to a BatchNorm."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if not isinstance(part, nn.modules.batchnorm._NormBase)
        for name, _ in part.named_buffers(recurse=False)
    ]
