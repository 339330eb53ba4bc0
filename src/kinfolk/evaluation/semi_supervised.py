"""Linear probes on few labels: Tables 1 and 7 and Figure 4 of the GloFND paper.

The labels are class-balanced subsets of the training labels, or those that a file lists.

Dimension key: N samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.data.prepare import show_progress
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.evaluation.clusters import spread
from kinfolk.evaluation.gradient_probe import gradient_probe
from kinfolk.evaluation.linear import labelled, linear_probe
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from torch import Tensor

    Array = Tensor | np.ndarray


FRACTIONS = (1.0, 0.1, 0.01, 0.001)
"""Shares of the labels in Table 1 of the GloFND paper."""


def label_subset(labels: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """(N,) True for the samples whose labels are used.

    The same number from each class, together `fraction` of all labels, and at least one each.

    A class with fewer samples contributes all of them. A fraction of 1 means all labels, balanced or not. For one seed, a smaller subset is
    contained in a larger one. Unlabelled samples (below 0) are never used.

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
    """Reads a list of file names, one per line, in the format that SimCLR publishes for 1 and 10 % of ImageNet.

    A line is the key of a sample or the end of a key: `n01440764_10026.JPEG` matches `train/n01440764/n01440764_10026.JPEG`. Empty lines
    and lines that start with `#` are skipped. Names that match no sample are counted and otherwise ignored. A name that matches several
    samples is an error.

    Args:
        path: the file.
        keys: (N,) keys of the samples to choose from, with `/` between folders.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no list `{path}`; --subset takes a text file with one file name per line")
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    names = dict.fromkeys(PurePosixPath(line.replace("\\", "/")).parts for line in lines if line and not line.startswith("#"))
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
                f"`{path}` lists {'/'.join(name)!r}, which matches {len(rows)} samples ({both}, …); add their folders to the list"
            )
        used_N[rows] = True
    if not used_N.any():
        first = "nothing" if not names else f"for example {'/'.join(next(iter(names)))!r}"
        raise UsageError(f"`{path}` matches none of the labelled training images; it lists {first}, and the first image is {keys[0]!r}")
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
        top5: share of test samples whose class has one of the five highest scores, mean over the draws. NaN with five classes or fewer.
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
    """Accuracy of a linear probe fitted on class-balanced subsets of the training labels (`label_subset`) or on listed labels.

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
    """Accuracy and top-5 accuracy of the probe "lbfgs", or of a name from `gradient_probe.PROBES`."""
    found = (
        linear_probe(train_x, train_y, test_x, test_y, seed=seed)
        if probe == "lbfgs"
        else gradient_probe(train_x, train_y, test_x, test_y, probe, fraction=fraction, seed=seed)
    )
    return found.accuracy, found.top5
