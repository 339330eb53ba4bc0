"""Linear probes and fine-tuning by gradient descent with the settings of the papers, and subsets of
the labels that they are trained on.

Linear probes (`PROBES`), without weight decay: GloFND, appendix D.1; IFND, appendix C, and MoCo v2;
Ring, section 5; RCL, section 5.2. Fine-tuning (`tuning`) of encoder and linear classifier on images
that are cropped and flipped: IFND, appendix C; RCL, section 5.2, and SimCLR, appendix B.5.

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
from collections import defaultdict
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
from kinfolk.errors import KinfolkError, UsageError, require, require_choice, show_progress
from kinfolk.evaluation.detection import spread
from kinfolk.evaluation.probes import Array, labelled_arrays, linear_probe, top5
from kinfolk.models.encoders import adapt
from kinfolk.optimizers import LARS
from kinfolk.seeding import derive_seed, generator, preserve_random_state

# Linear probes


@dataclass(frozen=True)
class ProbeSettings:
    """How a probe is trained: for `epochs` on all labels, and with `grows` for epochs / √f, at most
    ten times as many, on a share f of them."""

    optimizer: Literal["sgd", "adamw", "lars"]
    lr: float
    batch_size: int
    epochs: int
    schedule: Literal["cosine", "steps", "constant"]
    grows: bool = False
    unit_norm: bool = True
    nesterov: bool = False
    fewest_steps: int = 0

    def epochs_of(self, fraction: float, num_samples: int) -> int:
        epochs = self.epochs
        if self.grows:
            epochs = min(10 * epochs, round(epochs / math.sqrt(fraction)))
        return max(epochs, math.ceil(self.fewest_steps / math.ceil(num_samples / self.batch_size)))

    def factor(self, progress: float) -> float:
        """Factor of the learning rate after this share of the epochs."""
        if self.schedule == "cosine":
            return _cosine(progress)
        steps = (progress >= 0.6) + (progress >= 0.8)
        return 1.0 if self.schedule == "constant" else 0.1**steps


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


PROBES = {
    "glofnd": ProbeSettings("adamw", 0.1, 1024, 90, "cosine", grows=True),
    "ifnd": ProbeSettings("sgd", 10.0, 256, 100, "steps"),
    "ring": ProbeSettings("sgd", 0.01, 256, 100, "constant", unit_norm=False),
    "rcl": ProbeSettings(
        "lars", 1.0, 4096, 90, "cosine", unit_norm=False, nesterov=True, fewest_steps=300
    ),
}


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
    how = PROBES[settings] if isinstance(settings, str) else settings
    x_NF, y_N = labelled_arrays(train_x, train_y, "train")
    xt, yt = labelled_arrays(test_x, test_y, "test")
    classes_K, class_N = np.unique(y_N, return_inverse=True)
    if len(classes_K) < 2:
        raise KinfolkError(
            f"A linear probe needs at least two classes; all {len(y_N)} labelled training samples"
            f" are of class {y_N[0]}."
        )
    mean_F, deviation_F = x_NF.mean(0, dtype=np.float64), x_NF.std(0, dtype=np.float64)
    scale_F = np.where(deviation_F > 0, deviation_F, 1.0)
    scale_F = scale_F * math.sqrt(x_NF.shape[1]) if how.unit_norm else scale_F
    inputs_NF, tested_MF = (
        torch.from_numpy(((x - mean_F) / scale_F).astype(np.float32)) for x in (x_NF, xt)
    )
    targets_N, num = torch.from_numpy(class_N), len(class_N)
    layer = _zero_layer(x_NF.shape[1], len(classes_K), "cpu")
    epochs = how.epochs_of(fraction, num)
    optimizer: torch.optim.Optimizer
    if how.optimizer == "adamw":
        optimizer = torch.optim.AdamW(layer.parameters(), lr=how.lr, weight_decay=0.0)
    else:
        kind: Any = LARS if how.optimizer == "lars" else torch.optim.SGD
        optimizer = kind(layer.parameters(), lr=how.lr, momentum=0.9, nesterov=how.nesterov)
    scheduler = LambdaLR(optimizer, lambda epoch: how.factor(epoch / epochs))
    total = 0.0
    for epoch in range(epochs):
        order_N = torch.randperm(num, generator=generator(seed, "gradient-probe", epoch))
        batches = torch.split(order_N, how.batch_size)
        parts = ((inputs_NF[ids_B], targets_N[ids_B]) for ids_B in batches)
        total = _train_epoch(layer, optimizer, parts)
        scheduler.step()
    with torch.no_grad():
        scores_MK = layer(tested_MF).numpy()
    steps = epochs * math.ceil(num / how.batch_size)
    return _result(scores_MK, classes_K, yt, epochs, steps, total / num)


def _zero_layer(size: int, classes: int, device: torch.device | str) -> nn.Linear:
    """Drawn on no device, so that torch's generator is not used."""
    layer = nn.Linear(size, classes, device="meta").to_empty(device=device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]]
) -> float:
    total = 0.0
    for x, class_B in batches:
        loss = functional.cross_entropy(model(x), class_B)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += float(loss.detach()) * len(class_B)
    return total


