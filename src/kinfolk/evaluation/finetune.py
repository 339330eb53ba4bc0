"""Evaluation with few labels: fine-tuning of encoder and classifier, and linear probes on
class-balanced or listed subsets of the labels.

Fine-tuning trains a copy of the encoder and a linear classifier together:

    ifnd   SGD, momentum 0.9, weight decay 5e-4, batch 256, 20 epochs; the encoder's rate is 0.01,
           the classifier's 0.1 on a tenth of the labels and 1 on a hundredth; both × 0.2 after 60
           and 80 % of the epochs (IFND, appendix C)
    rcl    SGD, Nesterov momentum 0.9, no weight decay, batch 4,096, rate 0.05 · batch / 256 for
           both, 30 epochs on a tenth of the labels and 60 on a hundredth (RCL, section 5.2, which
           follows SimCLR, appendix B.5)

Images are cropped and flipped like the training views; their colours are not changed. The linear
probes are those of Tables 1 and 7 and Figure 4 of the GloFND paper.

Deviates from the papers in: with few samples the number of epochs is raised so that there are at
least 200 steps; the learning rate of `rcl` is scaled by the actual batch size and decays to 0 with
a cosine, which neither paper states.

Dimension key: N training samples, M test samples, B batch, F features, K classes.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

from kinfolk.embedding import Images, Preparation, embed
from kinfolk.errors import KinfolkError, UsageError, show_progress
from kinfolk.evaluation.detection import spread
from kinfolk.evaluation.gradient_probe import gradient_probe
from kinfolk.evaluation.probes import labelled, linear_probe
from kinfolk.models.build import adapt
from kinfolk.seeding import derive_seed, generator, kept_random_state

if TYPE_CHECKING:
    from torch import Tensor

    Array = Tensor | np.ndarray


EPOCHS, FEWEST_STEPS = 20, 200
A_TENTH = 0.09
"""Shares from here on use the settings for 10 % of the labels; published lists of 10 % are slightly
smaller."""


def tuning(name: str, fraction: float) -> dict[str, Any]:
    """Returns the arguments of `finetune` that the paper `name` uses for this share of the labels.

    Example:
        >>> tuning("ifnd", 0.01)["classifier_lr"], tuning("rcl", 0.1)["usual_epochs"]
        (1.0, 30)
    """
    tenth = fraction >= A_TENTH
    if name == "ifnd":
        return {
            "batch_size": 256,
            "lr": 0.01,
            "classifier_lr": 0.1 if tenth else 1.0,
            "weight_decay": 5e-4,
            "usual_epochs": EPOCHS,
        }
    if name == "rcl":
        rates = {
            "batch_size": 4096,
            "lr": 0.8,
            "classifier_lr": 0.8,
            "weight_decay": 0.0,
            "scale_lr": True,
        }
        return {
            **rates,
            "nesterov": True,
            "schedule": "cosine",
            "usual_epochs": 30 if tenth else 60,
        }
    raise ValueError(f"`name` (={name!r}) must be one of {', '.join(TUNINGS)}")


TUNINGS = ("ifnd", "rcl")
"""Names of the papers' settings, see the module docstring."""


class Augmenting(Preparation, Protocol):
    """The interface needed of the views, such as `kinfolk.data.augmentation.views.Views`."""

    def __call__(
        self,
        pixels: Tensor,
        generator: torch.Generator,
        aspect: Tensor | None = None,
        num_views: int = 2,
    ) -> Tensor:
        """(V, B, 3, size, size)."""


