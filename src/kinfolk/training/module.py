"""The Lightning module of a training, and GradCache (Gao et al., 2021), for batches whose
activations do not fit into memory.

Dimension key: B batch, V views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinfolk import distributed
from kinfolk.data.images import Transfer
from kinfolk.embedding import Images, embed
from kinfolk.errors import KinfolkError
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.moco import MomentumCopy
from kinfolk.seeding import derive_seed, generator
from kinfolk.stores.per_sample import finite
from kinfolk.training.config import TrainConfig
from kinfolk.training.loader import BatchLoader, PixelSource, TextSource

CHECK_EVERY = 50
"""Steps between two checks, on an accelerator, that all losses were finite."""


class NonFiniteLossError(KinfolkError):
    """The loss, the features or the state of a training is not finite."""


class TrainingModule(pl.LightningModule):
    """Makes the views of a batch on the device, calls the framework, and stops if a loss is not
    finite. All randomness of a step is a function of seed, epoch, step and rank, so a resumed
    training has no random state to restore."""

    def __init__(
        self,
        framework: Framework,
        data: PixelSource,
        views: Any,
        config: TrainConfig,
        optimizers: Callable[[Framework, int], Any],
        text: TextSource | None = None,
    ) -> None:
        super().__init__()
        self.framework, self.data, self.views, self.text = framework, data, views, text
        self.config, self.optimizer_factory = config, optimizers
        self.method, self.batch_size = config.method, config.batch_size
        self.epochs, self.seed = config.epochs, config.seed
        self.steps_per_epoch = data.num_train // config.batch_size
        self.reports_epoch = any("epoch" in each.needed_metrics for each in framework.detectors)
        self.autocast = torch.bfloat16 if "bf16" in config.trainer.precision else None
        self.loader: BatchLoader | None = None
        self.started = False  # whether the state of a resumed training has been restored
        self.last_step = (0, 0)  # epoch and batch
        self.describe_saved: Callable[[], str] = lambda: "no checkpoint was saved"
        self._failed: Tensor | None = None  # whether a loss since the last check was not finite
        self.channels_last = config.trainer.channels_last and not _crashes_channels_last(framework)
        for encoder in encoders_of(framework) if config.trainer.compile_encoder is True else ():
            encoder.compile()
        if self.channels_last:
            framework.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def setup(self, stage: str) -> None:
        # of the buffers that DDP copies from rank 0 only the statistics of BatchNorm need it
        self._ddp_params_and_buffers_to_ignore = _buffers_outside_norms(self)

    def train_dataloader(self) -> BatchLoader:
        device = self.trainer.strategy.root_device

        def with_views(batch: dict[str, Any]) -> dict[str, Any]:
            return batch | {"views": self.make_views(batch)}

        # an accelerator makes the views of the next batch during the current step
        prepare = None if device.type == "cpu" else with_views
        self.loader = BatchLoader(
            self.data,
            self.batch_size,
            self.seed,
            self.trainer.global_rank,
            self.trainer.world_size,
            self.framework.batches,
            self.text,
            Transfer(device, prepare),
        )
        return self.loader

    def configure_optimizers(self) -> Any:
        return self.optimizer_factory(self.framework, self.steps_per_epoch)

    def on_train_start(self) -> None:
        """Sets the epoch that is resumed; `Refresh` sets it at the beginning of every other."""
        self.framework.set_progress(self.current_epoch, self.epochs)

    def on_train_epoch_start(self) -> None:
        """Not called for an epoch that is resumed; there Lightning restores the loader."""
        assert self.loader is not None
        self.loader.set_epoch(self.current_epoch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        epoch, step = batch["epoch"], batch["step"]
        assert (epoch, step) == (self.current_epoch, batch_idx), "the loader is at another step"
        torch.manual_seed(derive_seed(self.seed, "step", epoch, step, self.global_rank))
        if self.reports_epoch:
            self.framework.on_metric("epoch", epoch + step / self.steps_per_epoch)
        names = ("tokens", "groups", "negative_ids")
        texts = {name: batch[name] for name in names if name in batch}
        # not the rows: all ranks need equally many chunks for SyncBatchNorm
        share = self.batch_size // distributed.world_size()
        chunks = math.ceil(share / (self.config.trainer.chunk_size or share))
        # a rank that streams data may lose an image that cannot be read
        equal = getattr(self.data, "stream", None) is None
        with ExitStack() as stack:
            stack.enter_context(in_chunks(encoders_of(self.framework), chunks))
            if distributed.world_size() > 1:
                stack.enter_context(distributed.equal_batches(equal))
            views = batch["views"] if "views" in batch else self.make_views(batch)
            loss: Tensor = self.framework(views, batch["ids"], **texts)
        self.last_step = epoch, step
        failed = ~finite(loss)
        self._failed = failed if self._failed is None else self._failed | failed
        if loss.device.type == "cpu":  # the host need not wait
            self.require_finite_losses()
        return loss

    def make_views(self, batch: dict[str, Any]) -> Tensor:
        """(V, B, 3, H, W), computed in float32."""
        draw = generator(
            self.seed, "views", batch["epoch"], batch["step"], self.global_rank, device=self.device
        )
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            options: dict[str, Any] = {"num_views": self.framework.num_views}
            if self.framework.weak_views:
                options["weak"] = self.framework.weak_views
            views: Tensor = self.views(batch["pixels"], draw, aspect=batch["aspect"], **options)
        if self.channels_last and views.ndim == 5:
            flat = views.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            return flat.view(views.shape)
        return views

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.framework.after_step()

    def require_finite_losses(self) -> None:
        """Raises on all ranks if any loss of any rank since the last check was not finite."""
        if self._failed is None:
            return
        failed, self._failed = self._failed, None
        if distributed.max_over_ranks(int(failed), failed.device):
            raise self.not_finite(f"the loss of {self.method}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % CHECK_EVERY == 0 or batch_idx + 1 == self.steps_per_epoch:
            self.require_finite_losses()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.require_finite_losses()

    def embed_samples(self, data: Images, ids: Tensor) -> Tensor:
        where: dict[str, Any] = {"device": self.device, "autocast": self.autocast}
        return embed(self.framework, data, self.views, ids, **where)

    def not_finite(self, what: str) -> NonFiniteLossError:
        epoch, step = self.last_step
        return NonFiniteLossError(
            f"{what} is not finite at step {self.global_step} (epoch {epoch + 1}, batch"
            f" {step + 1}); {self.describe_saved()}. With the same settings it would happen"
            " again: try a lower learning rate or a higher temperature"
        )


@contextmanager
def one_pixel_in_float32(module: nn.Module) -> Iterator[None]:
    """Within, convolutions whose input is one pixel wide or high are computed in float32 under
    autocast on a CPU: in bfloat16, oneDNN does not write the gradient of the taps that see only
    padding (v3.12, torch 2.13). Must include the backward pass."""
    patched = [
        part
        for part in module.modules()
        if isinstance(part, nn.Conv2d)
        and type(part).forward is nn.Conv2d.forward  # one that does not override it
        and part.kernel_size != (1, 1)
        and "forward" not in vars(part)
    ]
    for part in patched:  # a bound method: a copy of the module gets one that is bound to the copy
        part.forward = MethodType(_convolve_one_pixel, part)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in patched:
            vars(part).pop("forward", None)


def _convolve_one_pixel(conv: nn.Conv2d, x: Tensor) -> Tensor:
    out: Tensor
    if x.device.type != "cpu" or min(x.shape[-2:]) > 1 or not torch.is_autocast_enabled("cpu"):
        out = nn.Conv2d.forward(conv, x)
        return out
    bias = None if conv.bias is None else conv.bias.float()
    with torch.autocast("cpu", enabled=False):
        out = conv._conv_forward(x.float(), conv.weight.float(), bias)
    return out


def _crashes_channels_last(module: nn.Module) -> bool:
    """In channels-last layout, oneDNN writes beyond its workspace for a strided 1×1 convolution of
    2 to 15 channels a group (issue 6035, v3.12, torch 2.13)."""
    return any(
        isinstance(part, nn.Conv2d)
        and 1 < part.in_channels // part.groups < 16
        and part.kernel_size == (1, 1)
        and part.stride != (1, 1)
        for part in module.modules()
    )


def _buffers_outside_norms(module: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if not isinstance(part, nn.modules.batchnorm._NormBase)
        for name, _ in part.named_buffers(recurse=False)
    ]


@contextmanager
def in_chunks(modules: Iterable[nn.Module], number: int) -> Iterator[None]:
    """GradCache: within this context, each of `modules` processes the rows of its first argument in
    `number` chunks without keeping activations. The backward pass, which may come after it,
    computes each chunk again, with the same random numbers and without updating buffers.

    A chunk holds every `number`-th row, so that both views of a sample are in one chunk where the
    batch is a multiple of `number`. BatchNorm normalises each chunk by its own statistics; without
    it, loss and gradient are those of the whole batch to rounding.
    """
    with ExitStack() as stack:
        for module in modules if number > 1 else ():
            stack.enter_context(_replace_forward(module, number))
        yield


def encoders_of(framework: Framework) -> list[nn.Module]:
    """The networks that process images or tokens; heads process the whole batch."""
    found = [framework.encoder]
    text = getattr(framework, "text_encoder", None)
    if isinstance(text, nn.Module):
        found.append(text)
    momentum = [part.encoder for part in framework.modules() if isinstance(part, MomentumCopy)]
    return found + momentum


@contextmanager
def _replace_forward(module: nn.Module, number: int) -> Iterator[None]:
    forward: Callable[..., Tensor] = module.forward
    previous = module.__dict__.get("forward")

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_buffers(module)

    def forward_in_chunks(rows: Tensor, *args: Any, **options: Any) -> Tensor:
        wide = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
        format_ = torch.channels_last if wide else torch.contiguous_format
        step = max(1, min(number, len(rows)))

        def one_chunk(chunk: Tensor) -> Tensor:
            return forward(chunk.contiguous(memory_format=format_), *args, **options)

        run: Callable[[Tensor], Tensor] = one_chunk
        if torch.is_grad_enabled():
            run = partial(checkpoint, one_chunk, use_reentrant=False, context_fn=contexts)
        done = [run(rows[k::step]) for k in range(step)]
        order = torch.arange(len(rows), device=rows.device)
        places = torch.cat([order[k::step] for k in range(step)]).argsort()
        return torch.cat(done).index_select(0, places)

    module.forward = forward_in_chunks
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


@contextmanager
def _keep_buffers(module: nn.Module) -> Iterator[None]:
    buffers = [
        (part._buffers, name, value)
        for part in module.modules()
        for name, value in part._buffers.items()
        if value is not None
    ]
    for owner, name, value in buffers:
        owner[name] = value.clone()
    try:
        yield
    finally:
        for owner, name, value in buffers:
            owner[name] = value
