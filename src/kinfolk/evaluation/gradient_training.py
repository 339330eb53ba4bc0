"""Linear probes and fine-tuning by gradient descent with the settings of the papers, and subsets of
the labels that they are trained on.

Linear probes (`PROBES`), without weight decay: GloFND, appendix D.1; IFND, appendix C, and MoCo v2;
Ring, section 5; RCL, section 5.2. Fine-tuning (`TUNINGS`) of encoder and linear classifier on
images that are cropped and flipped: IFND, appendix C; RCL, section 5.2, and SimCLR, appendix B.5.

Deviates from the papers in: features are standardised, and for the probes `glofnd` and `ifnd`
scaled to a mean squared norm of 1, so that a learning rate means the same for any encoder; images
are not augmented for probes; GloFND's early stopping on the test set is left out, and its rate
decays with a cosine; RCL's probe takes at least 300 steps, and fine-tuning at least 200, with a
rate that is scaled by the actual batch size and decays with a cosine.

Dimension key: N training samples, M test samples, B batch, F features, K classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from kinfolk.data.views import Views
from kinfolk.embedding import Images, embed
from kinfolk.errors import (
    KinfolkError,
    UsageError,
    require,
    require_at_least,
    require_choice,
    show_progress,
)
from kinfolk.evaluation.probes import Array, labelled_arrays, top5
from kinfolk.models.encoders import adapt
from kinfolk.optimizers import LARS
from kinfolk.seeding import derive_seed, generator, preserve_random_state

Decay = float | Literal["cosine"]
"""What the learning rate is multiplied by after 60 and 80 % of the epochs; "cosine": to 0."""


@dataclass(frozen=True)
class ProbeSettings:
    """How a probe is trained: for `epochs` on all labels, and with `grows` for epochs / √f, at most
    ten times as many, on a share f of them."""

    optimizer: Literal["sgd", "adamw", "lars"]
    lr: float
    batch_size: int
    epochs: int
    decay: Decay
    grows: bool = False
    unit_norm: bool = True
    nesterov: bool = False
    fewest_steps: int = 0

    def epochs_of(self, fraction: float, num_samples: int) -> int:
        epochs = self.epochs
        if self.grows:
            epochs = min(10 * epochs, round(epochs / math.sqrt(fraction)))
        return max(epochs, math.ceil(self.fewest_steps / math.ceil(num_samples / self.batch_size)))


PROBES = {
    "glofnd": ProbeSettings("adamw", 0.1, 1024, 90, "cosine", grows=True),
    "ifnd": ProbeSettings("sgd", 10.0, 256, 100, 0.1),
    "ring": ProbeSettings("sgd", 0.01, 256, 100, 1.0, unit_norm=False),
    "rcl": ProbeSettings(
        "lars", 1.0, 4096, 90, "cosine", unit_norm=False, nesterov=True, fewest_steps=300
    ),
}


@dataclass(frozen=True)
class TuningSettings:
    """How encoder and classifier are fine-tuned by SGD on 10 % of the labels; `few_classifier_lr`
    and `few_epochs` are for fewer labels. The rates are of batches of `batch_size`; with
    `scale_lr`, those of smaller batches are reduced in proportion."""

    batch_size: int = 256
    lr: float = 0.01
    classifier_lr: float = 0.1
    few_classifier_lr: float = 1.0
    weight_decay: float = 5e-4
    nesterov: bool = False
    decay: Decay = 0.2
    scale_lr: bool = False
    epochs: int = 20
    few_epochs: int = 20


TUNINGS = {
    "ifnd": TuningSettings(),
    "rcl": TuningSettings(4096, 0.8, 0.8, 0.8, 0.0, True, "cosine", True, 30, 60),
}
FEWEST_STEPS = 200
A_TENTH = 0.09  # shares from here on are "10 %": published lists are slightly smaller


def rate_factor(decay: Decay, epoch: int, epochs: int) -> float:
    if decay == "cosine":
        return (1 + math.cos(math.pi * epoch / epochs)) / 2
    return float(decay ** sum(epoch >= max(1, round(share * epochs)) for share in (0.6, 0.8)))


@dataclass(frozen=True)
class TrainedResult:
    """Accuracy and top-5 (NaN with five classes or fewer) on the test samples, epochs and optimiser
    steps, and mean cross-entropy over the last epoch."""

    accuracy: float
    top5: float
    epochs: int
    steps: int
    loss: float


def gradient_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    settings: ProbeSettings | str = "glofnd",
    *,
    fraction: float = 1.0,
    seed: int = 0,
) -> TrainedResult:
    """Accuracy of a linear classifier trained by gradient descent on frozen features. The test
    labels are used once, at the end. `fraction`: share of all labels that the training part has.
    """
    if isinstance(settings, str):
        require_choice("settings", settings, list(PROBES))
        settings = PROBES[settings]
    x_NF, y_N = labelled_arrays(train_x, train_y, "train")
    xt, truth_M = labelled_arrays(test_x, test_y, "test")
    classes_K, class_N = _classes(y_N)
    mean_F, deviation_F = x_NF.mean(0, dtype=np.float64), x_NF.std(0, dtype=np.float64)
    scale_F = np.where(deviation_F > 0, deviation_F, 1.0)
    scale_F = scale_F * math.sqrt(x_NF.shape[1]) if settings.unit_norm else scale_F
    inputs_NF, tested_MF = (
        torch.from_numpy(((x - mean_F) / scale_F).astype(np.float32)) for x in (x_NF, xt)
    )
    num, size = len(class_N), settings.batch_size
    layer = _zero_layer(x_NF.shape[1], len(classes_K), "cpu")
    epochs = settings.epochs_of(fraction, num)
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW(layer.parameters(), lr=settings.lr, weight_decay=0.0)
    else:
        kind: Any = LARS if settings.optimizer == "lars" else torch.optim.SGD
        nesterov = settings.nesterov
        optimizer = kind(layer.parameters(), lr=settings.lr, momentum=0.9, nesterov=nesterov)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order_N = torch.randperm(num, generator=generator(seed, "gradient-probe", epoch))
        for ids_B in torch.split(order_N, size):
            yield inputs_NF[ids_B], class_N[ids_B]

    *_, loss = _train(layer, optimizer, settings.decay, epochs, batches)
    with torch.no_grad():
        scores_MK = layer(tested_MF)
    return _result(
        scores_MK, classes_K, truth_M, epochs, epochs * math.ceil(num / size), loss / num
    )


def _classes(y_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor]:
    """(K,) classes, and (N,) the place of each label among them."""
    classes_K, class_N = np.unique(y_N, return_inverse=True)
    if len(classes_K) < 2:
        raise KinfolkError(
            f"A classifier needs at least two classes; the {len(y_N)} labelled training samples"
            f" have {len(classes_K)}."
        )
    return classes_K, torch.from_numpy(class_N)


def _zero_layer(size: int, classes: int, device: torch.device | str) -> nn.Linear:
    """Drawn on no device, so that torch's generator is not used."""
    layer = nn.Linear(size, classes, device="meta").to_empty(device=device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    decay: Decay,
    epochs: int,
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]],
) -> Iterator[float]:
    """Yields the sum of the cross-entropies of each epoch."""
    scheduler = LambdaLR(optimizer, lambda epoch: rate_factor(decay, epoch, epochs))
    for epoch in range(epochs):
        total = 0.0
        for x, class_B in batches(epoch):
            loss = functional.cross_entropy(model(x), class_B)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(class_B)
        scheduler.step()
        yield total


