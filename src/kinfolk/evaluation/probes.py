"""Classifiers on frozen features: k nearest neighbours, the linear probe, and their metrics.

The k most similar training samples vote for their class with the weight exp(s / temperature), where
s is the cosine similarity (Wu et al., Unsupervised Feature Learning via Non-Parametric Instance
Discrimination, 2018, section 3.4). The linear probe is a multinomial logistic regression on
standardised features; its ℓ2 strength is chosen on held-out training labels.

Dimension key: N training samples, M test samples, R rows of a block, F features, K neighbours or
classes, C classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.embedding import held_out_part
from kinfolk.errors import KinfolkError, show_progress

Array = Tensor | np.ndarray
_BLOCK_ELEMENTS = {"cpu": 1 << 23, "default": 1 << 28}
"""Similarities held at a time: 32 MB on the CPU, 1 GB on an accelerator."""


def knn_accuracy(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    test_y: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> float:
    """Share of test samples that are classified correctly by their k nearest training samples, in
    [0, 1].

    Without a test part, each training sample is classified by all others (leave one out).
    Unlabelled samples (label −1) are ignored. If there are fewer than `k` training samples, all of
    them vote. A tie goes to the lower class.

    Args:
        train_x, test_x: (N, F), (M, F). They are normalised to unit length.
        train_y, test_y: (N,), (M,) classes; −1 means unlabelled.
        k: number of neighbours.
        temperature: temperature of the votes. With a small one, the nearest neighbour decides.
        device: where to compute; None: where `train_x` is.
    """
    if (test_x is None) != (test_y is None):
        raise ValueError("`test_x` and `test_y` must be given together")
    train_x, train_y = _labelled(train_x, train_y, "train")
    if test_x is None or test_y is None:
        return float(
            (knn_predict(train_x, train_y, None, k, temperature, device) == train_y).double().mean()
        )
    test_x, test_y = _labelled(test_x, test_y, "test")
    return float(
        (knn_predict(train_x, train_y, test_x, k, temperature, device) == test_y.to(train_y.device))
        .double()
        .mean()
    )


@torch.no_grad()
def knn_predict(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    k: int = 20,
    temperature: float = 0.1,
    device: torch.device | str | None = None,
) -> Tensor:
    """(M,) predicted class of each row of `test_x`. Without `test_x`: (N,), each row of `train_x`
    by all others. See `knn_accuracy`.

    The result is on the device of `train_x`, wherever it is computed."""
    if k < 1:
        raise ValueError(f"`k` (={k}) must be at least 1")
    if not temperature > 0:
        raise ValueError(f"`temperature` (={temperature}) must be above 0")
    train_x, train_y = _labelled(train_x, train_y, "train")
    leave_one_out = test_x is None
    if leave_one_out and len(train_x) < 2:
        raise KinfolkError("Nearest neighbours need at least two labelled samples, or a test part.")
    home = train_x.device
    train_NF = functional.normalize(
        (train_x if device is None else train_x.to(device)).float(), dim=1
    )
    test_MF = (
        train_NF
        if test_x is None
        else functional.normalize(_tensor(test_x).to(train_NF.device).float(), dim=1)
    )
    if test_MF.shape[1] != train_NF.shape[1]:
        raise ValueError(
            f"`test_x` (={test_MF.shape[1]} features) must have as many as `train_x`"
            f" (={train_NF.shape[1]})"
        )
    if not bool(train_NF.isfinite().all() and test_MF.isfinite().all()):
        raise KinfolkError(
            "The features contain values that are not finite, so nearest neighbours cannot be"
            " computed."
        )
    classes_C, class_N = torch.unique(train_y.to(train_NF.device), return_inverse=True)
    k = min(k, len(train_NF) - leave_one_out)
    rows = max(
        1, _BLOCK_ELEMENTS["cpu" if train_NF.device.type == "cpu" else "default"] // len(train_NF)
    )
    predicted = []
    for start in range(0, len(test_MF), rows):
        sim_RN = test_MF[start : start + rows] @ train_NF.T
        if leave_one_out:
            own_R = torch.arange(len(sim_RN), device=sim_RN.device)
            sim_RN[own_R, start + own_R] = -torch.inf
        sim_RK, index_RK = sim_RN.topk(k)
        # Relative to the nearest neighbour, so that a small temperature does not overflow. The
        # factor is common to all votes of a row.
        votes_RK = ((sim_RK - sim_RK[:, :1]) / temperature).exp()
        votes_RC = votes_RK.new_zeros(len(sim_RN), len(classes_C)).scatter_add_(
            1, class_N[index_RK], votes_RK
        )
        predicted.append(classes_C[votes_RC.argmax(1)])
    return torch.cat(predicted).to(home) if predicted else classes_C[:0].to(home)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # torch warns about arrays that are not writeable
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _labelled(
    x: Array, y: Array, part: str, classifier: str = "nearest neighbours need labels"
) -> tuple[Tensor, Tensor]:
    """Features and labels of the labelled samples, checked. `part` is "train" or "test"."""
    x, y = _tensor(x), _tensor(y)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"`{part}_x` (={tuple(x.shape)}) and `{part}_y` (={tuple(y.shape)}) must have the"
            " shapes (samples, features), (samples,)"
        )
    y = y.to(x.device)
    known = y >= 0
    if not bool(known.any()):
        raise KinfolkError(f"The {part} part has no labelled samples; {classifier}.")
    if not bool(x.isfinite().all()):
        raise KinfolkError(f"The features of the {part} part contain values that are not finite.")
    return (x, y) if bool(known.all()) else (x[known], y[known])


TOP = 5


def top5(scores: np.ndarray, classes: np.ndarray, truth: np.ndarray) -> float:
    """Share of samples whose class has one of the five highest scores. Scores (M, K), their classes
    (K,), truth (M,). NaN if K ≤ 5.

    Example:
        >>> top5(np.eye(6), np.arange(6), np.array([0, 1, 2, 3, 4, 9]))
        0.8333333333333334
    """
    if len(classes) <= TOP:
        return math.nan
    highest = np.argpartition(-scores, TOP - 1, axis=1)[:, :TOP]
    return float((classes[highest] == truth[:, None]).any(1).mean())


def mean_per_class(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Mean over the classes of `truth` of the share of their samples that are classified correctly;
    (M,), (M,).

    Example:
        >>> mean_per_class(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))
        0.5
    """
    if not len(truth):
        return float("nan")
    classes_K, class_M = np.unique(truth, return_inverse=True)
    right_K = np.bincount(class_M, weights=predicted == truth, minlength=len(classes_K))
    return float((right_K / np.bincount(class_M)).mean())


