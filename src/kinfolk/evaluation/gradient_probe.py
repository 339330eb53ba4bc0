"""The linear probes of the papers: one fully connected layer trained by gradient descent on frozen
features.

    glofnd   AdamW, rate 0.1, batch 1024, 90 epochs on all labels, 285 on a tenth, 900 on fewer
             GloFND, appendix D.1
    ifnd     SGD, rate 10, momentum 0.9, batch 256, 100 epochs, rate × 0.1 at 60 and 80
             IFND, appendix C; MoCo v2
    ring     SGD, rate 0.01, momentum 0.9, batch 256, 100 epochs, constant rate
             Ring, section 5
    rcl      LARS, rate 1, Nesterov momentum 0.9, batch 4,096, 90 epochs, cosine
             RCL, section 5.2

None of them uses weight decay. Deviates from the papers in: features are standardised, and for
`glofnd` and `ifnd` scaled to a mean squared norm of 1, so that a learning rate means the same for
any encoder; GloFND's early stopping on the test set is left out, and its rate decays to 0 with a
cosine; RCL's probe takes at least 300 steps, which 90 epochs of a small data set would not reach.
The papers draw new augmentations in every epoch; here several augmented versions of the features
are used in turn.

Dimension key: N training samples, F features, V versions, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from kinfolk.errors import KinfolkError, show_progress
from kinfolk.evaluation.probes import labelled, top5
from kinfolk.lars import LARS
from kinfolk.seeding import generator

if TYPE_CHECKING:
    Array = Tensor | np.ndarray


@dataclass(frozen=True)
class ProbeSettings:
    """How a probe is trained.

    `epochs` is the number of epochs on all labels. With `grows`, a share f of the labels is trained
    for epochs / √f, at most ten times as many. The number is raised where it would give fewer than
    `fewest_steps` steps.
    """

    optimizer: Literal["sgd", "adamw", "lars"]
    lr: float
    batch_size: int
    epochs: int
    schedule: Literal["cosine", "steps", "constant"]
    grows: bool = False
    unit_norm: bool = True
    nesterov: bool = False
    fewest_steps: int = 0

    def epochs_of(self, fraction: float, num_samples: int | None = None) -> int:
        """Epochs on this share of the labels. `num_samples` is their number; None means enough for
        `fewest_steps`."""
        epochs = (
            min(10 * self.epochs, round(self.epochs / math.sqrt(fraction)))
            if self.grows
            else self.epochs
        )
        return (
            epochs
            if num_samples is None
            else max(
                epochs, math.ceil(self.fewest_steps / math.ceil(num_samples / self.batch_size))
            )
        )

    def factor(self, progress: float) -> float:
        """Factor of the learning rate after this share of the epochs."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return (
            1.0 if self.schedule == "constant" else 0.1 ** ((progress >= 0.6) + (progress >= 0.8))
        )


PROBES = {
    "glofnd": ProbeSettings("adamw", 0.1, 1024, 90, "cosine", grows=True),
    "ifnd": ProbeSettings("sgd", 10.0, 256, 100, "steps"),
    "ring": ProbeSettings("sgd", 0.01, 256, 100, "constant", unit_norm=False),
    "rcl": ProbeSettings(
        "lars", 1.0, 4096, 90, "cosine", unit_norm=False, nesterov=True, fewest_steps=300
    ),
}


@dataclass(frozen=True)
class GradientResult:
    """Result of `gradient_probe`.

    Args:
        accuracy: share of test samples that are classified correctly after the last epoch, in [0,
            1].
        epochs: number of epochs.
        loss: mean cross-entropy over the last epoch.
        top5: share of test samples whose class has one of the five highest scores. NaN with five
            classes or fewer.
    """

    accuracy: float
    epochs: int
    loss: float
    top5: float = math.nan


