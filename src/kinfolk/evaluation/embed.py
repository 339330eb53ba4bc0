"""Features of a whole data set: in data order, in evaluation mode, without augmentation or gradient.

Dimension key: N samples, B batch, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kinfolk.errors import KinfolkError


class Images(Protocol):
    """What is read of the data: `kinfolk.data.ImageData` and anything like it."""

    def __len__(self) -> int: ...
    def pixels(self, ids: Tensor) -> Tensor:
        """(B, H, W, 3), uint8."""

    def aspect(self, ids: Tensor) -> Tensor:
        """(B,) width / height of the originals."""


class Preparation(Protocol):
    """What is needed of the views: `kinfolk.data.views.Views` and anything like it."""

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor:
        """(B, 3, size, size), normalised, without randomness."""


Tracker = Callable[[range], Iterable[int]]
"""Shows how far a loop over a range has come."""


@runtime_checkable
class Projecting(Protocol):
    """A framework, as seen from here: features for evaluation, and projected embeddings."""

    def features(self, x: Tensor) -> Tensor: ...
    def embed(self, x: Tensor) -> Tensor: ...


def embed(
    model: nn.Module,
    data: Images,
    views: Preparation,
    ids: Tensor | None = None,
    *,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    progress: bool | Tracker = False,
    projected: bool = False,
) -> Tensor:
    """(N, F) float32 on the CPU: the features of all samples in data order, or of `ids` in their order.

    Every BatchNorm and dropout is in evaluation mode meanwhile; the mode of each part of the model is put back afterwards, also after an
    error. Neither statistics nor random state change.

    Args:
        model: a framework, or a bare encoder that maps (B, 3, H, W) to (B, F).
        data: pixels and aspects by id.
        views: makes the model's input of them, by `evaluate`.
        ids: which samples; None: all.
        batch_size: samples at a time.
        device: where the model is moved to; None: where it is.
        autocast: computing type, e.g. `torch.bfloat16`; None: that of the weights.
        progress: whether to show a bar, or what shows one.
        projected: the framework's projected embeddings (unit norm) instead of the encoder's features.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 1")
    ids = torch.arange(len(data)) if ids is None else ids.cpu()
    if len(ids) == 0:
        raise KinfolkError("There are no samples to embed.")
    forward = embedding(model, projected)
    if device is None:
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    else:
        device = torch.device(device)
        model.to(device)
    features_NF: Tensor | None = None
    # Without the cache: weights cast under no_grad must not be met again by the caller's own training step.
    computing = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None, cache_enabled=False)
    with evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):  # pixels are prepared in full precision
        for start in _shown(range(0, len(ids), batch_size), progress):
            ids_B = ids[start : start + batch_size]
            x = views.evaluate(data.pixels(ids_B).to(device), data.aspect(ids_B).to(device))
            with computing:
                features_BF = forward(x)
            if features_NF is None:
                features_NF = torch.empty(len(ids), features_BF.shape[1])
            features_NF[start : start + len(ids_B)] = features_BF.float().cpu()
    assert features_NF is not None
    return features_NF


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """`model` in evaluation mode inside the block; afterwards every part is in the mode it had, also after an error."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        yield model.eval()
    finally:
        for part, training in modes:
            part.training = training


def embedding(model: nn.Module, projected: bool) -> Callable[[Tensor], Tensor]:
    """What embeds a batch of images: a framework's projected embeddings or its features, or the bare encoder itself."""
    # Some networks (VGG) have a submodule called `features`; only a model with both methods is a framework.
    if isinstance(model, Projecting) and not isinstance(model.features, nn.Module):
        return model.embed if projected else model.features
    if projected:
        raise ValueError(f"`projected` needs a framework; {type(model).__name__} is a bare encoder without a head")
    return model


def _shown(starts: range, progress: bool | Tracker) -> Iterable[int]:
    if callable(progress):
        return progress(starts)
    if not progress:
        return starts
    from rich.progress import track

    return track(starts, description="Embedding", transient=True)