@dataclass(frozen=True)
class FinetuneResult:
    """Result of `finetune`.

    Args:
        accuracy, top5: share of test samples whose class has the highest score, or one of the five
            highest, in [0, 1]. `top5` is NaN with five classes or fewer.
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
    """Trains a copy of `encoder` with a linear classifier on `train`, and tests it on `test` once
    at the end. `encoder` is not changed.

    Args:
        encoder: (B, 3, H, W) → (B, F).
        data: pixels and aspect ratios by id.
        views: augments the training images, and prepares the test images with its `evaluate`.
        train, test: ids (N,) and classes (N,), all labelled. A test class without training samples
            counts as wrong.
        epochs: None means `usual_epochs`, or as many as 200 steps need.
        batch_size, lr, classifier_lr, weight_decay, nesterov: arguments of SGD. `tuning` returns
            those of the papers.
        schedule: "steps" multiplies both rates by 0.2 after 60 and 80 % of the epochs; "cosine"
            lets them decay to 0.
        scale_lr: whether to reduce the rates in proportion when batches are smaller than
            `batch_size`.
        usual_epochs: number of epochs with enough samples.
        seed: seed of order and augmentation.
        device: None means the device of the encoder.
        progress: whether to show a progress bar.
    """
    (ids_N, label_N), (test_ids_M, test_label_M) = (
        (ids.cpu(), labels.cpu()) for ids, labels in (train, test)
    )
    if batch_size < 2:
        raise ValueError(
            f"`batch_size` (={batch_size}) must be at least 2: BatchNorm needs more than one sample"
        )
    if epochs is not None and epochs < 1:
        raise ValueError(f"`epochs` (={epochs}) must be at least 1")
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
        groups = [
            {"params": copied.parameters(), "lr": scale * lr},
            {"params": layer.parameters(), "lr": scale * classifier_lr},
        ]
        optimizer = torch.optim.SGD(
            groups, lr=scale * lr, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: _factor(schedule, epoch, epochs)
        )
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
                raise KinfolkError(
                    f"The fine-tuning loss is not finite in epoch {epoch + 1}; use a smaller"
                    " learning rate."
                )
    logits_MK = embed(model, data, views, test_ids_M, device=device)
    ranked_MK = classes_K[logits_MK.topk(min(5, len(classes_K)), 1).indices]
    right_MK = ranked_MK == test_label_M.unsqueeze(1)
    top5 = float(right_MK.any(1).double().mean()) if len(classes_K) > 5 else math.nan
    return FinetuneResult(
        float(right_MK[:, 0].double().mean()), top5, epochs, epochs * batches, total / len(ids_N)
    )


def _factor(schedule: Literal["steps", "cosine"], epoch: int, epochs: int) -> float:
    """Factor of the learning rates in this epoch."""
    if schedule == "cosine":
        return (1 + math.cos(math.pi * epoch / epochs)) / 2
    return 0.2 ** sum(epoch >= max(1, round(share * epochs)) for share in (0.6, 0.8))


def _batches(
    data: Images,
    views: Augmenting,
    ids_N: Tensor,
    number: int,
    seed: int,
    epoch: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented images and the positions of their labels. All batches are of about the same
    size, so that none has one sample."""
    order_N = torch.randperm(len(ids_N), generator=generator(seed, "finetune", epoch))
    for step, place_B in enumerate(order_N.tensor_split(number)):
        ids_B = ids_N[place_B]
        draw = generator(seed, "finetune", epoch, step, device=device)
        yield (
            views(
                data.pixels(ids_B).to(device),
                draw,
                aspect=data.aspect(ids_B).to(device),
                num_views=1,
            )[0],
            place_B,
        )


FRACTIONS = (1.0, 0.1, 0.01, 0.001)
"""Shares of the labels in Table 1 of the GloFND paper."""