def average_precision(scores: np.ndarray, truth: np.ndarray, points: int | None = None) -> float:
    """Precision averaged over recall. NaN if there is no positive.

    Args:
        scores: (M,). Samples with equal scores are retrieved together.
        truth: (M,) 1 for positives, 0 for negatives. Samples below 0 are ignored.
        points: None computes Σ (Rₙ − Rₙ₋₁) Pₙ, as in scikit-learn. 11 computes the metric of VOC
            2007: the mean over the recalls 0, 0.1 … 1 of the highest precision at that recall or
            beyond.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    known = truth >= 0
    if not (truth[known] == 1).any():
        return float("nan")
    if points is None:
        return float(average_precision_score(truth[known], scores[known]))
    precision, recall, _ = precision_recall_curve(truth[known], scores[known])
    levels = np.linspace(0, 1, points)
    return float(np.mean([precision[:-1][recall[:-1] >= level - 1e-12].max() for level in levels]))


def mean_average_precision(
    scores: np.ndarray, truth: np.ndarray, points: int | None = None
) -> float:
    """Mean of `average_precision` over the classes that have a positive; (M, K), (M, K). NaN if no
    class has one."""
    found = [average_precision(scores[:, k], truth[:, k], points) for k in range(truth.shape[1])]
    counted = [value for value in found if np.isfinite(value)]
    return float(np.mean(counted)) if counted else float("nan")


Metric = Literal["top1", "mean-per-class", "map"]
NAN = float("nan")


class SingleLabelClassifier:
    """Logistic regression for samples of one class each. With the metric "map", also one classifier
    per class against the rest."""

    def __init__(
        self, x: np.ndarray, y: np.ndarray, rankers: MultiLabelClassifier | None, max_iter: int
    ) -> None:
        self.probe, self.classes, self.rankers = Probe(x, y, max_iter), np.unique(y), rankers

    def fit(self, strength: float) -> bool:
        """Fits all classifiers. Returns whether they converged."""
        converged = self.probe.fit(strength / len(self.probe.y))
        return (self.rankers is None or self.rankers.fit(strength)) and converged

    def measure(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """Metrics by name. Those that were not requested are NaN."""
        predicted = self.probe.predict(x)
        ranked = (
            {"map": NAN, "map-11": NAN}
            if self.rankers is None
            else self.rankers.measure(x, one_hot(y, self.classes))
        )
        return {
            **ranked,
            "top1": float((predicted == y).mean()),
            "mean-per-class": mean_per_class(predicted, y),
        }


class MultiLabelClassifier:
    """One logistic regression for each label that some samples have and others do not."""

    def __init__(self, x: np.ndarray, y: np.ndarray, max_iter: int) -> None:
        self.labels = [
            label for label in range(y.shape[1]) if {0, 1} <= set(np.unique(y[:, label]).tolist())
        ]
        self.probes = [
            Probe(x[y[:, label] >= 0], y[y[:, label] >= 0, label], max_iter)
            for label in self.labels
        ]

    def fit(self, strength: float) -> bool:
        """Fits all classifiers. Returns whether they converged."""
        converged = [probe.fit(strength / len(probe.y)) for probe in self.probes]
        return all(converged)

    def measure(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """Metrics by name; `y` is (M, K), as in training."""
        scores, truth = np.stack([probe.scores(x) for probe in self.probes], 1), y[:, self.labels]
        found = {
            name: mean_average_precision(scores, truth, points)
            for name, points in (("map", None), ("map-11", 11))
        }
        return {"top1": NAN, "mean-per-class": NAN, **found}


def one_hot(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(M, K) 1 where a sample is of a class."""
    return np.asarray(y[:, None] == classes, dtype=np.int64)


