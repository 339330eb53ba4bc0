"""GradCache: batches whose activations do not fit into memory, with the exact gradient of the whole batch.

Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021. The encoder sees the batch in chunks and keeps no
activations; the loss, and its gradient with respect to the embeddings, is taken once over the joined embeddings; then each chunk is
computed again, this time with its activations, and the gradient is propagated through it. The cost is one more forward pass of the encoder.

Each chunk is a checkpoint of `torch.utils.checkpoint` (the form without a nested backward pass): autograd computes the chunks one after
the other, last chunk first, and gives every parameter its gradient once, summed over chunks, so DistributedDataParallel needs nothing
special. Nothing here depends on the loss, the detector or the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.momentum import MomentumCopy


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
