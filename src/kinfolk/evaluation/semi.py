"""The linear probe on few labels: Tables 1 and 7 and Figure 4 of the GloFND paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kinfolk.data.progress import show_progress
from kinfolk.evaluation.clusters import spread
from kinfolk.evaluation.gradient_probe import gradient_probe
from kinfolk.evaluation.linear import labelled, linear_probe
from kinfolk.evaluation.subsets import FRACTIONS, ListedSubset, label_subset

if TYPE_CHECKING:
    from torch import Tensor

    Array = Tensor | np.ndarray

DRAWS = 3


@dataclass(frozen=True)
class FewLabels:
    """Accuracy with a share of the labels.

    Args:
        fraction: of the labels.
        labels: how many that are; at least one of each class.
        accuracy: mean over the draws, in [0, 1].
        deviation: standard deviation over the draws; NaN of a single one.
        accuracies: of each draw.
        top5: share of test samples whose class is among the five likeliest, mean over the draws; NaN up to five classes.
        subset: name of the list the labels were taken from; None of labels that were drawn.
        listed: how many the list has, here or not.
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
    """Accuracy of a linear probe fitted on class-balanced subsets of the training labels, see `label_subset`, or on those of a list.

    Args:
        train_x, train_y, test_x, test_y: as `linear_probe`.
        fractions: of the labels, in (0, 1].
        subsets: lists of training samples, see `read_subset`; measured after the fractions.
        draws: subsets of each fraction below 1; each is drawn by a seed of its own.
        probe: "lbfgs" (`linear_probe`), or one of `gradient_probe`.
        seed: of the first draw.
        progress: whether to show a bar.
    """
    if not all(0 < fraction <= 1 for fraction in fractions) or not (fractions or subsets):
        raise ValueError(f"`fractions` (={tuple(fractions)}) must be one or more numbers in (0, 1]")
    if draws < 1:
        raise ValueError(f"`draws` (={draws}) must be at least 1")
    x, y = labelled(train_x, train_y, "train")
    known = np.asarray(train_y) >= 0
    wanted: list[tuple[FewLabels, list[np.ndarray]]] = []
    for fraction in sorted(set(fractions), reverse=True):
        parts = [label_subset(y, fraction, seed + draw) for draw in range(1 if fraction == 1 else draws)]
        wanted.append((FewLabels(fraction, int(parts[0].sum()), 0.0, 0.0, ()), parts))
    for subset in subsets:
        used = subset.used[known]
        share = float(used.mean())
        wanted.append((FewLabels(share, int(used.sum()), 0.0, 0.0, (), subset=subset.name, listed=subset.listed), [used]))
    plan = [(row, draw, used) for row, (_, parts) in enumerate(wanted) for draw, used in enumerate(parts)]
    found: list[list[tuple[float, float]]] = [[] for _ in wanted]
    for row, draw, used in show_progress(plan, len(plan), "Few labels", enabled=progress):
        found[row].append(probe_accuracy(probe, x[used], y[used], test_x, test_y, wanted[row][0].fraction, seed + draw))
    results = []
    for (of, _), each in zip(wanted, found, strict=True):
        accuracies = [accuracy for accuracy, _ in each]
        mean, deviation = spread(accuracies)
        best_five = float(np.mean([top5 for _, top5 in each]))
        results.append(replace(of, accuracy=mean, deviation=deviation, accuracies=tuple(accuracies), top5=best_five))
    return results


def probe_accuracy(
    probe: str, train_x: Array, train_y: Array, test_x: Array, test_y: Array, fraction: float = 1.0, seed: int = 0
) -> tuple[float, float]:
    """Accuracy and top-5 of the probe called `probe`: "lbfgs", or one of `gradient_probe`."""
    found = (
        linear_probe(train_x, train_y, test_x, test_y, seed=seed)
        if probe == "lbfgs"
        else gradient_probe(train_x, train_y, test_x, test_y, probe, fraction=fraction, seed=seed)
    )
    return found.accuracy, found.top5
