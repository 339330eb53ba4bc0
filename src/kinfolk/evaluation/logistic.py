"""Multinomial logistic regression as the probes and transfer fit it.

Dimension key: N training samples, M others, K classes.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from kinfolk.evaluation.metrics import top5


class Probe:
    """Logistic regression on standardised features; every fit starts afresh, so that the chosen strength means the same in the last one."""

    def __init__(self, x: np.ndarray, y: np.ndarray, max_iter: int) -> None:
        from sklearn.linear_model import LogisticRegression

        self.mean = x.mean(0, dtype=np.float64).astype(np.float32)
        deviation = x.std(0, dtype=np.float64).astype(np.float32)
        self.deviation = np.where(deviation > 0, deviation, np.float32(1))
        self.x, self.y = self._standardised(x), y
        self.model: Any = LogisticRegression(solver="lbfgs", max_iter=max_iter)

    def fit(self, strength: float) -> bool:
        """Fits with the penalty `strength`; says whether it converged."""
        from sklearn.exceptions import ConvergenceWarning

        self.model.set_params(C=1 / (strength * len(self.y)))  # scikit-learn weighs the sum of the losses against ‖w‖² / 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            self.model.fit(self.x, self.y)
        return not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """(M,) the class each row is given."""
        return np.asarray(self.model.predict(self._standardised(x)))

    def scores(self, x: np.ndarray) -> np.ndarray:
        """(M, K) the logits of the classes in order; (M,) of the higher one where there are two."""
        return np.asarray(self.model.decision_function(self._standardised(x)))

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Share of the rows whose class is found."""
        return float((self.predict(x) == y).mean())

    def top5(self, x: np.ndarray, y: np.ndarray) -> float:
        """Share of the rows whose class is among the five likeliest; NaN up to five classes."""
        return top5(self.scores(x).reshape(len(x), -1), np.asarray(self.model.classes_), y)

    def _standardised(self, x: np.ndarray) -> np.ndarray:
        return np.asarray((x - self.mean) / self.deviation)
