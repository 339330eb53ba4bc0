"""Fine-tuning: a copy of the encoder and a linear classifier are trained together on few labels.

    ifnd   SGD, momentum 0.9, weight decay 5e-4, batch 256, 20 epochs; the encoder's rate is 0.01,    IFND, appendix C
           the classifier's 0.1 on a tenth of the labels and 1 on a hundredth; both × 0.2 after 60
           and 80 % of the epochs
    rcl    SGD, Nesterov momentum 0.9, no weight decay, batch 4,096, rate 0.05 · batch / 256 for both, RCL, section 5.2, which
           30 epochs on a tenth of the labels and 60 on a hundredth                                   follows SimCLR, appendix B.5

Images are cropped and flipped like the training views; their colours are not changed.

Deviates from the papers in: with few samples the number of epochs is raised so that there are at least 200 steps; the learning rate of
`rcl` is scaled by the actual batch size and decays to 0 with a cosine, which neither paper states.

Dimension key: N training samples, M test samples, B batch, F features, K classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from kinfolk.data.prepare import show_progress
from kinfolk.embedding import Images, Preparation, embed
from kinfolk.errors import KinfolkError
from kinfolk.models.build import adapt
from kinfolk.seeding import derive_seed, generator, kept_random_state

EPOCHS, FEWEST_STEPS = 20, 200
A_TENTH = 0.09
"""Shares from here on use the settings for 10 % of the labels; published lists of 10 % are slightly smaller."""


def tuning(name: str, fraction: float) -> dict[str, Any]:
    """Returns the arguments of `finetune` that the paper `name` uses for this share of the labels.

    Example:
        >>> tuning("ifnd", 0.01)["classifier_lr"], tuning("rcl", 0.1)["usual_epochs"]
        (1.0, 30)
    """
    tenth = fraction >= A_TENTH
    if name == "ifnd":
        return {"batch_size": 256, "lr": 0.01, "classifier_lr": 0.1 if tenth else 1.0, "weight_decay": 5e-4, "usual_epochs": EPOCHS}
    if name == "rcl":
        rates = {"batch_size": 4096, "lr": 0.8, "classifier_lr": 0.8, "weight_decay": 0.0, "scale_lr": True}
        return {**rates, "nesterov": True, "schedule": "cosine", "usual_epochs": 30 if tenth else 60}
    raise ValueError(f"`name` (={name!r}) must be one of {', '.join(TUNINGS)}")


TUNINGS = ("ifnd", "rcl")
"""Names of the papers' settings, see the module docstring."""


class Augmenting(Preparation, Protocol):
    """The interface needed of the views, such as `kinfolk.data.augmentation.views.Views`."""

    def __call__(self, pixels: Tensor, generator: torch.Generator, aspect: Tensor | None = None, num_views: int = 2) -> Tensor:
        """(V, B, 3, size, size)."""


@dataclass(frozen=True)
class FinetuneResult:
    """Result of `finetune`.

    Args:
        accuracy, top5: share of test samples whose class has the highest score, or one of the five highest, in [0, 1]. `top5` is NaN with
            five classes or fewer.
        epochs, steps: number of epochs and optimiser steps.
        loss: mean cross-entropy over the last epoch.
    """

    accuracy: float
    top5: float
    epochs: int
    steps: int
    loss: float