def label_subset(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """(N,) True for the samples whose labels are used.

    The same number from each class, together `fraction` of all labels, and at least one each.

    A class with fewer samples contributes all of them. A fraction of 1 means all labels, balanced
    or not. For one seed, a smaller subset is contained in a larger one. Unlabelled samples (below
    0) are never used.

    Example:
        >>> labels = np.repeat([0, 1, -1], [80, 20, 100])
        >>> [int(label_subset(labels, fraction, seed=0).sum()) for fraction in (1, 0.1, 0.001)]
        [100, 10, 2]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` (={fraction}) must be in (0, 1]")
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
    """The samples that a file lists.

    Args:
        name: name of the file without its suffix, such as "1percent".
        used: (N,) True for the listed samples.
        listed: number of names in the file, found or not.
    """

    name: str
    used: NDArray[np.bool_]
    listed: int


def read_subset(path: str | Path, keys: Sequence[str]) -> ListedSubset:
    """Reads a list of file names, one per line, in the format that SimCLR publishes for 1 and 10 %
    of ImageNet.

    A line is the key of a sample or the end of a key: `n01440764_10026.JPEG` matches
    `train/n01440764/n01440764_10026.JPEG`. Empty lines and lines that start with `#` are skipped.
    Names that match no sample are counted and otherwise ignored. A name that matches several
    samples is an error.

    Args:
        path: the file.
        keys: (N,) keys of the samples to choose from, with `/` between folders.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no list `{path}`; --subset takes a text file with one file name per line"
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    names = dict.fromkeys(
        PurePosixPath(line.replace("\\", "/")).parts
        for line in lines
        if line and not line.startswith("#")
    )
    ends: dict[tuple[str, ...], list[int]] = defaultdict(list)
    lengths = {len(name) for name in names}
    for row, key in enumerate(keys):
        parts = PurePosixPath(key).parts
        for length in lengths:
            if length <= len(parts):
                ends[parts[len(parts) - length :]].append(row)
    used_N = np.zeros(len(keys), dtype=np.bool_)
    for name in names:
        rows = ends.get(name, [])
        if len(rows) > 1:
            both = " and ".join(repr(keys[row]) for row in rows[:2])
            raise UsageError(
                f"`{path}` lists {'/'.join(name)!r}, which matches {len(rows)} samples ({both}, …);"
                " add their folders to the list"
            )
        used_N[rows] = True
    if not used_N.any():
        first = "nothing" if not names else f"for example {'/'.join(next(iter(names)))!r}"
        raise UsageError(
            f"`{path}` matches none of the labelled training images; it lists {first}, and the"
            f" first image is {keys[0]!r}"
        )
    return ListedSubset(path.stem, used_N, len(names))


DRAWS = 3


@dataclass(frozen=True)
class FewLabels:
    """Accuracy of a probe fitted on a subset of the labels.

    Args:
        fraction: share of the labels.
        labels: number of labels, at least one per class.
        accuracy: mean over the draws, in [0, 1].
        deviation: standard deviation over the draws. NaN for a single draw.
        accuracies: accuracy of each draw.
        top5: share of test samples whose class has one of the five highest scores, mean over the
            draws. NaN with five classes or fewer.
        subset: name of the list that the labels were taken from. None if they were drawn.
        listed: number of names in the list, found or not.
    """

    fraction: float
    labels: int
    accuracy: float
    deviation: float
    accuracies: tuple[float, ...]
    top5: float = float("nan")
    subset: str | None = None
    listed: int = 0


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
    progress: bool = False,
) -> list[FewLabels]:
    """Accuracy of a linear probe fitted on class-balanced subsets of the training labels
    (`label_subset`) or on listed labels.

    Args:
        train_x, train_y, test_x, test_y: see `linear_probe`.
        fractions: shares of the labels, in (0, 1].
        subsets: lists of training samples (`read_subset`), measured after the fractions.
        draws: number of subsets per fraction below 1, each with its own seed.
        probe: "lbfgs" (`linear_probe`) or a name from `gradient_probe.PROBES`.
        seed: seed of the first draw.
        progress: whether to show a progress bar.
    """
    if not all(0 < fraction <= 1 for fraction in fractions) or not (fractions or subsets):
        raise ValueError(f"`fractions` (={tuple(fractions)}) must be one or more numbers in (0, 1]")
    if draws < 1:
        raise ValueError(f"`draws` (={draws}) must be at least 1")
    x, y = labelled(train_x, train_y, "train")
    known = np.asarray(train_y) >= 0
    wanted: list[tuple[FewLabels, list[np.ndarray]]] = []
    for fraction in sorted(set(fractions), reverse=True):
        parts = [
            label_subset(y, fraction, seed + draw) for draw in range(1 if fraction == 1 else draws)
        ]
        wanted.append((FewLabels(fraction, int(parts[0].sum()), 0.0, 0.0, ()), parts))
    for subset in subsets:
        used = subset.used[known]
        share = float(used.mean())
        wanted.append(
            (
                FewLabels(
                    share, int(used.sum()), 0.0, 0.0, (), subset=subset.name, listed=subset.listed
                ),
                [used],
            )
        )
    plan = [
        (row, draw, used)
        for row, (_, parts) in enumerate(wanted)
        for draw, used in enumerate(parts)
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in wanted]
    for row, draw, used in show_progress(plan, len(plan), "Few labels", enabled=progress):
        found[row].append(
            probe_accuracy(
                probe, x[used], y[used], test_x, test_y, wanted[row][0].fraction, seed + draw
            )
        )
    results = []
    for (of, _), each in zip(wanted, found, strict=True):
        accuracies = [accuracy for accuracy, _ in each]
        mean, deviation = spread(accuracies)
        best_five = float(np.mean([top5 for _, top5 in each]))
        results.append(
            replace(
                of, accuracy=mean, deviation=deviation, accuracies=tuple(accuracies), top5=best_five
            )
        )
    return results


def probe_accuracy(
    probe: str,
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    fraction: float = 1.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Accuracy and top-5 accuracy of the probe "lbfgs", or of a name from
    `gradient_probe.PROBES`."""
    found = (
        linear_probe(train_x, train_y, test_x, test_y, seed=seed)
        if probe == "lbfgs"
        else gradient_probe(train_x, train_y, test_x, test_y, probe, fraction=fraction, seed=seed)
    )
    return found.accuracy, found.top5