def classifier(
    x: np.ndarray, y: np.ndarray, metric: Metric, max_iter: int
) -> SingleLabelClassifier | MultiLabelClassifier | None:
    """A classifier for (N,) classes or (N, K) labels. None if there are fewer than two classes."""
    if y.ndim == 2:
        several = MultiLabelClassifier(x, y, max_iter)
        return several if several.probes else None
    if len(np.unique(y)) < 2:
        return None
    rankers = (
        MultiLabelClassifier(x, one_hot(y, np.unique(y)), max_iter) if metric == "map" else None
    )
    return SingleLabelClassifier(x, y, rankers, max_iter)


class Probe:
    """Logistic regression on standardised features. Every fit starts from scratch, so a strength
    always gives the same result."""

    def __init__(self, x: np.ndarray, y: np.ndarray, max_iter: int) -> None:
        from sklearn.linear_model import LogisticRegression

        self.mean = x.mean(0, dtype=np.float64).astype(np.float32)
        deviation = x.std(0, dtype=np.float64).astype(np.float32)
        self.deviation = np.where(deviation > 0, deviation, np.float32(1))
        self.x, self.y = self._standardised(x), y
        self.model: Any = LogisticRegression(solver="lbfgs", max_iter=max_iter)

    def fit(self, strength: float) -> bool:
        """Fits with the penalty `strength`. Returns whether the fit converged."""
        from sklearn.exceptions import ConvergenceWarning

        # scikit-learn weighs the sum of the losses against ‖w‖² / 2
        self.model.set_params(C=1 / (strength * len(self.y)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            self.model.fit(self.x, self.y)
        return not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """(M,) predicted class of each row."""
        return np.asarray(self.model.predict(self._standardised(x)))

    def scores(self, x: np.ndarray) -> np.ndarray:
        """(M, K) logits of the classes in order. With two classes: (M,) logits of the higher
        class."""
        return np.asarray(self.model.decision_function(self._standardised(x)))

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Share of the rows that are classified correctly."""
        return float((self.predict(x) == y).mean())

    def top5(self, x: np.ndarray, y: np.ndarray) -> float:
        """Share of the rows whose class has one of the five highest scores. NaN with five classes
        or fewer."""
        return top5(self.scores(x).reshape(len(x), -1), np.asarray(self.model.classes_), y)

    def _standardised(self, x: np.ndarray) -> np.ndarray:
        return np.asarray((x - self.mean) / self.deviation)


STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ENOUGH_HELD_OUT, MOST_REPEATS = 200, 5
"""Number of held-out samples wanted for choosing a strength, and the highest number of hold-outs
where one is smaller than that."""


@dataclass(frozen=True)
class LinearResult:
    """Result of `linear_probe`.

    Args:
        accuracy: share of test samples that are classified correctly, in [0, 1].
        strength: the chosen ℓ2 penalty.
        held_out: accuracy on the held-out training labels for each strength, strongest first. Empty
            if nothing could be held out.
        converged: whether the final fit reached its tolerance.
        top5: share of test samples whose class has one of the five highest scores. NaN with five
            classes or fewer.
    """

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
    strengths: Sequence[float] = STRENGTHS,
    holdout: float = 0.1,
    seed: int = 0,
    max_iter: int = 1000,
    progress: bool = False,
) -> LinearResult:
    """Accuracy of a linear classifier on frozen features.

        minimise over w    mean cross-entropy + strength / 2 · ‖w‖²

    The strength with the best accuracy on a stratified, held-out part of the **training** labels is
    chosen (the stronger one in a tie). The classifier is then fitted again on all training labels
    and tested once. Features are standardised by the mean and deviation of the samples that are
    fitted. Samples without a label (−1) are left out. With few samples, up to five parts are held
    out in turn and their mean decides. A class with one training sample is never held out. If no
    class has two, nothing can be held out and the middle strength is used.

    Args:
        train_x, test_x: (N, F), (M, F).
        train_y, test_y: classes; −1 means unlabelled. A test class without training samples counts
            as wrong.
        strengths: ℓ2 penalties to choose from. They apply to the *mean* loss, so they mean the same
            for any number of samples.
        holdout: share of each class that is held out, at least one sample.
        seed: seed of the held-out part.
        max_iter: L-BFGS iterations of a fit.
        progress: whether to show a progress bar.
    """
    if not strengths or not min(strengths) > 0:
        raise ValueError(f"`strengths` (={tuple(strengths)}) must be one or more numbers above 0")
    if not 0 < holdout < 1:
        raise ValueError(f"`holdout` (={holdout}) must be in (0, 1)")
    x, y = labelled(train_x, train_y, "train")
    xt, yt = labelled(test_x, test_y, "test")
    if len(np.unique(y)) < 2:
        raise KinfolkError(
            f"A linear probe needs at least two classes; all {len(y)} labelled training samples are"
            f" of class {y[0]}."
        )
    ordered = sorted(strengths, reverse=True)
    held_out: dict[float, float] = {}
    strength = ordered[len(ordered) // 2]
    held = held_out_part(y, holdout, seed)
    if len(ordered) > 1 and held.any() and len(np.unique(y[~held])) > 1:
        repeats = min(MOST_REPEATS, math.ceil(ENOUGH_HELD_OUT / held.sum()))
        right: dict[float, int] = {}
        plan = [(repeat, candidate) for repeat in range(repeats) for candidate in ordered]
        for repeat, candidate in show_progress(plan, len(plan), "Linear probe", enabled=progress):
            if candidate == ordered[0]:
                held = held_out_part(y, holdout, seed, repeat)
                probe = Probe(x[~held], y[~held], max_iter)
            probe.fit(candidate)
            # integers, so that ties are exact
            right[candidate] = right.get(candidate, 0) + int(
                (probe.predict(x[held]) == y[held]).sum()
            )
        held_out = {
            candidate: number / (repeats * int(held.sum())) for candidate, number in right.items()
        }
        strength = max(ordered, key=lambda candidate: right[candidate])
    probe = Probe(x, y, max_iter)
    converged = probe.fit(strength)
    return LinearResult(probe.accuracy(xt, yt), strength, held_out, converged, probe.top5(xt, yt))


def labelled(x: Array, y: Array, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Features as float32 and labels of the labelled samples, checked. `part` is "train" or
    "test"."""
    features, labels = _labelled(x, y, part, "a linear probe needs labels")
    return features.detach().cpu().float().numpy(), labels.cpu().numpy()
