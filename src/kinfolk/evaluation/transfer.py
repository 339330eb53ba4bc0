"""Transfer: ℓ2-regularised logistic regression on frozen features of another data set, with the
usual metric of that data set.

GloFND paper, appendix D.1, and Kornblith et al., Do Better ImageNet Models Transfer Better?, 2019:

    minimise over w    Σ cross-entropy + strength / 2 · ‖w‖²,    10 strengths, log-spaced in 10⁻⁶ …
                       10⁵

Deviates from the GloFND paper in: the strength is chosen on held-out **training** labels and not on
the test set, and features are standardised. Samples with several labels, as in VOC, are read from a
table with a row for each label of an image.

Dimension key: N training samples, M test samples, F features, K classes or labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.data.table import read_columns
from kinfolk.embedding import held_out_part
from kinfolk.errors import KinfolkError, UsageError, show_progress
from kinfolk.evaluation.probes import Metric, classifier, labelled
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from torch import Tensor

    Array = Tensor | np.ndarray


_TRUE = {"1", "true", "yes"}


def read_label_sets(path: str | Path, keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Returns (N, K) entries, and the K labels in sorted order: 1 if the sample has the label, 0 if
    not, −1 if the entry does not count.

    The table (`.csv`, `.tsv` or `.parquet`) has the columns `image` (the sample's key: its path
    within the data) and `label`, a row for each label of an image, and optionally `difficult`,
    which is 1 if the label does not count for this image. A sample that is not in the table has −1
    for all labels.
    """
    path = Path(path)
    if not path.is_file() or path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise UsageError(
            f"`{path}` is not a table; --label-sets takes a .csv, .tsv or .parquet file with the"
            " columns image and label"
        )
    columns = read_columns(path)
    for name in ("image", "label"):
        if name not in columns:
            raise UsageError(
                f"`{path}` has no column {name!r}; its columns are {', '.join(map(repr, columns))}"
            )
    labels = ["" if value is None else str(value).strip() for value in columns["label"]]
    difficult = [
        str(value).strip().lower() in _TRUE
        for value in columns.get("difficult", [None] * len(labels))
    ]
    names = sorted({label for label in labels if label})
    if not names:
        raise KinfolkError(f"`{path}` contains no labels")
    row_of, column_of = (
        {key: row for row, key in enumerate(keys)},
        {name: column for column, name in enumerate(names)},
    )
    sets = np.full((len(keys), len(names)), -1, dtype=np.int64)
    listed = [
        (row_of[image], label, hard)
        for image, label, hard in zip(columns["image"], labels, difficult, strict=True)
        if image in row_of
    ]
    if not listed:
        raise UsageError(
            f"`{path}` lists none of the images in the data; the data starts with {keys[0]!r}, the"
            f" table with {columns['image'][0]!r}"
        )
    for row, _, _ in listed:
        sets[row] = 0
    for row, label, hard in listed:
        # one clear instance is enough
        if label and not (hard and sets[row, column_of[label]] == 1):
            sets[row, column_of[label]] = -1 if hard else 1
    return sets, names


STRENGTHS = tuple(10 ** (-6 + 11 * i / 9) for i in range(10))
BY_NAME: tuple[tuple[str, Metric], ...] = (
    ("voc", "map"),
    ("pets?|caltech|flowers?|aircrafts?", "mean-per-class"),
)
BEFORE, AFTER = (
    "oxford|iiit|vgg|fgvc|pascal|visual",
    "devkit|detection|dataset|data|images?|pictures?|photos?|trainval|train|test|val",
)
"""Words that are joined to the names of data sets, as in `oxfordflowers` or `VOCdevkit`."""


@dataclass(frozen=True)
class TransferResult:
    """Result of `transfer` on the test part. Shares are in [0, 1].

    Args:
        value: the requested metric.
        metric: its name.
        top1: share of samples classified correctly. NaN for samples with several labels.
        mean_per_class: mean over the classes of the share of their samples classified correctly.
            NaN for samples with several labels.
        map, map_11: mean average precision over the classes, by area and by 11 points as in VOC
            2007. NaN unless requested.
        strength: the chosen ℓ2 penalty.
        held_out: the metric on the held-out training labels for each strength, strongest first.
        converged: whether the final fit reached its tolerance.
    """

    value: float
    metric: Metric
    top1: float
    mean_per_class: float
    map: float
    map_11: float
    strength: float
    held_out: dict[float, float]
    converged: bool