def finetune(
    encoder: nn.Module,
    data: Images,
    views: Augmenting,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epochs: int | None = None,
    batch_size: int = 256,
    lr: float = 0.01,
    classifier_lr: float = 0.1,
    weight_decay: float = 5e-4,
    nesterov: bool = False,
    schedule: Literal["steps", "cosine"] = "steps",
    scale_lr: bool = False,
    usual_epochs: int = EPOCHS,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> FinetuneResult:
    """Trains a copy of `encoder` with a linear classifier on `train`, and tests it on `test` once at the end. `encoder` is not changed.

    Args:
        encoder: (B, 3, H, W) → (B, F).
        data: pixels and aspect ratios by id.
        views: augments the training images, and prepares the test images with its `evaluate`.
        train, test: ids (N,) and classes (N,), all labelled. A test class without training samples counts as wrong.
        epochs: None means `usual_epochs`, or as many as 200 steps need.
        batch_size, lr, classifier_lr, weight_decay, nesterov: arguments of SGD. `tuning` returns those of the papers.
        schedule: "steps" multiplies both rates by 0.2 after 60 and 80 % of the epochs; "cosine" lets them decay to 0.
        scale_lr: whether to reduce the rates in proportion when batches are smaller than `batch_size`.
        usual_epochs: number of epochs with enough samples.
        seed: seed of order and augmentation.
        device: None means the device of the encoder.
        progress: whether to show a progress bar.
    """
    (ids_N, label_N), (test_ids_M, test_label_M) = ((ids.cpu(), labels.cpu()) for ids, labels in (train, test))
    if batch_size < 2:
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 2: BatchNorm needs more than one sample")
    if epochs is not None and epochs < 1:
        raise ValueError(f"`epochs` (={epochs}) must be at least 1")
    classes_K, class_N = torch.unique(label_N, return_inverse=True)
    if len(classes_K) < 2:
        raise KinfolkError(f"Fine-tuning needs at least two classes; the {len(ids_N)} labelled training samples have {len(classes_K)}.")
    if not len(test_ids_M):
        raise KinfolkError("The test part has no labelled samples; fine-tuning needs some to measure accuracy.")
    batches = max(1, min(math.ceil(len(ids_N) / batch_size), len(ids_N) // 2))
    epochs = max(usual_epochs, math.ceil(FEWEST_STEPS / batches)) if epochs is None else epochs
    device = next(encoder.parameters()).device if device is None else torch.device(device)
    with kept_random_state():
        torch.manual_seed(derive_seed(seed, "finetune"))  # dropout of the encoder
        copied = adapt(copy.deepcopy(encoder)).to(device)
        assert isinstance(copied.output_size, int)
        layer = nn.Linear(copied.output_size, len(classes_K), device=device)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        model = nn.Sequential(copied, layer)
        scale = min(1.0, len(ids_N) / batches / batch_size) if scale_lr else 1.0
        groups = [{"params": copied.parameters(), "lr": scale * lr}, {"params": layer.parameters(), "lr": scale * classifier_lr}]
        optimizer = torch.optim.SGD(groups, lr=scale * lr, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: _factor(schedule, epoch, epochs))
        model.train()
        for epoch in show_progress(range(epochs), epochs, "Fine-tuning", enabled=progress):
            total = 0.0
            for x, place_B in _batches(data, views, ids_N, batches, seed, epoch, device):
                loss = functional.cross_entropy(model(x), class_N[place_B].to(device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += float(loss.detach()) * len(place_B)
            scheduler.step()
            if not math.isfinite(total):
                raise KinfolkError(f"The fine-tuning loss is not finite in epoch {epoch + 1}; use a smaller learning rate.")
    logits_MK = embed(model, data, views, test_ids_M, device=device)
    ranked_MK = classes_K[logits_MK.topk(min(5, len(classes_K)), 1).indices]
    right_MK = ranked_MK == test_label_M.unsqueeze(1)
    top5 = float(right_MK.any(1).double().mean()) if len(classes_K) > 5 else math.nan
    return FinetuneResult(float(right_MK[:, 0].double().mean()), top5, epochs, epochs * batches, total / len(ids_N))


def _factor(schedule: Literal["steps", "cosine"], epoch: int, epochs: int) -> float:
    """Factor of the learning rates in this epoch."""
    if schedule == "cosine":
        return (1 + math.cos(math.pi * epoch / epochs)) / 2
    return 0.2 ** sum(epoch >= max(1, round(share * epochs)) for share in (0.6, 0.8))


def _batches(
    data: Images, views: Augmenting, ids_N: Tensor, number: int, seed: int, epoch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented images and the positions of their labels. All batches are of about the same size, so that none has one sample."""
    order_N = torch.randperm(len(ids_N), generator=generator(seed, "finetune", epoch))
    for step, place_B in enumerate(order_N.tensor_split(number)):
        ids_B = ids_N[place_B]
        draw = generator(seed, "finetune", epoch, step, device=device)
        yield views(data.pixels(ids_B).to(device), draw, aspect=data.aspect(ids_B).to(device), num_views=1)[0], place_B
