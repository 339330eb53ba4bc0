"""Samples to check: likely label errors, outliers, duplicates and hubs.

A label is checked by a classifier that has not seen it: a ridge regression on the principal
components with its exact leave-one-out scores, plus the votes of the nearest neighbours, as a
softmax q(label). The labels are modelled as right with probability 1 − ε and otherwise drawn at
random from C classes,

    P(label) = (1 − ε) · q(label) + ε / C,

and the weights of both scores and ε are fitted by maximum likelihood. Hard samples have a label
that is among the likely ones, so they lower the confidence of q; labels that are unlikely under any
q are what raises ε. If ε is zero, nothing is listed. Errors that follow the similarity of classes
(a leopard labelled as a jaguar) resemble hard samples and are not found.

Dimension key: N data set, R rows of a block, K nearest neighbours, C classes, F components, M
pairs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.features import Features, Floats, Ints

MISLABEL = np.dtype(
    [("sample", np.int64), ("label", np.int64), ("suggested", np.int64), ("probability", "f4")]
)
OUTLIER = np.dtype([("sample", np.int64), ("similarity", np.float32), ("median", np.float32)])
GROUP = np.dtype([("group", np.int64), ("sample", np.int64), ("kind", "U14")])
HUB = np.dtype([("sample", np.int64), ("occurrence", np.int64), ("times_expected", np.float32)])
NEIGHBOURS = 10
CERTAIN = 0.9
"""Probability of an error with the suggested label from which a sample is listed."""
LEAST_RECALL = 0.05
"""Share of random errors that must be listed for a check to list any."""
MOST_NOISE = 0.3
"""Largest ε; without a bound, labels that the features do not predict could all be called
random."""
FEWEST = 5
"""Samples that a class must have before its labels are checked."""
SPREADS = 5.0
"""An outlier is this many spreads farther from its neighbours than the median."""
_COMPONENTS, _FITTED, _ROWS = 256, 4000, 4096
_REGULARISATIONS = (1e-4, 1e-3, 1e-2)

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class LabelCheck:
    """Likely label errors.

    Args:
        found: rows of sample, label, suggested label and the probability that the suggested one is
            right; the clearest first.
        accuracy: share of the labels that the features predict without having seen them.
        noise: estimated share of random labels, ε.
        recall: estimated share of random errors that would be listed.
        num_checked: number of labels that were checked.
    """

    found: NDArray[Any]
    accuracy: float = float("nan")
    noise: float = float("nan")
    recall: float = float("nan")
    num_checked: int = 0

    @property
    def can_tell(self) -> bool:
        """Whether the features can tell label errors from hard samples."""
        return self.recall >= LEAST_RECALL

    @property
    def description(self) -> str:
        if not self.num_checked:
            return f"No class has {FEWEST} labels or more, so label errors cannot be judged."
        predicted = f"these features predict {self.accuracy:.0%} of the labels"
        if not self.can_tell:
            return (
                f"Label errors cannot be judged: {predicted}, too few to tell an error from a hard"
                " sample."
            )
        random = f" About {self.noise:.1%} of the labels are random." if self.noise >= 5e-4 else ""
        return (
            f"{len(self.found):,} likely label errors are listed; {predicted}, and of random errors"
            f" about {self.recall:.0%} would be listed.{random}"
        )


def check_labels(features: Features, labels_N: Ints | None, near_NK: Ints) -> LabelCheck:
    """Checks the labels of all classes with at least `FEWEST` samples; −1 is unknown."""
    nothing = LabelCheck(np.empty(0, dtype=MISLABEL))
    if labels_N is None:
        return nothing
    sizes = np.bincount(labels_N[labels_N >= 0])
    classes_C = np.flatnonzero(sizes >= FEWEST)
    if len(classes_C) < 2:
        return nothing
    place = np.full(len(sizes), -1)
    place[classes_C] = np.arange(len(classes_C))
    class_N = np.where(labels_N >= 0, place[labels_N], -1)
    ids = np.flatnonzero(class_N >= 0)
    model = _fit(features, class_N, ids, near_NK)
    # what would be found of 1 % of errors, where there are none
    random, assumed = model.noise / len(classes_C), max(model.noise, 0.01) / len(classes_C)
    suggested, probability, right, caught = [], [], 0, 0.0
    for start in range(0, len(ids), _ROWS):
        part = ids[start : start + _ROWS]
        label_R, row_R, q_RC = class_N[part], np.arange(len(part)), model.probabilities(part)
        best_R = q_RC.argmax(1)
        sure_R = q_RC[row_R, best_R]
        wrong_R = random / (random + (1 - model.noise) * q_RC[row_R, label_R] + 1e-12)
        suggested.append(best_R)
        probability.append(np.where(best_R == label_R, 0, wrong_R * sure_R))
        right += int((best_R == label_R).sum())
        wrong_RC = assumed / (assumed + (1 - max(model.noise, 0.01)) * q_RC)
        caught += float((wrong_RC * sure_R[:, None] >= CERTAIN).mean(1).sum())
    probability_N, suggested_N = np.concatenate(probability), classes_C[np.concatenate(suggested)]
    recall = caught / len(ids)
    order = np.argsort(-probability_N, kind="stable")
    listed = order[probability_N[order] >= CERTAIN] if recall >= LEAST_RECALL else order[:0]
    found = np.empty(len(listed), dtype=MISLABEL)
    found["sample"], found["label"] = ids[listed], labels_N[ids[listed]]
    found["suggested"], found["probability"] = suggested_N[listed], probability_N[listed]
    return LabelCheck(found, right / len(ids), model.noise, recall, len(ids))


@dataclass
class _Classifier:
    """Leave-one-out scores of ridge regression and neighbours, and the weights that add them."""

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
        """(R, C), (R, C) scores of the regression without the sample, and votes of the
        neighbours."""
        z_RF = (self.features.take(ids_R) @ self.components_DF - self.mean_F).astype(np.float64)
        label_RC = np.eye(len(self.prior_C))[self.class_N[ids_R]]
        influence_R1 = ((z_RF**2 * self.scale_F).sum(1) + 1 / self.prior_C.sum())[:, None]
        fitted_RC = (z_RF * self.scale_F) @ self.sums_FC + self.prior_C / self.prior_C.sum()
        ridge_RC = (fitted_RC - influence_R1 * label_RC) / np.maximum(1 - influence_R1, 1e-3)
        near_RK = self.near_NK[ids_R, :NEIGHBOURS]
        class_RK = np.where(near_RK >= 0, self.class_N[near_RK], -1)
        votes_RC = np.zeros_like(ridge_RC)
        row, rank = np.nonzero(class_RK >= 0)
        np.add.at(votes_RC, (row, class_RK[row, rank]), 1 / NEIGHBOURS)
        return ridge_RC, votes_RC

    def probabilities(self, ids_R: Ints) -> Matrix:
        from scipy.special import softmax

        ridge_RC, votes_RC = self.scores(ids_R)
        q_RC: Matrix = softmax(self.weights[0] * ridge_RC + self.weights[1] * votes_RC, 1)
        return q_RC


def _fit(features: Features, class_N: Ints, ids: Ints, near_NK: Ints) -> _Classifier:
    """The classifier with the regularisation, weights and noise of the highest likelihood."""
    from scipy.optimize import minimize
    from scipy.special import expit, softmax

    mean_D, cov_DD = np.zeros(features.dim), np.zeros((features.dim, features.dim))
    parts = [ids[start : start + _ROWS] for start in range(0, len(ids), _ROWS)]
    for part in parts:
        rows_RD = features.take(part)
        mean_D += rows_RD.sum(0, dtype=np.float64) / len(ids)
        cov_DD += (rows_RD.T @ rows_RD).astype(np.float64) / len(ids)
    value_D, vector_DD = np.linalg.eigh(cov_DD - np.outer(mean_D, mean_D))
    components_DF = vector_DD[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    value_F = value_D[::-1][:_COMPONENTS].clip(min=0)
    mean_F = (mean_D @ components_DF).astype(np.float32)
    prior_C = np.bincount(class_N[ids]).astype(np.float64)
    sums_CF = np.zeros((len(prior_C), len(value_F)))
    for part in parts:
        np.add.at(sums_CF, class_N[part], features.take(part) @ components_DF - mean_F)
    chosen = ids[np.sort(np.random.default_rng(0).permutation(len(ids))[:_FITTED])]
    label, row = class_N[chosen], np.arange(len(chosen))
    best, lowest = None, np.inf
    for regularisation in _REGULARISATIONS:
        scale_F = 1 / (len(ids) * (value_F + regularisation * value_F.sum()))
        model = _Classifier(
            features, class_N, near_NK, mean_F, components_DF, scale_F, sums_CF.T, prior_C
        )
        ridge, votes = model.scores(chosen)

        def loss(point: Matrix, ridge: Matrix = ridge, votes: Matrix = votes) -> float:
            q = softmax(np.exp(point[0]) * ridge + np.exp(point[1]) * votes, 1)[row, label]
            noise = MOST_NOISE * expit(point[2])
            return -float(np.log((1 - noise) * q + noise / len(prior_C) + 1e-300).mean())

        found = minimize(loss, (2.0, 0.0, -1.5), method="Nelder-Mead", options={"maxiter": 150})
        if found.fun < lowest:
            lowest, best = found.fun, model
            model.weights = float(np.exp(found.x[0])), float(np.exp(found.x[1]))
            model.noise = float(MOST_NOISE * expit(found.x[2]))
    assert best is not None
    return best


def find_outliers(near_sim_NK: Floats) -> NDArray[Any]:
    """Rows of sample, mean similarity to its nearest neighbours, and the median of all; the
    farthest first."""
    near_sim_NK = near_sim_NK[:, :NEIGHBOURS]
    finite_NK = np.isfinite(near_sim_NK)
    mean_N = np.where(finite_NK, near_sim_NK, 0).sum(1) / np.maximum(finite_NK.sum(1), 1)
    median, low = np.quantile(mean_N, (0.5, 0.16))
    spread = median - low
    if len(mean_N) < 2 * NEIGHBOURS or spread <= 1e-6:
        return np.empty(0, dtype=OUTLIER)
    order = np.argsort(mean_N, kind="stable")
    found = order[mean_N[order] < median - SPREADS * spread]
    rows = np.empty(len(found), dtype=OUTLIER)
    rows["sample"], rows["similarity"], rows["median"] = found, mean_N[found], median
    return rows


# ---- duplicates and hubs

NEAR = 0.1
"""Largest distance of near-duplicates without images, relative to that of the nearest neighbour."""
_ROUNDING = 1e-6
"""A smaller distance counts as zero."""


def find_groups(
    features: Features, near_NK: Ints, near_sim_NK: Floats, copies_M2: Ints | None = None
) -> NDArray[Any]:
    """Rows of group, sample and kind, largest groups first: connected components of copies and of
    samples with equal features. A group in which all rows are equal is of the kind "duplicate".

    Args:
        copies_M2: pairs of images that are copies by their pixels. None: neighbours whose distance
            is at most `NEAR` times the median distance to the nearest sample that is not equal.
    """
    if copies_M2 is None:
        distance_NK = 1 - near_sim_NK
        nearest_N = np.where(distance_NK > _ROUNDING, distance_NK, np.inf).min(1)
        nearest_N = nearest_N[np.isfinite(nearest_N)]
        limit = max(NEAR * float(np.median(nearest_N)) if len(nearest_N) else 0.0, _ROUNDING)
        row_M, rank_M = np.nonzero((distance_NK <= limit) & (near_NK >= 0))
        copies_M2 = np.stack([row_M, near_NK[row_M, rank_M]], 1)
    equal = equal_rows(features)
    equal_pairs = [(members[0], member) for members in equal for member in members[1:]]
    equal_M2 = np.asarray(equal_pairs, dtype=np.int64).reshape(-1, 2)
    groups = _connect(np.concatenate([copies_M2, equal_M2]), len(features))
    whole = {tuple(members) for members in equal}
    rows = []
    for group, members in enumerate(sorted(groups, key=len, reverse=True)):
        kind = "duplicate" if tuple(members) in whole else "near-duplicate"
        rows += [(group, sample, kind) for sample in members]
    return np.array(rows, dtype=GROUP)


def equal_rows(features: Features) -> list[list[int]]:
    """Groups of samples whose features are exactly equal."""
    seen: dict[bytes, list[int]] = defaultdict(list)
    for start in range(0, len(features), 4096):
        for at, row in enumerate(np.ascontiguousarray(features.array[start : start + 4096])):
            seen[blake2b(row.tobytes(), digest_size=16).digest()].append(start + at)
    return [members for members in seen.values() if len(members) > 1]


def _connect(pairs_M2: Ints, num_samples: int) -> list[list[int]]:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ones, shape = np.ones(len(pairs_M2), np.int8), (num_samples, num_samples)
    component_N = connected_components(coo_array((ones, tuple(pairs_M2.T)), shape=shape), False)[1]
    groups: dict[int, list[int]] = defaultdict(list)
    for sample in np.flatnonzero(np.bincount(component_N)[component_N] > 1).tolist():
        groups[int(component_N[sample])].append(sample)
    return list(groups.values())


def find_hubs(occurrence_N: Ints) -> NDArray[Any]:
    """Samples that more anchors flag than three standard deviations above the mean, the largest
    first."""
    mean, deviation = float(occurrence_N.mean()), float(occurrence_N.std())
    order = np.argsort(-occurrence_N, kind="stable")
    found = order[occurrence_N[order] > mean + 3 * deviation] if deviation else order[:0]
    return np.array([(i, occurrence_N[i], occurrence_N[i] / mean) for i in found], dtype=HUB)