def metric_of(name: str) -> Metric:
    """The usual metric of a data set, from its name: mAP for VOC, mean per class for Pets,
    Caltech-101, Flowers and Aircraft, else top-1.

    Case, digits and punctuation do not matter: `oxford-iiit-pet`, `OxfordIIITPet` and `oxfordpets`
    are the same. A longer word that ends in a name (`carpets`) does not match.

    Example:
        >>> metric_of("data/oxford-iiit-pet"), metric_of("VOC2007.csv"), metric_of("cifar10.npz")
        ('mean-per-class', 'map', 'top1')
        >>> metric_of("OxfordIIITPet"), metric_of("oxfordflowers"), metric_of("carpets")
        ('mean-per-class', 'mean-per-class', 'top1')
    """
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    apart = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", last)  # OxfordFlowers102 → Oxford, Flowers
    words = {word.lower() for word in (*re.findall(r"[A-Za-z]+", last), *apart)}
    for names, metric in BY_NAME:
        if any(re.fullmatch(rf"(?:{BEFORE})*(?:{names})(?:{AFTER})*", word) for word in words):
            return metric
    return "top1"


def transfer(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    metric: Metric = "top1",
    *,
    strengths: Sequence[float] = STRENGTHS,
    holdout: float = 0.2,
    seed: int = 0,
    max_iter: int = 1000,
    progress: bool = False,
) -> TransferResult:
    """Logistic regression on frozen features.

    The strength with the best `metric` on a held-out part of the training labels is chosen (the
    stronger one in a tie). The classifier is then fitted again on all training labels and tested
    once.

    Args:
        train_x, test_x: (N, F), (M, F).
        train_y, test_y: (N,), (M,) classes, where −1 means unlabelled; or, for "map", (N, K), (M,
            K) labels from `read_label_sets`, with one classifier per label.
        metric: "top1", "mean-per-class" or "map".
        strengths: ℓ2 penalties to choose from. They apply to the *sum* of the losses.
        holdout: share of each class that is held out. If no class has two samples, nothing is held
            out and the middle strength is used.
        seed: seed of the held-out part.
        max_iter: L-BFGS iterations of a fit.
        progress: whether to show a progress bar.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"`metric` (={metric!r}) must be one of {', '.join(get_args(Metric))}")
    if not strengths or not min(strengths) > 0:
        raise ValueError(f"`strengths` (={tuple(strengths)}) must be one or more numbers above 0")
    if not 0 < holdout < 1:
        raise ValueError(f"`holdout` (={holdout}) must be in (0, 1)")
    several = train_y.ndim == 2
    if several and metric != "map":
        raise ValueError(f"`metric` (={metric!r}) must be map if samples have several labels")
    x, y, xt, yt = _parts(train_x, train_y, test_x, test_y)
    ordered = sorted(strengths, reverse=True)
    strength, held_out = ordered[len(ordered) // 2], dict[float, float]()
    held = _held_out(y, holdout, seed)
    trial = (
        classifier(x[~held], y[~held], metric, max_iter)
        if len(ordered) > 1 and held.any()
        else None
    )
    if trial is not None:
        for candidate in show_progress(ordered, len(ordered), "Transfer", enabled=progress):
            trial.fit(candidate)
            held_out[candidate] = trial.measure(x[held], y[held])[metric]
        strength = max(ordered, key=lambda candidate: np.nan_to_num(held_out[candidate], nan=-1.0))
    final = classifier(x, y, metric, max_iter)
    if final is None:
        what = (
            "labels that some samples have and others do not"
            if several
            else f"at least two classes; all {len(y)} are of class {y[0]}"
        )
        raise KinfolkError(f"Logistic regression needs {what}.")
    converged = final.fit(strength)
    found = final.measure(xt, yt)
    top1, per_class, area, eleven = (
        found[name] for name in ("top1", "mean-per-class", "map", "map-11")
    )
    return TransferResult(
        found[metric], metric, top1, per_class, area, eleven, strength, held_out, converged
    )


def _held_out(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    if y.ndim == 1:
        return held_out_part(y, share, seed)
    held = np.zeros(len(y), dtype=bool)
    held[
        torch.randperm(len(y), generator=generator(seed, "transfer-holdout")).numpy()[
            : round(share * len(y))
        ]
    ] = True
    return held


def _parts(
    train_x: Array, train_y: Array, test_x: Array, test_y: Array
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if train_y.ndim == 1:
        return *labelled(train_x, train_y, "train"), *labelled(test_x, test_y, "test")
    found = []
    for x, y, part in ((train_x, train_y, "train"), (test_x, test_y, "test")):
        sets = np.asarray(y)
        if sets.ndim != 2 or sets.shape[1] != np.asarray(train_y).shape[1]:
            raise ValueError(
                f"`{part}_y` (={sets.shape}) must have the shape (samples, labels), with the same"
                " labels in both parts"
            )
        known = (sets >= 0).any(1)
        features, _ = labelled(x, np.where(known, 0, -1), part)
        found += [features, sets[known]]
    return found[0], found[1], found[2], found[3]
