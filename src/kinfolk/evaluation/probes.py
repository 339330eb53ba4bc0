"""Classifiers on frozen features: k nearest neighbours (Wu et al., Unsupervised Feature Learning
via Non-Parametric Instance Discrimination, 2018, section 3.4), logistic regression, and the same on
another data set (GloFND, appendix D.1; Kornblith et al., Do Better ImageNet Models Transfer
Better?, 2019).

The ℓ2 strength is chosen on held-out **training** labels; GloFND's code chooses it on the test set.

Dimension key: N training samples, M test samples, R rows of a block, F features, K neighbours,
classes or labels, C classes.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kinfolk.data.labels import read_columns
from kinfolk.embedding import held_out_part
from kinfolk.errors import KinfolkError, UsageError, require, require_choice
from kinfolk.seeding import generator

Array = Tensor | np.ndarray
_BLOCK_ELEMENTS = {"cpu": 1 << 23, "default": 1 << 28}
"""Similarities held at a time: 32 MB on the CPU, 1 GB on an accelerator."""


# Nearest neighbours


def knn_accuracy(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    test_y: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> float:
    """Share of test samples that are classified correctly by their k nearest training samples (all,
    if there are fewer), which vote with the weight exp(cosine / temperature).

    Without a test part, each training sample is classified by all others. A tie goes to the lower
    class. Unlabelled samples (below 0) are left out.
    """
    if (test_x is None) != (test_y is None):
        raise ValueError("`test_x` and `test_y` must be given together")
    train_x, train_y = _labelled_tensors(train_x, train_y, "train")
    expected = train_y
    if test_x is not None and test_y is not None:
        test_x, expected = _labelled_tensors(test_x, test_y, "test")
    predicted = knn_predict(train_x, train_y, test_x, k, temperature, device)
    return float((predicted == expected.to(predicted.device)).double().mean())


@torch.no_grad()
def knn_predict(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> Tensor:
    """(M,) predicted class of each row of `test_x`, or (N,) of each row of `train_x` by all others,
    on the device of `train_x`. See `knn_accuracy`."""
    require(k >= 1, "k", k, "at least 1")
    require(temperature > 0, "temperature", temperature, "above 0")
    train_x, train_y = _labelled_tensors(train_x, train_y, "train")
    leave_one_out = test_x is None
    if leave_one_out and len(train_x) < 2:
        raise KinfolkError("Nearest neighbours need at least two labelled samples, or a test part.")
    home, device = train_x.device, train_x.device if device is None else device
    train_NF = functional.normalize(train_x.to(device).float(), dim=1)
    test_MF = train_NF
    if test_x is not None:
        test_MF = functional.normalize(_tensor(test_x).to(device).float(), dim=1)
    if test_MF.shape[1] != train_NF.shape[1]:
        raise ValueError(
            f"`test_x` (={test_MF.shape[1]} features) must have as many as `train_x`"
            f" (={train_NF.shape[1]})"
        )
    if not bool(test_MF.isfinite().all()):
        raise KinfolkError("The features of the test part contain values that are not finite.")
    classes_C, class_N = torch.unique(train_y.to(device), return_inverse=True)
    k = min(k, len(train_NF) - leave_one_out)
    most = _BLOCK_ELEMENTS["cpu" if train_NF.device.type == "cpu" else "default"]
    rows = max(1, most // len(train_NF))
    predicted = [classes_C[:0]]
    for start in range(0, len(test_MF), rows):
        sim_RN = test_MF[start : start + rows] @ train_NF.T
        if leave_one_out:
            sim_RN.diagonal(start).fill_(-torch.inf)
        sim_RK, index_RK = sim_RN.topk(k)
        # relative to the nearest neighbour, so that a small temperature does not overflow
        votes_RK = ((sim_RK - sim_RK[:, :1]) / temperature).exp()
        votes_RC = votes_RK.new_zeros(len(sim_RN), len(classes_C))
        votes_RC.scatter_add_(1, class_N[index_RK], votes_RK)
        predicted.append(classes_C[votes_RC.argmax(1)])
    return torch.cat(predicted).to(home)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # torch warns about arrays that are not writeable
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _labelled_tensors(x: Array, y: Array, part: str) -> tuple[Tensor, Tensor]:
    x, y = _tensor(x), _tensor(y)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"`{part}_x` (={tuple(x.shape)}) and `{part}_y` (={tuple(y.shape)}) must have the"
            " shapes (samples, features), (samples,)"
        )
    y = y.to(x.device)
    known = y >= 0
    if not bool(known.any()):
        raise KinfolkError(f"The {part} part has no labelled samples; a classifier needs labels.")
    if not bool(x.isfinite().all()):
        raise KinfolkError(f"The features of the {part} part contain values that are not finite.")
    return (x, y) if bool(known.all()) else (x[known], y[known])


def labelled_arrays(x: Array, y: Array, part: str) -> tuple[np.ndarray, np.ndarray]:
    features, labels = _labelled_tensors(x, y, part)
    return features.detach().cpu().float().numpy(), labels.cpu().numpy()


# Metrics

TOP = 5
Metric = Literal["top1", "mean-per-class", "map"]


def top5(scores: np.ndarray, classes: np.ndarray, truth: np.ndarray) -> float:
    """Share of samples whose class has one of the five highest scores (M, K). NaN if K ≤ 5."""
    if len(classes) <= TOP:
        return math.nan
    highest = np.argpartition(-scores, TOP - 1, axis=1)[:, :TOP]
    return float((classes[highest] == truth[:, None]).any(1).mean())


def mean_per_class(predicted: np.ndarray, truth: np.ndarray) -> float:
    from sklearn.metrics import recall_score

    if not len(truth):
        return math.nan
    return float(recall_score(truth, predicted, labels=np.unique(truth), average="macro"))


def average_precision(scores: np.ndarray, truth: np.ndarray, points: int | None = None) -> float:
    """Precision averaged over recall, of scores (M,) and truth (M,), 1 for positives, 0 for
    negatives, −1 to ignore; NaN without a positive. `points`: 11 as in VOC 2007, the mean over the
    recalls 0, 0.1 … 1 of the highest precision from there on."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    known = truth >= 0
    if not (truth[known] == 1).any():
        return math.nan
    if points is None:
        return float(average_precision_score(truth[known], scores[known]))
    precision, recall, _ = precision_recall_curve(truth[known], scores[known])
    levels = np.linspace(0, 1, points)
    return float(np.mean([precision[:-1][recall[:-1] >= level - 1e-12].max() for level in levels]))


