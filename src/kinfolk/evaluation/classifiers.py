"""What transfer fits: logistic regression for one class a sample, or for several labels.

Dimension key: N training samples, M test samples, F features, K classes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from kinfolk.evaluation.logistic import Probe
from kinfolk.evaluation.metrics import mean_average_precision, mean_per_class

Metric = Literal["top1", "mean-per-class", "map"]
NAN = float("nan")


class OneOfMany:
    """A class for each sample; with "map" also one against the rest for each class."""

    def __init__(self, x: np.ndarray, y: np.ndarray, rankers: Several | None, max_iter: int) -> None:
        self.probe, self.classes, self.rankers = Probe(x, y, max_iter), np.unique(y), rankers

    def fit(self, strength: float) -> bool:
        """Fits all; whether they converged."""
        converged = self.probe.fit(strength / len(self.probe.y))
        return (self.rankers is None or self.rankers.fit(strength)) and converged

    def measure(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """By name; NaN where it was not asked for."""
        predicted = self.probe.predict(x)
        ranked = {"map": NAN, "map-11": NAN} if self.rankers is None else self.rankers.measure(x, one_hot(y, self.classes))
        return {**ranked, "top1": float((predicted == y).mean()), "mean-per-class": mean_per_class(predicted, y)}


class Several:
    """One classifier for each label that some of the samples have and others have not."""

    def __init__(self, x: np.ndarray, y: np.ndarray, max_iter: int) -> None:
        self.labels = [label for label in range(y.shape[1]) if {0, 1} <= set(np.unique(y[:, label]).tolist())]
        self.probes = [Probe(x[y[:, label] >= 0], y[y[:, label] >= 0, label], max_iter) for label in self.labels]

    def fit(self, strength: float) -> bool:
        """Fits all; whether they converged."""
        converged = [probe.fit(strength / len(probe.y)) for probe in self.probes]
        return all(converged)

    def measure(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """By name; `y` is (M, K), as in training."""
        scores, truth = np.stack([probe.scores(x) for probe in self.probes], 1), y[:, self.labels]
        found = {name: mean_average_precision(scores, truth, points) for name, points in (("map", None), ("map-11", 11))}
        return {"top1": NAN, "mean-per-class": NAN, **found}


def one_hot(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(M, K) whether each sample is of each class."""
    return np.asarray(y[:, None] == classes, dtype=np.int64)


def classifier(x: np.ndarray, y: np.ndarray, metric: Metric, max_iter: int) -> OneOfMany | Several | None:
    """For (N,) classes or (N, K) labels; None where there is nothing to tell apart."""
    if y.ndim == 2:
        several = Several(x, y, max_iter)
        return several if several.probes else None
    if len(np.unique(y)) < 2:
        return None
    rankers = Several(x, one_hot(y, np.unique(y)), max_iter) if metric == "map" else None
    return OneOfMany(x, y, rankers, max_iter)