def _result(
    scores_MK: Tensor, classes_K: np.ndarray, truth_M: np.ndarray, *trained: Any
) -> TrainedResult:
    accuracy = float((classes_K[scores_MK.numpy().argmax(1)] == truth_M).mean())
    return TrainedResult(accuracy, top5(scores_MK.numpy(), classes_K, truth_M), *trained)


def finetune(
    encoder: nn.Module,
    data: Images,
    views: Views,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    settings: TuningSettings | str = "ifnd",
    *,
    fraction: float = 0.1,
    epochs: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> TrainedResult:
    """Trains a copy of `encoder` with a linear classifier on `train`, and tests it on `test` once
    at the end.

    Args:
        encoder: (B, 3, H, W) → (B, F).
        train, test: ids (N,) and classes (N,), all labelled. A test class without training samples
            counts as wrong.
        settings: "ifnd", "rcl" or others.
        fraction: share of all labels that the training part has.
        epochs: None means those of the settings, or as many as 200 steps need.
    """
    if isinstance(settings, str):
        require_choice("settings", settings, list(TUNINGS))
        settings = TUNINGS[settings]
    require_at_least(1, epochs=epochs)
    ids_N, (test_ids_M, truth_M) = train[0].cpu(), (test[0].cpu(), test[1].cpu().numpy())
    classes_K, class_N = _classes(train[1].cpu().numpy())
    if not len(test_ids_M):
        raise KinfolkError(
            "The test part has no labelled samples; fine-tuning needs some to measure accuracy."
        )
    is_tenth = fraction >= A_TENTH
    classifier_lr = settings.classifier_lr if is_tenth else settings.few_classifier_lr
    # all batches are of about the same size, so that none has one sample, which BatchNorm refuses
    num = len(ids_N)
    num_batches = max(1, min(math.ceil(num / settings.batch_size), num // 2))
    if epochs is None:
        fewest = settings.epochs if is_tenth else settings.few_epochs
        epochs = max(fewest, math.ceil(FEWEST_STEPS / num_batches))
    device = next(encoder.parameters()).device if device is None else torch.device(device)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order_N = torch.randperm(num, generator=generator(seed, "finetune", epoch))
        for step, place_B in enumerate(order_N.tensor_split(num_batches)):
            ids_B = ids_N[place_B]
            pixels, aspect = data.pixels(ids_B).to(device), data.aspect(ids_B).to(device)
            draw = generator(seed, "finetune", epoch, step, device=device)
            yield views(pixels, draw, aspect=aspect, num_views=1)[0], class_N[place_B].to(device)

    with preserve_random_state():
        torch.manual_seed(derive_seed(seed, "finetune"))  # dropout of the encoder
        copied = adapt(copy.deepcopy(encoder)).to(device)
        assert isinstance(copied.output_size, int)
        layer = _zero_layer(copied.output_size, len(classes_K), device)
        model = nn.Sequential(copied, layer).train()
        scale = min(1.0, num / num_batches / settings.batch_size) if settings.scale_lr else 1.0
        optimizer = torch.optim.SGD(
            [
                {"params": copied.parameters(), "lr": scale * settings.lr},
                {"params": layer.parameters(), "lr": scale * classifier_lr},
            ],
            momentum=0.9,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )
        losses, loss = _train(model, optimizer, settings.decay, epochs, batches), 0.0
        for loss in show_progress(losses, epochs, "Fine-tuning", enabled=progress):
            if not math.isfinite(loss):
                raise KinfolkError(
                    "The fine-tuning loss is not finite; use a smaller learning rate."
                )
    scores_MK = embed(model, data, views, test_ids_M, device=device)
    return _result(scores_MK, classes_K, truth_M, epochs, epochs * num_batches, loss / num)


# Subsets of the labels

FRACTIONS = (1.0, 0.1, 0.01, 0.001)
"""Shares of the labels in Table 1 of the GloFND paper."""


def label_subset(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """(N,) True for the samples whose labels are used: the same number from each class (of smaller
    ones all), together `fraction` of all labels, and at least one each. With one seed, a smaller
    subset is part of a larger one. Unlabelled samples (below 0) are never used."""
    require(0 < fraction <= 1, "fraction", fraction, "in (0, 1]")
    known_N = labels >= 0
    if not known_N.any():
        raise KinfolkError("There are no labelled samples to take a subset of.")
    if fraction == 1:
        return known_N
    classes = np.unique(labels[known_N])
    each = max(1, round(fraction * int(known_N.sum()) / len(classes)))
    order = torch.randperm(len(labels), generator=generator(seed, "label-subset")).numpy()
    used_N = np.zeros(len(labels), dtype=np.bool_)
    for label in classes:
        used_N[order[labels[order] == label][:each]] = True
    return used_N


def read_subset(path: Path, keys: Sequence[str]) -> NDArray[np.bool_]:
    """(N,) True for the samples whose file is in a list with one name per line, as SimCLR publishes
    for 1 and 10 % of ImageNet. Folders before the name are ignored."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    names_N = np.array([PurePosixPath(key).name for key in keys])
    used_N = np.isin(names_N, [PurePosixPath(line.strip()).name for line in lines])
    if not used_N.any():
        raise UsageError(
            f"`{path}` lists none of the labelled training images, such as {keys[0]!r}"
        )
    if len(np.unique(names_N[used_N])) < used_N.sum():
        raise UsageError(f"`{path}` has names that several images share")
    return used_N