def _result(
    scores_MK: np.ndarray, classes_K: np.ndarray, truth_M: np.ndarray, *trained: Any
) -> TrainedResult:
    accuracy = float((classes_K[scores_MK.argmax(1)] == truth_M).mean())
    return TrainedResult(accuracy, top5(scores_MK, classes_K, truth_M), *trained)


# Fine-tuning

EPOCHS, FEWEST_STEPS = 20, 200
A_TENTH = 0.09  # shares from here on are "10 %": published lists are slightly smaller
TUNINGS = ("ifnd", "rcl")


def tuning(name: str, fraction: float) -> dict[str, Any]:
    """The arguments of `finetune` that the paper `name` uses for this share of the labels.

    Example:
        >>> tuning("ifnd", 0.01)["classifier_lr"], tuning("rcl", 0.1)["min_epochs"]
        (1.0, 30)
    """
    require_choice("name", name, TUNINGS)
    tenth = fraction >= A_TENTH
    if name == "ifnd":
        return {"classifier_lr": 0.1 if tenth else 1.0}
    return {
        "batch_size": 4096,
        "lr": 0.8,
        "classifier_lr": 0.8,
        "weight_decay": 0.0,
        "scale_lr": True,
        "nesterov": True,
        "schedule": "cosine",
        "min_epochs": 30 if tenth else 60,
    }


