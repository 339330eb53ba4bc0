"""How well classes were found: among the five likeliest, mean per class, and average precision.

Dimension key: M samples, K classes.
"""

from __future__ import annotations

import math

import numpy as np

TOP = 5


def top5(scores: np.ndarray, classes: np.ndarray, truth: np.ndarray) -> float:
    """Share of the samples whose class is among the five of the highest score; (M, K), (K,) their classes, (M,). NaN up to five classes.

    Example:
        >>> top5(np.eye(6), np.arange(6), np.array([0, 1, 2, 3, 4, 9]))
        0.8333333333333334
    """
    if len(classes) <= TOP:
        return math.nan
    likeliest = np.argpartition(-scores, TOP - 1, axis=1)[:, :TOP]
    return float((classes[likeliest] == truth[:, None]).any(1).mean())


def mean_per_class(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Mean over the classes of `truth` of the share of their samples that were given the right class; (M,), (M,).

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
    """Precision averaged over recall as the threshold falls through the scores; NaN without a positive.

    Args:
        scores: (M,) the higher, the sooner it is retrieved; equal ones at once.
        truth: (M,) 1 positive, 0 negative, below 0: does not count.
        points: None: Σ (Rₙ − Rₙ₋₁) Pₙ, scikit-learn's. 11: as VOC 2007 has it, the mean over the recalls 0, 0.1 … 1 of the highest
            precision at that recall or beyond.
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


def mean_average_precision(scores: np.ndarray, truth: np.ndarray, points: int | None = None) -> float:
    """Mean of `average_precision` over the classes that have a positive; (M, K), (M, K). NaN where none has."""
    found = [average_precision(scores[:, k], truth[:, k], points) for k in range(truth.shape[1])]
    counted = [value for value in found if np.isfinite(value)]
    return float(np.mean(counted)) if counted else float("nan")
