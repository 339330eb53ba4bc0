"""The linear probe on few labels: Tables 1 and 7 and Figure 4 of the GloFND paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kinfolk.data.progress import show_progress
from kinfolk.evaluation.clusters import spread
from kinfolk.evaluation.gradient_probe import gradient_probe
from kinfolk.evaluation.linear import labelled, linear_probe
from kinfolk.evaluation.subsets import FRACTIONS, label_subset

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
    """

    fraction: float
    labels: int
    accuracy: float
    deviation: float
    accuracies: tuple[float, ...]


def semi_supervised(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = DRAWS,
    probe: str = "lbfgs",
    seed: int = 0,
    progress: bool = False,
) -> list[FewLabels]:
    """Accuracy of a linear probe fitted on class-balanced subsets of the training labels; see `label_subset`.

    Args:
        train_x, train_y, test_x, test_y: as `linear_probe`.
        fractions: of the labels, in (0, 1].
        draws: subsets of each fraction below 1; each is drawn by a seed of its own.
        probe: "lbfgs" (`linear_probe`), or one of `gradient_probe`.
        seed: of the first draw.
        progress: whether to show a bar.
    """
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"`fractions` (={tuple(fractions)}) must be one or more numbers in (0, 1]")
    if draws < 1:
        raise ValueError(f"`draws` (={draws}) must be at least 1")
    x, y = labelled(train_x, train_y, "train")
    ordered = sorted(set(fractions), reverse=True)
    plan = [(fraction, seed + draw) for fraction in ordered for draw in range(1 if fraction == 1 else draws)]
    found: dict[float, list[float]] = {fraction: [] for fraction in ordered}
    number = {fraction: int(label_subset(y, fraction, seed).sum()) for fraction in ordered}
    for fraction, own_seed in show_progress(plan, len(plan), "Few labels", enabled=progress):
        used = label_subset(y, fraction, own_seed)
        found[fraction].append(probe_accuracy(probe, x[used], y[used], test_x, test_y, fraction, own_seed))
    return [FewLabels(fraction, number[fraction], *spread(each), tuple(each)) for fraction, each in found.items()]


def probe_accuracy(probe: str, train_x: Array, train_y: Array, test_x: Array, test_y: Array, fraction: float = 1.0, seed: int = 0) -> float:
    """Accuracy of the probe called `probe`: "lbfgs", or one of `gradient_probe`."""
    if probe == "lbfgs":
        return linear_probe(train_x, train_y, test_x, test_y, seed=seed).accuracy
    return gradient_probe(train_x, train_y, test_x, test_y, probe, fraction=fraction, seed=seed).accuracy
