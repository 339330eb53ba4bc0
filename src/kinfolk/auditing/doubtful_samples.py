"""Samples to look at: likely label errors and outliers.

A label is judged by a classifier that has not seen it: a ridge regression on the principal
components with its exact leave-one-out scores, plus the votes of the nearest neighbours, as a
softmax q(label). The labels are modelled as right with probability 1 − ε and otherwise drawn at
random from C classes,

    P(label) = (1 − ε) · q(label) + ε / C,

and the weights of both scores and ε are fitted by maximum likelihood. Hard samples have a label
that is among the likely ones, so they lower the confidence of q; labels that are unlikely under any
q are what raises ε. If ε is zero, nothing is listed. Errors that follow the similarity of classes
(a leopard labelled as a jaguar) look like hard samples and are not found.

Dimension key: N data set, R rows of a block, K nearest neighbours, C classes, F components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Features, Floats, Ints

MISLABEL = np.dtype(
    [
        ("sample", np.int64),
        ("label", np.int64),
        ("suggested", np.int64),
        ("probability", np.float32),
    ]
)
OUTLIER = np.dtype([("sample", np.int64), ("similarity", np.float32), ("usual", np.float32)])
NEIGHBOURS = 10
CERTAIN = 0.9
"""Probability of an error with the suggested label from which a sample is listed."""
TELLING = 0.05
"""Share of random errors that must be listed before the features can be said to tell errors."""
MOST_NOISE = 0.3
"""Largest ε. Without a bound, labels that the features do not predict could all be called
random."""
FEWEST = 5
"""Samples that a class must have before its labels are judged."""
SPREADS = 5.0
"""An outlier is this many spreads farther from its neighbours than the median."""
_COMPONENTS, _FITTED, _ROWS = 256, 4000, 4096
_REGULARISATIONS = (1e-4, 1e-3, 1e-2)

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class LabelCheck:
    """Likely label errors.

    Args:
        found: rows of sample, label, suggested label and probability that the label is wrong and
            the suggested one right; the clearest first.
        accuracy: share of the labels that the features predict without having seen them.
        noise: estimated share of random labels, ε.
        recall: estimated share of random errors that would be listed, if 1 % of the labels or ε
            were.
        judged: number of labels that were judged.
    """

    found: NDArray[Any]
    accuracy: float = float("nan")
    noise: float = float("nan")
    recall: float = float("nan")
    judged: int = 0

    @property
    def telling(self) -> bool:
        """Whether the features can tell label errors from hard samples."""
        return self.recall >= TELLING

    @property
    def words(self) -> str:
        """What was found, in one or two sentences."""
        if not self.judged:
            return f"No class has {FEWEST} labels or more, so label errors cannot be judged."
        predicted = f"these features predict {self.accuracy:.0%} of the labels"
        if not self.telling:
            return (
                f"Label errors cannot be judged: {predicted}, too few to tell an error from a hard"
                " sample."
            )
        words = (
            f"{len(self.found):,} likely label errors are listed; {predicted}, and of random errors"
            f" about {self.recall:.0%} would be listed."
        )
        return words + (
            f" About {self.noise:.1%} of the labels look random." if self.noise >= 5e-4 else ""
        )


def check_labels(features: Features, labels_N: Ints | None, near_NK: Ints) -> LabelCheck:
    """Judges the labels of all classes with at least `FEWEST` samples; −1 is unknown."""
    nothing = LabelCheck(np.empty(0, dtype=MISLABEL))
    if labels_N is None:
        return nothing
    sizes = np.bincount(labels_N[labels_N >= 0])
    classes_C = np.flatnonzero(sizes >= FEWEST)
    if len(classes_C) < 2:
        return nothing
    place = np.full(max(len(sizes), 1), -1)
    place[classes_C] = np.arange(len(classes_C))
    class_N = np.where(labels_N >= 0, place[labels_N], -1)
    ids = np.flatnonzero(class_N >= 0)
    model = _fit(features, class_N, ids, near_NK)
    noise, num_classes = model.noise, len(classes_C)
    suggested, probability, right, caught = [], [], 0, 0.0
    for start in range(0, len(ids), _ROWS):
        own_R = class_N[ids[start : start + _ROWS]]
        q_RC = model.softmax(ids[start : start + _ROWS])
        best_R, row_R = q_RC.argmax(1), np.arange(len(q_RC))
        sure_R = q_RC[row_R, best_R]
        random = noise / num_classes
        wrong_R = random / (random + (1 - noise) * q_RC[row_R, own_R] + 1e-12)
        suggested.append(best_R)
        probability.append(np.where(best_R == own_R, 0, wrong_R * sure_R))
        right += int((best_R == own_R).sum())
        assumed = max(noise, 0.01)  # what would be seen of 1 % of errors, where there are none
        random = assumed / num_classes
        caught += float(
            (random / (random + (1 - assumed) * q_RC) * sure_R[:, None] >= CERTAIN).mean(1).sum()
        )
    probability_N, suggested_N = np.concatenate(probability), classes_C[np.concatenate(suggested)]
    recall = caught / len(ids)
    listed = (
        np.flatnonzero(probability_N >= CERTAIN) if recall >= TELLING else np.empty(0, np.int64)
    )
    listed = listed[np.argsort(-probability_N[listed], kind="stable")]
    found = np.empty(len(listed), dtype=MISLABEL)
    found["sample"], found["label"] = ids[listed], labels_N[ids[listed]]
    found["suggested"], found["probability"] = suggested_N[listed], probability_N[listed]
    return LabelCheck(found, right / len(ids), noise, recall, len(ids))


@dataclass
class _Classifier:
    """Leave-one-out scores of ridge regression and neighbours, and the weights that join them."""

    features: Features
    class_N: Ints
    near_NK: Ints
    mean_F: Floats
    components_DF: Floats
    scale_F: Matrix
    sums_FC: Matrix
    prior_C: Matrix
    weights: tuple[float, float] = (1.0, 1.0)
    noise: float = 0.0

    def scores(self, ids_R: Ints) -> tuple[Matrix, Matrix]:
        """(R, C), (R, C) scores of the regression without the sample, and shares of the
        neighbours."""
        z_RF = (self.features.take(ids_R) @ self.components_DF - self.mean_F).astype(np.float64)
        own_RC = np.zeros((len(ids_R), len(self.prior_C)))
        own_RC[np.arange(len(ids_R)), self.class_N[ids_R]] = 1
        influence_R = (z_RF**2 * self.scale_F).sum(1) + 1 / self.prior_C.sum()
        fitted_RC = (z_RF * self.scale_F) @ self.sums_FC + self.prior_C / self.prior_C.sum()
        left = np.maximum(1 - influence_R, 1e-3)[:, None]
        ridge_RC = (fitted_RC - influence_R[:, None] * own_RC) / left
        near_RK = self.near_NK[ids_R, :NEIGHBOURS]
        class_RK = np.where(near_RK >= 0, self.class_N[near_RK], -1)
        votes_RC = np.zeros_like(ridge_RC)
        row, rank = np.nonzero(class_RK >= 0)
        np.add.at(votes_RC, (row, class_RK[row, rank]), 1 / NEIGHBOURS)
        return ridge_RC, votes_RC

    def softmax(self, ids_R: Ints) -> Matrix:
        """(R, C) q, the probabilities of the labels."""
        ridge_RC, votes_RC = self.scores(ids_R)
        return _softmax(self.weights[0] * ridge_RC + self.weights[1] * votes_RC)


def _fit(features: Features, class_N: Ints, ids: Ints, near_NK: Ints) -> _Classifier:
    """The classifier with the regularisation, weights and noise of the highest likelihood."""
    from scipy.optimize import minimize
    from scipy.special import expit

    mean_D, cov_DD = np.zeros(features.dim), np.zeros((features.dim, features.dim))
    for start in range(0, len(ids), _ROWS):
        rows_RD = features.take(ids[start : start + _ROWS])
        mean_D += rows_RD.sum(0, dtype=np.float64) / len(ids)
        cov_DD += (rows_RD.T @ rows_RD).astype(np.float64) / len(ids)
    value_D, vector_DD = np.linalg.eigh(cov_DD - np.outer(mean_D, mean_D))
    kept = np.arange(features.dim)[::-1][:_COMPONENTS]
    components_DF = vector_DD[:, kept].astype(np.float32)
    mean_F, value_F = (mean_D @ components_DF).astype(np.float32), value_D[kept].clip(min=0)
    prior_C = np.bincount(class_N[ids]).astype(np.float64)
    sums_CF = np.zeros((len(prior_C), len(kept)))
    for start in range(0, len(ids), _ROWS):
        part = ids[start : start + _ROWS]
        np.add.at(sums_CF, class_N[part], features.take(part) @ components_DF - mean_F)
    chosen = ids[np.sort(np.random.default_rng(0).permutation(len(ids))[:_FITTED])]
    own, row = class_N[chosen], np.arange(len(chosen))
    best, lowest = None, np.inf
    for regularisation in _REGULARISATIONS:
        scale_F = 1 / (len(ids) * (value_F + regularisation * value_F.sum()))
        made = _Classifier(
            features, class_N, near_NK, mean_F, components_DF, scale_F, sums_CF.T, prior_C
        )
        ridge, votes = made.scores(chosen)

        def loss(point: Matrix, ridge: Matrix = ridge, votes: Matrix = votes) -> float:
            q = _softmax(np.exp(point[0]) * ridge + np.exp(point[1]) * votes)[row, own]
            noise = MOST_NOISE * expit(point[2])
            return -float(np.log((1 - noise) * q + noise / len(prior_C) + 1e-300).mean())

        found = minimize(loss, (2.0, 0.0, -1.5), method="Nelder-Mead", options={"maxiter": 150})
        if found.fun < lowest:
            lowest, best = found.fun, made
            made.weights = float(np.exp(found.x[0])), float(np.exp(found.x[1]))
            made.noise = float(MOST_NOISE * expit(found.x[2]))
    assert best is not None
    return best


def _softmax(scores_RC: Matrix) -> Matrix:
    power: Matrix = np.exp(scores_RC - scores_RC.max(1, keepdims=True))
    power /= power.sum(1, keepdims=True)
    return power


def find_outliers(near_sim_NK: Floats) -> NDArray[Any]:
    """Rows of sample, mean similarity to its nearest neighbours, and the median of that over all
    samples; the farthest first."""
    finite_NK = np.isfinite(near_sim_NK[:, :NEIGHBOURS])
    mean_N = np.where(finite_NK, near_sim_NK[:, :NEIGHBOURS], 0).sum(1) / np.maximum(
        finite_NK.sum(1), 1
    )
    median, low = np.quantile(mean_N, (0.5, 0.16))
    spread = median - low
    if len(mean_N) < 2 * NEIGHBOURS or spread <= 1e-6:
        return np.empty(0, dtype=OUTLIER)
    found = np.flatnonzero(mean_N < median - SPREADS * spread)
    found = found[np.lexsort((found, mean_N[found]))]
    rows = np.empty(len(found), dtype=OUTLIER)
    rows["sample"], rows["similarity"], rows["usual"] = found, mean_N[found], median
    return rows
