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
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kinfolk.data.labels import read_columns
from kinfolk.embedding import held_out_part
from kinfolk.errors import KinfolkError, UsageError, require, require_at_least, require_choice
from kinfolk.seeding import generator

Array = Tensor | np.ndarray
_BLOCK_ELEMENTS = {"cpu": 1 << 23, "default": 1 << 28}
"""Similarities held at a time: 32 MB on the CPU, 1 GB on an accelerator."""


# Nearest neighbours


@torch.no_grad()
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
    require_at_least(1, k=k)
    require(temperature > 0, "temperature", temperature, "above 0")
    if (test_x is None) != (test_y is None):
        raise ValueError("`test_x` and `test_y` must be given together")
    train_x, train_y = test_of = _labelled(train_x, train_y, "train")
    leave_one_out = test_x is None
    if test_x is not None and test_y is not None:
        test_of = _labelled(test_x, test_y, "test")
    elif len(train_x) < 2:
        raise KinfolkError("Nearest neighbours need at least two labelled samples, or a test part.")
    device = train_x.device if device is None else torch.device(device)
    train_NF, test_MF = (
        functional.normalize(each.to(device).float(), dim=1) for each in (train_x, test_of[0])
    )
    truth_M = test_of[1].to(device)
    classes_C, class_N = torch.unique(train_y.to(device), return_inverse=True)
    k = min(k, len(train_NF) - leave_one_out)
    most = _BLOCK_ELEMENTS["cpu" if device.type == "cpu" else "default"]
    rows, right = max(1, most // len(train_NF)), torch.zeros((), device=device, dtype=torch.int64)
    for start in range(0, len(test_MF), rows):
        sim_RN = test_MF[start : start + rows] @ train_NF.T
        if leave_one_out:
            sim_RN.diagonal(start).fill_(-torch.inf)
        sim_RK, index_RK = sim_RN.topk(k)
        # relative to the nearest neighbour, so that a small temperature does not overflow
        votes_RK = ((sim_RK - sim_RK[:, :1]) / temperature).exp()
        votes_RC = votes_RK.new_zeros(len(sim_RN), len(classes_C))
        votes_RC.scatter_add_(1, class_N[index_RK], votes_RK)
        right += (classes_C[votes_RC.argmax(1)] == truth_M[start : start + rows]).sum()
    return int(right) / len(truth_M)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # torch warns about arrays that are not writeable
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _labelled(x: Array, y: Array, part: str) -> tuple[Tensor, Tensor]:
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
    """(N, K) labels of several per sample are kept where any is known."""
    sets = None
    if y.ndim > 1:
        sets = np.asarray(y)[(np.asarray(y) >= 0).any(1)]
        y = np.where((np.asarray(y) >= 0).any(1), 0, -1)
    features, labels = _labelled(x, y, part)
    return features.detach().cpu().float().numpy(), labels.cpu().numpy() if sets is None else sets


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
    return float(np.mean([(predicted[truth == c] == c).mean() for c in np.unique(truth)]))


def average_precision(scores: np.ndarray, truth: np.ndarray, points: int | None = None) -> float:
    """Precision averaged over recall, of scores (M,) and truth (M,), 1 for positives, 0 for
    negatives, −1 to ignore; NaN without a positive. `points`: 11 as in VOC 2007, the mean over the
    recalls 0, 0.1 … 1 of the highest precision from there on."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    scores, truth = scores[truth >= 0], truth[truth >= 0]
    if not (truth == 1).any():
        return math.nan
    if points is None:
        return float(average_precision_score(truth, scores))
    precision, recall, _ = precision_recall_curve(truth, scores)
    levels = np.linspace(0, 1, points)
    return float(np.mean([precision[:-1][recall[:-1] >= level - 1e-12].max() for level in levels]))


def mean_average_precision(
    scores: np.ndarray, truth: np.ndarray, points: int | None = None
) -> float:
    found = [average_precision(scores[:, k], truth[:, k], points) for k in range(truth.shape[1])]
    finite = [value for value in found if math.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


# Logistic regression

LINEAR_STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
TRANSFER_STRENGTHS = tuple(10 ** (-6 + 11 * i / 9) for i in range(10))
ENOUGH_HELD_OUT, MOST_REPEATS = 200, 5
"""Held-out samples that are enough to choose a strength, and the highest number of hold-outs."""
MAX_ITERATIONS = 1000

Part = tuple[np.ndarray, np.ndarray]
"""(N, F) features, and (N,) classes or (N, K) labels."""


@dataclass(frozen=True)
class ProbeResult:
    """Metrics on the test part, NaN where they do not apply. `accuracy` is that of `metric`,
    `held_out` its mean on the held-out training labels for each ℓ2 strength; `converged`: whether
    the final fit reached its tolerance."""

    accuracy: float
    metric: Metric
    top1: float
    top5: float
    mean_per_class: float
    map: float
    map_11: float
    strength: float
    held_out: dict[float, float]
    converged: bool


def linear_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    strengths: Sequence[float] = LINEAR_STRENGTHS,
    seed: int = 0,
    max_iter: int = MAX_ITERATIONS,
) -> ProbeResult:
    """Accuracy of a linear classifier on frozen features.

        minimise over w    mean cross-entropy + strength / 2 · ‖w‖²

    The strength is the best on a stratified tenth of the training labels, with few samples on up to
    five of them, or the middle one if nothing can be held out. Then all training labels are used,
    and the test labels once. Unlabelled samples (below 0) are left out; a test class without
    training samples counts as wrong.
    """
    train = labelled_arrays(train_x, train_y, "train")
    held = held_out_part(train[1], 0.1, seed)
    repeats = min(MOST_REPEATS, math.ceil(ENOUGH_HELD_OUT / held.sum())) if held.any() else 0
    parts = [held_out_part(train[1], 0.1, seed, repeat) for repeat in range(repeats)]
    test = labelled_arrays(test_x, test_y, "test")
    return _search(train, test, strengths, parts, "top1", True, max_iter)


def transfer(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    metric: Metric = "top1",
    *,
    strengths: Sequence[float] = TRANSFER_STRENGTHS,
    seed: int = 0,
) -> ProbeResult:
    """Logistic regression on frozen features of another data set.

        minimise over w    Σ cross-entropy + strength / 2 · ‖w‖²

    The strength is one of ten in 10⁻⁶ … 10⁵, the best by `metric` on a held-out fifth of the
    training labels. With "map", labels may be (N, K), (M, K) from `read_label_sets`, with one
    classifier per label.
    """
    require_choice("metric", metric, get_args(Metric))
    good = train_y.ndim == 1 or metric == "map"
    require(good, "metric", metric, "map if samples have several labels")
    train = labelled_arrays(train_x, train_y, "train")
    test = labelled_arrays(test_x, test_y, "test")
    if metric == "map" and train_y.ndim == 1:  # one label of each sample
        classes = np.unique(train[1])
        train, test = ((x, (y[:, None] == classes).astype(np.int64)) for x, y in (train, test))
    y = train[1]
    if y.ndim == 1:
        held = held_out_part(y, 0.2, seed)
    else:
        order = torch.randperm(len(y), generator=generator(seed, "transfer-holdout")).numpy()
        held = np.isin(np.arange(len(y)), order[: round(0.2 * len(y))])
    return _search(train, test, strengths, [held] if held.any() else [], metric, False)


def _search(
    train: Part,
    test: Part,
    strengths: Sequence[float],
    held_parts: Sequence[np.ndarray],
    metric: Metric,
    of_mean: bool,
    max_iter: int = MAX_ITERATIONS,
) -> ProbeResult:
    """In a tie the stronger ℓ2 penalty is used."""
    good = bool(strengths) and min(strengths) > 0
    require(good, "strengths", tuple(strengths), "one or more numbers above 0")
    (x, y), ordered = train, sorted(strengths, reverse=True)
    held_out = dict[float, float]()
    for strength in ordered if len(ordered) > 1 and held_parts else ():
        parts = [((x[~held], y[~held]), (x[held], y[held])) for held in held_parts]
        each = [_measure(*part, strength, of_mean, max_iter)[0][metric] for part in parts]
        held_out[strength] = float(np.mean(each))
    if all(map(math.isnan, held_out.values())):
        held_out, best = {}, ordered[len(ordered) // 2]
    else:  # rounded, so that equal counts of correct samples tie
        best = max(ordered, key=lambda each: np.nan_to_num(round(held_out[each], 9), nan=-1.0))
    found, converged = _measure(train, test, best, of_mean, max_iter)
    if not converged:
        raise KinfolkError(
            "Logistic regression needs at least two classes, or labels that some samples have and"
            f" others do not; there are {len(y)} labelled training samples."
        )
    metrics: Any = {name.replace("-", "_"): value for name, value in found.items()}
    about: Any = {"strength": best, "held_out": held_out, "converged": all(converged)}
    return ProbeResult(found[metric], metric, **metrics, **about)


def _measure(
    train: Part, test: Part, strength: float, of_mean: bool, max_iter: int
) -> tuple[dict[str, float], list[bool]]:
    """Metrics in the order of `ProbeResult`, and which fits converged: one of (N,) classes, or one
    of each of K labels that some samples have and others do not. `of_mean`: the penalty is of the
    mean loss."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (x, y), (xt, yt) = train, test
    converged: list[bool] = []

    def fit(chosen: np.ndarray, target: np.ndarray) -> Any:
        inverse = 1 / (strength * (len(target) if of_mean else 1))
        classifier = LogisticRegression(C=inverse, max_iter=max_iter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = make_pipeline(StandardScaler(), classifier).fit(chosen, target)
        converged.append(bool((classifier.n_iter_ < max_iter).all()))
        return model

    found = dict.fromkeys(("top1", "top5", "mean-per-class", "map", "map-11"), math.nan)
    classes = np.unique(y)
    if y.ndim == 1 and len(classes) > 1:
        model = fit(x, y)
        predicted = model.predict(xt)
        found["top1"] = float((predicted == yt).mean())
        found["top5"] = top5(model.decision_function(xt).reshape(len(xt), -1), classes, yt)
        found["mean-per-class"] = mean_per_class(predicted, yt)
    if y.ndim > 1:
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


# Names and labels of other data sets

_BEFORE = "oxford|iiit|vgg|fgvc|pascal"
_BY_NAME: dict[str, Metric] = {"voc": "map", "pet|caltech|flower|aircraft": "mean-per-class"}


def metric_of(name: str) -> Metric:
    """The metric that papers report for a data set, from its name: mAP for VOC, mean per class for
    Pets, Caltech-101, Flowers and Aircraft, else top-1."""
    last = PurePath(name).name.lower()
    for names, metric in _BY_NAME.items():
        if re.search(rf"(?<![a-z])(?:{_BEFORE})*(?:{names})", last):
            return metric
    return "top1"


def read_label_sets(path: str | Path, keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """(N, K) entries, and the K labels in sorted order: 1 if the sample has the label, 0 if not, −1
    if the entry does not count, or the sample is not in the table.

    The table has the columns `image` (the sample's key) and `label`, a row for each label of an
    image, and optionally `difficult`, 1 if the label does not count for this image.
    """
    columns = read_columns(Path(path))
    images, given = columns.get("image", []), columns.get("label", [])
    labels = ["" if value is None else str(value).strip() for value in given]
    names = sorted({*labels} - {""})
    row_of = {key: row for row, key in enumerate(keys)}
    sets = np.full((len(keys), len(names)), -1, dtype=np.int64)
    sets[[row_of[image] for image in images if image in row_of]] = 0
    if not names or (sets < 0).all():
        raise UsageError(
            f"`{path}` must have the columns image and label, with labels of images in the data,"
            f" such as {keys[0]!r}; its columns are {', '.join(map(repr, columns))}"
        )
    difficult = columns.get("difficult", [None] * len(labels))
    for image, label, value in zip(images, labels, difficult, strict=True):
        if image in row_of and label:
            place = row_of[image], names.index(label)
            if str(value).strip().lower() not in {"1", "true", "yes"}:
                sets[place] = 1
            elif sets[place] == 0:  # one clear instance is enough
                sets[place] = -1
    return sets, names