def gradient_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    settings: ProbeSettings | str = "glofnd",
    *,
    fraction: float = 1.0,
    seed: int = 0,
    progress: bool = False,
) -> GradientResult:
    """Accuracy of a linear classifier trained by gradient descent on frozen features. The test
    labels are used once, at the end.

    Args:
        train_x: (N, F), or (V, N, F) for several versions of the features, such as those of
            augmented images. Epoch e uses version e mod V.
        train_y, test_x, test_y: see `linear_probe`.
        settings: a name from the module docstring, or settings of your own.
        fraction: share of all labels that the training part has. GloFND trains longer on fewer
            labels.
        seed: seed of the order of the samples.
        progress: whether to show a progress bar.
    """
    chosen = _settings(settings)
    versions = train_x if train_x.ndim == 3 else train_x[None]
    parts = [labelled(version, train_y, "train") for version in versions]
    x_VNF, y_N = np.stack([x for x, _ in parts]), parts[0][1]
    xt, yt = labelled(test_x, test_y, "test")
    classes_K, class_N = np.unique(y_N, return_inverse=True)
    if len(classes_K) < 2:
        raise KinfolkError(
            f"A linear probe needs at least two classes; all {len(y_N)} labelled training samples"
            f" are of class {y_N[0]}."
        )
    mean_F, deviation_F = x_VNF.mean((0, 1), dtype=np.float64), x_VNF.std((0, 1), dtype=np.float64)
    scale_F = np.where(deviation_F > 0, deviation_F, 1.0) * (
        math.sqrt(x_VNF.shape[2]) if chosen.unit_norm else 1.0
    )
    inputs, tested = (
        torch.from_numpy(((x - mean_F) / scale_F).astype(np.float32)) for x in (x_VNF, xt)
    )
    epochs = chosen.epochs_of(fraction, len(y_N))
    layer, loss = _trained(
        inputs, torch.from_numpy(class_N), len(classes_K), chosen, epochs, seed, progress
    )
    with torch.no_grad():
        scores_MK = layer(tested).numpy()
    predicted = classes_K[scores_MK.argmax(1)]
    return GradientResult(
        float((predicted == yt).mean()), epochs, loss, top5(scores_MK, classes_K, yt)
    )


def _trained(
    x_VNF: Tensor,
    class_N: Tensor,
    num_classes: int,
    how: ProbeSettings,
    epochs: int,
    seed: int,
    progress: bool,
) -> tuple[nn.Linear, float]:
    num_versions, num, size = x_VNF.shape
    # draws no random numbers
    layer = nn.Linear(size, num_classes, device="meta").to_empty(device="cpu")
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer: torch.optim.Optimizer
    if how.optimizer == "adamw":
        optimizer = torch.optim.AdamW(layer.parameters(), lr=how.lr, weight_decay=0.0)
    elif how.optimizer == "lars":
        optimizer = LARS(layer.parameters(), how.lr, momentum=0.9, nesterov=how.nesterov)
    else:
        optimizer = torch.optim.SGD(
            layer.parameters(), lr=how.lr, momentum=0.9, nesterov=how.nesterov
        )
    scheduler = LambdaLR(optimizer, lambda epoch: how.factor(epoch / epochs))
    total = 0.0
    for epoch in show_progress(range(epochs), epochs, "Linear probe", enabled=progress):
        total = 0.0
        order_N = torch.randperm(num, generator=generator(seed, "gradient-probe", epoch))
        for ids_B in order_N.split(how.batch_size):  # type: ignore[no-untyped-call]
            loss = functional.cross_entropy(
                layer(x_VNF[epoch % num_versions, ids_B]), class_N[ids_B]
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(ids_B)
        scheduler.step()
    return layer, total / num


def _settings(settings: ProbeSettings | str) -> ProbeSettings:
    if isinstance(settings, ProbeSettings):
        return settings
    if settings not in PROBES:
        raise ValueError(f"`settings` (={settings!r}) must be one of {', '.join(PROBES)}")
    return PROBES[settings]