def finetune(
    encoder: nn.Module,
    data: Images,
    views: Views,
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
    min_epochs: int = EPOCHS,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> TrainedResult:
    """Trains a copy of `encoder` with a linear classifier on `train`, and tests it on `test` once
    at the end. `tuning` returns the arguments of the papers.

    Args:
        encoder: (B, 3, H, W) → (B, F).
        train, test: ids (N,) and classes (N,), all labelled. A test class without training samples
            counts as wrong.
        epochs: None means `min_epochs`, or as many as 200 steps need.
        schedule: "steps" multiplies both rates by 0.2 after 60 and 80 % of the epochs; "cosine"
            lets them decay to 0.
        scale_lr: reduces the rates in proportion when batches are smaller than `batch_size`.
    """
    (ids_N, label_N), (test_ids_M, test_label_M) = (
        (ids.cpu(), labels.cpu()) for ids, labels in (train, test)
    )
    require(batch_size >= 2, "batch_size", batch_size, "at least 2, for BatchNorm")
    require(epochs is None or epochs >= 1, "epochs", epochs, "at least 1")
    classes_K, class_N = torch.unique(label_N, return_inverse=True)
    if len(classes_K) < 2:
        raise KinfolkError(
            f"Fine-tuning needs at least two classes; the {len(ids_N)} labelled training samples"
            f" have {len(classes_K)}."
        )
    if not len(test_ids_M):
        raise KinfolkError(
            "The test part has no labelled samples; fine-tuning needs some to measure accuracy."
        )
    # all batches are of about the same size, so that none has one sample
    num_batches = max(1, min(math.ceil(len(ids_N) / batch_size), len(ids_N) // 2))
    epochs = max(min_epochs, math.ceil(FEWEST_STEPS / num_batches)) if epochs is None else epochs
    device = next(encoder.parameters()).device if device is None else torch.device(device)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order_N = torch.randperm(len(ids_N), generator=generator(seed, "finetune", epoch))
        for step, place_B in enumerate(order_N.tensor_split(num_batches)):
            ids_B = ids_N[place_B]
            pixels, aspect = data.pixels(ids_B).to(device), data.aspect(ids_B).to(device)
            draw = generator(seed, "finetune", epoch, step, device=device)
            yield views(pixels, draw, aspect=aspect, num_views=1)[0], class_N[place_B].to(device)

    def factor(epoch: int) -> float:
        return _factor(schedule, epoch, epochs)

    with preserve_random_state():
        torch.manual_seed(derive_seed(seed, "finetune"))  # dropout of the encoder
        copied = adapt(copy.deepcopy(encoder)).to(device)
        assert isinstance(copied.output_size, int)
        layer = _zero_layer(copied.output_size, len(classes_K), device)
        model = nn.Sequential(copied, layer).train()
        scale = min(1.0, len(ids_N) / num_batches / batch_size) if scale_lr else 1.0
        groups = [
            {"params": copied.parameters(), "lr": scale * lr},
            {"params": layer.parameters(), "lr": scale * classifier_lr},
        ]
        optimizer = torch.optim.SGD(
            groups, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov
        )
        scheduler, total = LambdaLR(optimizer, factor), 0.0
        for epoch in show_progress(range(epochs), epochs, "Fine-tuning", enabled=progress):
            total = _train_epoch(model, optimizer, batches(epoch))
            scheduler.step()
            if not math.isfinite(total):
                raise KinfolkError(
                    f"The fine-tuning loss is not finite in epoch {epoch + 1}; use a smaller"
                    " learning rate."
                )
    scores_MK = embed(model, data, views, test_ids_M, device=device).numpy()
    tested = scores_MK, classes_K.numpy(), test_label_M.numpy()
    return _result(*tested, epochs, epochs * num_batches, total / len(ids_N))


def _factor(schedule: Literal["steps", "cosine"], epoch: int, epochs: int) -> float:
    if schedule == "cosine":
        return _cosine(epoch / epochs)
    return 0.2 ** sum(epoch >= max(1, round(share * epochs)) for share in (0.6, 0.8))


# Subsets of the labels

FRACTIONS = (1.0, 0.1, 0.01, 0.001)
"""Shares of the labels in Table 1 of the GloFND paper."""
DRAWS = 3


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


@dataclass(frozen=True)
class ListedSubset:
    """The samples that a file lists: its name without suffix, (N,) True for them, and the number of
    names, found or not."""

    name: str
    used: NDArray[np.bool_]
    listed: int


def read_subset(path: str | Path, keys: Sequence[str]) -> ListedSubset:
    """Reads a list of file names, one per line, as SimCLR publishes for 1 and 10 % of ImageNet.

    A line is one of the `keys` of the samples or the end of a key; empty lines and comments (`#`)
    are skipped. A name that matches no sample is ignored; one that matches several is an error.
    """
    path = Path(path)
    lines = map(str.strip, path.read_text(encoding="utf-8-sig").splitlines())
    listed = [line for line in lines if line and not line.startswith("#")]
    names = dict.fromkeys(line.replace("\\", "/").removeprefix("./") for line in listed)
    rows_of = defaultdict[str, list[int]](list)
    for row, key in enumerate(keys):
        rows_of[PurePosixPath(key).name].append(row)
    used_N = np.zeros(len(keys), dtype=np.bool_)
    for name in names:
        same = rows_of.get(PurePosixPath(name).name, ())
        rows = [row for row in same if f"/{keys[row]}".endswith(f"/{name}")]
        if len(rows) > 1:
            raise UsageError(
                f"`{path}` lists {name!r}, which matches {len(rows)} samples"
                f" ({' and '.join(repr(keys[row]) for row in rows[:2])}, …); add their folders to"
                " the list"
            )
        used_N[rows] = True
    if not used_N.any():
        first = f"for example {next(iter(names))!r}" if names else "nothing"
        raise UsageError(
            f"`{path}` matches none of the labelled training images; it lists {first}, and the"
            f" first image is {keys[0]!r}"
        )
    return ListedSubset(path.stem, used_N, len(names))


@dataclass(frozen=True)
class FewLabels:
    """Accuracy of a probe fitted on a subset of the labels: mean and deviation over the draws;
    `subset` and `listed` are the name and length of a list."""

    fraction: float
    labels: int
    accuracy: float
    deviation: float
    accuracies: tuple[float, ...]
    top5: float = math.nan
    subset: str | None = None
    listed: int | None = None


def semi_supervised(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    fractions: Sequence[float] = FRACTIONS,
    subsets: Sequence[ListedSubset] = (),
    draws: int = DRAWS,
    probe: str = "lbfgs",
    seed: int = 0,
) -> list[FewLabels]:
    """Accuracy of a linear probe fitted on class-balanced subsets of the training labels
    (`label_subset`), `draws` for each fraction below 1, or on listed labels (Tables 1 and 7 and
    Figure 4 of the GloFND paper). `probe`: "lbfgs" or a name from `PROBES`."""
    good = all(0 < fraction <= 1 for fraction in fractions) and bool(fractions or subsets)
    require(good, "fractions", tuple(fractions), "one or more numbers in (0, 1]")
    require(draws >= 1, "draws", draws, "at least 1")
    x, y = labelled_arrays(train_x, train_y, "train")
    rows: list[tuple[float, tuple[str | None, int | None], list[np.ndarray]]] = []
    for fraction in sorted(set(fractions), reverse=True):
        seeds = range(seed, seed + (1 if fraction == 1 else draws))
        rows.append((fraction, (None, None), [label_subset(y, fraction, each) for each in seeds]))
    for subset in subsets:
        used = subset.used[np.asarray(train_y) >= 0]
        rows.append((float(used.mean()), (subset.name, subset.listed), [used]))
    fit: Callable[..., Any] = linear_probe if probe == "lbfgs" else gradient_probe
    results = []
    for fraction, listed, parts in rows:
        settings = {} if probe == "lbfgs" else {"settings": probe, "fraction": fraction}
        found = [
            fit(x[used], y[used], test_x, test_y, seed=seed + draw, **settings)
            for draw, used in enumerate(parts)
        ]
        accuracies = tuple(each.accuracy for each in found)
        of_five = float(np.mean([each.top5 for each in found]))
        labels = int(parts[0].sum())
        measured = (*spread(accuracies), accuracies, of_five)
        results.append(FewLabels(fraction, labels, *measured, *listed))
    return results
