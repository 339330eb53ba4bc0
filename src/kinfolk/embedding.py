"""Features of a whole data set, and their parts that train and test a classifier.

Dimension key: N samples, B batch, C = 3 channels, S pixels of a side, F features, K labels, M
samples of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.data.images import HostWriter, Transfer, transfer_batches
from kinfolk.data.labels import TEST_SPLITS
from kinfolk.data.views import Views
from kinfolk.errors import KinfolkError, UsageError, require_at_least, show_progress
from kinfolk.models.heads import evaluating
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


class Images(Protocol):
    """(B, H, W, 3) uint8, and (B,) width / height."""

    def __len__(self) -> int: ...
    def pixels(self, ids: Tensor) -> Tensor: ...
    def aspect(self, ids: Tensor) -> Tensor: ...


class Preparation(Protocol):
    """(B, 3, S, S), normalised."""

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class Projecting(Protocol):
    """What `embed` needs from a framework."""

    def features(self, x: Tensor) -> Tensor: ...
    def embed(self, x: Tensor) -> Tensor: ...


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def embed(
    model: nn.Module,
    data: Images,
    views: Preparation,
    ids: Tensor | None = None,
    *,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    progress: bool = False,
    projected: bool = False,
) -> Tensor:
    """(N, F) float32 on the CPU: the features of all samples in data order, or of `ids`.

    The model is in evaluation mode meanwhile. Neither statistics nor random state change.

    Args:
        model: a framework, or a bare encoder that maps (B, 3, H, W) to (B, F).
        device: the model is moved there; None: its present device.
        autocast: type of the computation, e.g. `torch.bfloat16`; None: that of the weights.
        projected: the framework's embeddings (unit norm) instead of the encoder's features.
    """
    require_at_least(1, batch_size=batch_size)
    ids = torch.arange(len(data)) if ids is None else ids.cpu()
    if len(ids) == 0:
        raise KinfolkError("there are no samples to embed")
    forward = embedding_function(model, projected)
    if device is not None:
        model.to(device)
    tensor = next(iter((*model.parameters(), *model.buffers())), torch.empty(0, device=device))
    device, features_NF, done = tensor.device, torch.empty(0), 0
    # without the cache: weights cast under no_grad must not be used by a training step
    is_cast = autocast is not None
    computing = torch.autocast(device.type, dtype=autocast, enabled=is_cast, cache_enabled=False)

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"images": views.evaluate(batch["pixels"], batch["aspect"])}

    def read(start: int) -> dict[str, Tensor]:
        ids_B = ids[start : start + batch_size]
        return {"pixels": data.pixels(ids_B), "aspect": data.aspect(ids_B)}

    def write(features_BF: Tensor) -> None:
        nonlocal features_NF, done
        if not done:
            features_NF = torch.empty(len(ids), features_BF.shape[1], dtype=torch.float32)
        features_NF[done : done + len(features_BF)] = features_BF
        done += len(features_BF)

    transfer, returning = Transfer(device, prepare), HostWriter(write)
    starts = range(0, len(ids), batch_size)
    threads = 2 if transfer.is_ahead else 1
    steps = show_progress(starts, len(starts), "Embedding", enabled=progress)
    with (
        evaluating(model),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),  # views are made in full precision
        closing(transfer_batches(read, starts, transfer, threads=threads)) as batches,
    ):
        for _, batch in zip(steps, batches, strict=True):
            with computing:
                features_BF = forward(batch["images"]).float()
            returning.add(features_BF)
        returning.finish()
    return features_NF


def embedding_function(model: nn.Module, projected: bool) -> Callable[[Tensor], Tensor]:
    # some networks, such as VGG, have a submodule called `features`
    if isinstance(model, Projecting) and not isinstance(model.features, nn.Module):
        return model.embed if projected else model.features
    if projected:
        raise ValueError(
            f"`projected` needs a framework; {type(model).__name__} is a bare encoder without a"
            " head"
        )
    return model


def embed_in_parts(
    model: nn.Module,
    data: Images,
    views: Preparation,
    num_samples: int,
    *,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    """As `embed`, of the samples 0 to N − 1, the same on every rank; each rank computes one part,
    with rank zero's running statistics of BatchNorm, which are in the checkpoint."""
    world = distributed.world_size()
    if world == 1:
        return embed(model, data, views, torch.arange(num_samples), **options)
    share_statistics(model)
    parts = torch.tensor_split(torch.arange(num_samples), world)  # the first are one longer
    features_MF = embed(model, data, views, parts[dist.get_rank()], **options)
    sizes = [len(part) for part in parts]
    return distributed.gather_rows(features_MF.to(device or "cpu"), sizes).cpu()