def mean_average_precision(
    scores: np.ndarray, truth: np.ndarray, points: int | None = None
) -> float:
    found = [average_precision(scores[:, k], truth[:, k], points) for k in range(truth.shape[1])]
    finite = [value for value in found if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


# Logistic regression


Part = tuple[np.ndarray, np.ndarray]
"""(N, F) features, and (N,) classes or (N, K) labels."""


def _fit(x: np.ndarray, y: np.ndarray, penalty: float, max_iter: int) -> tuple[Any, bool]:
    """Minimises Σ cross-entropy + penalty / 2 · ‖w‖² on standardised features; returns the model,
    and whether it converged."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=max_iter))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(x, y)
    return model, not any(issubclass(each.category, ConvergenceWarning) for each in caught)


def _measure(
    train: Part, test: Part, metric: Metric, strength: float, max_iter: int, of_mean: bool
) -> tuple[dict[str, float], list[bool]]:
    """Metrics on `test`, NaN where they do not apply, and which fits on `train` converged: for (N,)
    classes a logistic regression and, with the metric "map", one of each class against the rest;
    for (N, K) labels one of each label that some samples have and others do not. `of_mean`: the
    penalty applies to the mean of the losses."""
    (x, y), (xt, yt) = train, test
    converged: list[bool] = []

    def fit(chosen: np.ndarray, target: np.ndarray) -> Any:
        scale = len(target) if of_mean else 1
        model, done = _fit(chosen, target, strength * scale, max_iter)
        converged.append(done)
        return model

    found = dict.fromkeys(("top1", "top5", "mean-per-class", "map", "map-11"), math.nan)
    classes = np.unique(y)
    if y.ndim == 1 and len(classes) > 1:
        model = fit(x, y)
        predicted = model.predict(xt)
        found["top1"] = float((predicted == yt).mean())
        found["top5"] = top5(model.decision_function(xt).reshape(len(xt), -1), classes, yt)
        found["mean-per-class"] = mean_per_class(predicted, yt)
    if metric == "map":
        if y.ndim == 1:
            y, yt = ((each[:, None] == classes).astype(np.int64) for each in (y, yt))
        mixed = [label for label, of_N in enumerate(y.T) if {0, 1} <= set(of_N.tolist())]
        scores = []
        for label in mixed:
            known = y[:, label] >= 0
            scores.append(fit(x[known], y[known, label]).decision_function(xt))
        if mixed:
            ranked = np.stack(scores, 1), yt[:, mixed]
            found["map"] = mean_average_precision(*ranked)
            found["map-11"] = mean_average_precision(*ranked, 11)
    return found, converged


class _Search(NamedTuple):
    strength: float
    held_out: dict[float, float]
    converged: bool
    measured: dict[str, float]


def _search(
    train: Part,
    test: Part,
    strengths: Sequence[float],
    held_parts: Sequence[np.ndarray],
    metric: Metric,
    max_iter: int,
    of_mean: bool,
) -> _Search:
    """Tests with the strength that has the best mean metric on the held-out parts of `train`, the
    stronger one in a tie, or with the middle one if nothing can be held out."""
    (x, y), ordered = train, sorted(strengths, reverse=True)
    held_out = dict[float, float]()
    for strength in ordered if len(ordered) > 1 and held_parts else ():
        parts = [((x[~held], y[~held]), (x[held], y[held])) for held in held_parts]
        each = [_measure(*part, metric, strength, max_iter, of_mean)[0][metric] for part in parts]
        held_out[strength] = float(np.mean(each))
    if all(map(math.isnan, held_out.values())):
        held_out, best = {}, ordered[len(ordered) // 2]
    else:  # rounded, so that equal counts of correct samples tie
        best = max(ordered, key=lambda each: np.nan_to_num(round(held_out[each], 9), nan=-1.0))
    found, converged = _measure(train, test, metric, best, max_iter, of_mean)
    if not converged:
        what = "labels that some samples have and others do not"
        if y.ndim == 1:
            what = f"at least two classes; all {len(y)} labelled training samples are of class"
            what = f"{what} {y[0]}"
        raise KinfolkError(f"Logistic regression needs {what}.")
    return _Search(best, held_out, all(converged), found)


def _check_search(strengths: Sequence[float], holdout: float) -> None:
    good = bool(strengths) and min(strengths) > 0
    require(good, "strengths", tuple(strengths), "one or more numbers above 0")
    require(0 < holdout < 1, "holdout", holdout, "in (0, 1)")


LINEAR_STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ENOUGH_HELD_OUT, MOST_REPEATS = 200, 5
"""Held-out samples that are enough to choose a strength, and the highest number of hold-outs."""


@dataclass(frozen=True)
class LinearResult:
    """With the chosen ℓ2 penalty, the accuracy on the held-out training labels for each, and
    whether the final fit reached its tolerance."""

    accuracy: float
    strength: float
    held_out: dict[float, float]
    converged: bool
    top5: float = math.nan


def linear_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    strengths: Sequence[float] = LINEAR_STRENGTHS,
    holdout: float = 0.1,
    seed: int = 0,
    max_iter: int = 1000,
) -> LinearResult:
    """Accuracy of a linear classifier on frozen features.

        minimise over w    mean cross-entropy + strength / 2 · ‖w‖²

    The strength is the best on a stratified, held-out part of the training labels, with few samples
    on up to five parts, or the middle one if nothing can be held out. Then all training labels are
    used, and the test labels once. Unlabelled samples (below 0) are left out; a test class without
    training samples counts as wrong.
    """
    _check_search(strengths, holdout)
    x, y = labelled_arrays(train_x, train_y, "train")
    test = labelled_arrays(test_x, test_y, "test")
    held = held_out_part(y, holdout, seed)
    repeats = min(MOST_REPEATS, math.ceil(ENOUGH_HELD_OUT / held.sum())) if held.any() else 0
    parts = [held_out_part(y, holdout, seed, repeat) for repeat in range(repeats)]
    best = _search((x, y), test, strengths, parts, "top1", max_iter, of_mean=True)
    found = best.measured
    return LinearResult(found["top1"], best.strength, best.held_out, best.converged, found["top5"])


STRENGTHS = tuple(10 ** (-6 + 11 * i / 9) for i in range(10))


@dataclass(frozen=True)
class TransferResult:
    """Metrics on the test part, NaN where they do not apply; `held_out` is the metric on the
    held-out training labels for each strength."""

    value: float
    metric: Metric
    top1: float
    mean_per_class: float
    map: float
    map_11: float
    strength: float
    held_out: dict[float, float]
    converged: bool


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
) -> TransferResult:
    """Logistic regression on frozen features of another data set.

        minimise over w    Σ cross-entropy + strength / 2 · ‖w‖²

    The strength is chosen as by `linear_probe`, one of ten in 10⁻⁶ … 10⁵, by the `metric`. With
    "map", labels may be (N, K), (M, K) from `read_label_sets`, with one classifier per label.
    """
    require_choice("metric", metric, get_args(Metric))
    _check_search(strengths, holdout)
    good = train_y.ndim == 1 or metric == "map"
    require(good, "metric", metric, "map if samples have several labels")
    x, y = _with_label_sets(train_x, train_y, "train")
    test = _with_label_sets(test_x, test_y, "test")
    if y.ndim == 1:
        held = held_out_part(y, holdout, seed)
    else:
        order = torch.randperm(len(y), generator=generator(seed, "transfer-holdout")).numpy()
        held = np.isin(np.arange(len(y)), order[: round(holdout * len(y))])
    parts = [held] if held.any() else []
    best = _search((x, y), test, strengths, parts, metric, max_iter, of_mean=False)
    found, chosen = best.measured, (best.strength, best.held_out, best.converged)
    metrics = found["top1"], found["mean-per-class"], found["map"], found["map-11"]
    return TransferResult(found[metric], metric, *metrics, *chosen)


def _with_label_sets(x: Array, y: Array, part: str) -> tuple[np.ndarray, np.ndarray]:
    if y.ndim == 1:
        return labelled_arrays(x, y, part)
    sets = np.asarray(y)
    known = (sets >= 0).any(1)
    return labelled_arrays(x, np.where(known, 0, -1), part)[0], sets[known]


BY_NAME: tuple[tuple[str, Metric], ...] = (
    ("voc", "map"),
    ("pets?|caltech|flowers?|aircrafts?", "mean-per-class"),
)
BEFORE, AFTER = (
    "oxford|iiit|vgg|fgvc|pascal|visual",
    "devkit|detection|dataset|data|images?|pictures?|photos?|trainval|train|test|val",
)
"""Words that are joined to the names of data sets, as in `oxfordflowers` or `VOCdevkit`."""


def metric_of(name: str) -> Metric:
    """The metric that papers report for a data set, from its name: mAP for VOC, mean per class for
    Pets, Caltech-101, Flowers and Aircraft, else top-1.

    Example:
        >>> metric_of("data/OxfordIIITPet"), metric_of("VOC2007.csv"), metric_of("carpets")
        ('mean-per-class', 'map', 'top1')
    """
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    words = re.findall("[a-z]+", last.lower())
    for names, metric in BY_NAME:
        if any(re.fullmatch(rf"(?:{BEFORE})*(?:{names})(?:{AFTER})*", word) for word in words):
            return metric
    return "top1"


def read_label_sets(path: str | Path, keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """(N, K) entries, and the K labels in sorted order: 1 if the sample has the label, 0 if not, −1
    if the entry does not count, or the sample is not in the table.

    The table has the columns `image` (the sample's key) and `label`, a row for each label of an
    image, and optionally `difficult`, 1 if the label does not count for this image.
    """
    if not Path(path).is_file():
        raise UsageError(f"`{path}` is not a table with the columns image and label")
    columns = read_columns(Path(path))
    if missing := {"image", "label"} - columns.keys():
        raise UsageError(
            f"`{path}` has no column {min(missing)!r}; its columns are"
            f" {', '.join(map(repr, columns))}"
        )
    labels = ["" if value is None else str(value).strip() for value in columns["label"]]
    names = sorted({*labels} - {""})
    row_of = {key: row for row, key in enumerate(keys)}
    sets = np.full((len(keys), len(names)), -1, dtype=np.int64)
    sets[[row_of[image] for image in columns["image"] if image in row_of]] = 0
    if not names or (sets < 0).all():
        what = "lists none of the images in the data" if names else "contains no labels"
        raise UsageError(f"`{path}` {what}, such as {keys[0]!r}")
    difficult = columns.get("difficult", [None] * len(labels))
    for image, label, value in zip(columns["image"], labels, difficult, strict=True):
        if image in row_of and label:
            place = row_of[image], names.index(label)
            is_difficult = str(value).strip().lower() in {"1", "true", "yes"}
            if not is_difficult:
                sets[place] = 1
            elif sets[place] == 0:  # one clear instance is enough
                sets[place] = -1
    return sets, names