def share_statistics(model: nn.Module) -> None:
    if distributed.world_size() == 1:
        return
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for buffer in part.buffers(recurse=False):
                dist.broadcast(buffer, 0)


def normalise_by(data: ImageData, views: Views, *, batch_size: int = 512) -> Views:
    """The same views, normalised by mean and deviation of the channels over the training samples,
    as in the transfer of Ring (section 5)."""
    plain = Views(**{**views.config(), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    number, (sum_C, square_C) = 0, torch.zeros(2, 3, dtype=torch.float64)
    for ids_B in torch.split(torch.arange(data.num_train or len(data)), batch_size):
        x_BCSS = plain.evaluate(data.pixels(ids_B), data.aspect(ids_B)).double()
        number += x_BCSS.numel() // 3
        sum_C += x_BCSS.sum((0, 2, 3))
        square_C += x_BCSS.square().sum((0, 2, 3))
    mean_C = sum_C / number
    std_C = (square_C / number - mean_C.square()).clamp(min=0).sqrt()
    std_C = std_C.where(std_C > 1e-6, 1.0)
    return Views(**{**views.config(), "mean": mean_C.tolist(), "std": std_C.tolist()})


HELD_OUT = 0.2
"""Share of the samples that a classifier is tested on without a test split."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Labels are classes (N,), or (N, K) for samples with several. The test part is empty without a
    test split; `measured_on` describes it, "" if there is none."""

    train_ids: NDArray[np.int64]
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_ids: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    measured_on: str


def take_parts(
    images: ImageData, features_NF: NDArray[np.float32], label_sets: NDArray[np.int64] | None = None
) -> LabelledFeatures:
    """Divides the features by split. An image that several samples of a part share counts once.
    `label_sets`: (N, K) used instead of the classes."""
    samples = images.samples
    labels = samples.labels if label_sets is None else label_sets
    labels = require_labels(labels)
    splits = np.asarray(samples.splits)
    known = np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1))
    present = [split for split in TEST_SPLITS if (known & (splits == split)).any()]
    train = known & (splits == "train")

    def take(chosen: NDArray[np.bool_]) -> tuple[Any, Any, Any]:
        ids = images.once(torch.from_numpy(np.flatnonzero(chosen))).numpy()
        return ids, features_NF[ids], labels[ids]

    if not present or not train.any():
        return LabelledFeatures(*take(known), *take(known & ~known), "")
    test = take(known & (splits == present[0]))
    return LabelledFeatures(*take(train), *test, f"{present[0]} split")


def require_labels(labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
    if labels is None or not (labels >= 0).any():
        raise UsageError(
            "the data has no labels to measure with; give labelled data, or --labels-from-folders"
            " if its folders are the classes (`labels_from_folders=True` in Python)"
        )
    return labels


def divide(parts: LabelledFeatures, seed: int, what: str) -> LabelledFeatures:
    """Holds out a fifth of each class if there is no test split."""
    if parts.measured_on:
        return parts
    several = parts.train_y.ndim > 1
    strata = np.zeros(len(parts.train_y), dtype=np.int64) if several else parts.train_y
    held = held_out_part(strata, HELD_OUT, seed)
    if not held.any():
        raise UsageError(f"{what} needs at least two samples of a class, or a test split")

    def take(rows: NDArray[np.bool_]) -> tuple[Any, Any, Any]:
        return parts.train_ids[rows], parts.train_x[rows], parts.train_y[rows]

    where = f"{HELD_OUT:.0%} of {'the samples' if several else 'each class'}, held out"
    return LabelledFeatures(*take(~held), *take(held), where)


def held_out_part(y: np.ndarray, share: float, seed: int, repeat: int = 0) -> np.ndarray:
    """(N,) True for a `share` of each class, at least one sample and never all."""
    key = ("linear-holdout", repeat) if repeat else ("linear-holdout",)
    order = torch.randperm(len(y), generator=generator(seed, *key)).numpy()
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = order[y[order] == label]
        if len(members) > 1:
            held[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    return held
