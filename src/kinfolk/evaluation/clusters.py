"""Quality of a clustering compared with the labels: mean true positive and negative rates, and normalised mutual information.

Chen et al., Incremental False Negative Detection for Contrastive Learning, ICLR 2022, section 4.4 (MTPR / MTNR), Table 4 (NMI over several
k-means runs) and Figure 6 (NMI over the epochs of a training).

Dimension key: N samples, L levels, F features, U distinct pairs of pseudo-label and class.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.errors import KinfolkError

if TYPE_CHECKING:
    import numpy as np

    Array = Tensor | np.ndarray

Normaliser = Literal["arithmetic", "geometric", "min", "max"]
NORMALISERS: tuple[Normaliser, ...] = get_args(Normaliser)
"""The mutual information is divided by a mean of the two entropies, or by one of them. The first is the default."""
SEEDS = (0, 1, 2, 3, 4)


class Rates(NamedTuple):
    """Mean true positive rate and mean true negative rate, in [0, 1]. A rate is NaN if no sample has a positive, or a negative."""

    mtpr: float
    mtnr: float


class Spread(NamedTuple):
    """Mean and standard deviation over seeds. The deviation is NaN for a single seed."""

    mean: float
    deviation: float


def mtpr_mtnr(labels: Array, truth: Array) -> Rates:
    """Mean true positive and true negative rates of pseudo-labels, per sample.

        MTPR = mean over i of |{j ≠ i : y_j = y_i, p_j = p_i}| / |{j ≠ i : y_j = y_i}|     actual false negatives that are found
        MTNR = mean over i of |{j : y_j ≠ y_i, p_j ≠ p_i}| / |{j : y_j ≠ y_i}|             actual negatives that stay negatives

    Computed from the counts of each pseudo-label, each class and each pair of them, without an N × N comparison. If every sample has a
    pseudo-label of its own, as in instance-level learning, MTPR is 0 and MTNR is 1. The first mean is over the samples whose class has
    another sample, the second over the samples that have a negative.

    Args:
        labels: (N,) pseudo-labels p, or (L, N) for several levels, whose mean is returned. A negative label is a
            cluster of its own.
        truth: (N,) classes y. Samples of unknown class (below 0) are left out.
    """
    levels_LN, truth_N = torch.as_tensor(labels).cpu(), torch.as_tensor(truth).cpu().to(torch.int64)
    levels_LN = levels_LN.unsqueeze(0) if levels_LN.ndim == 1 else levels_LN
    if levels_LN.ndim != 2 or truth_N.shape != levels_LN.shape[1:]:
        raise ValueError(f"`labels` (={tuple(levels_LN.shape)}) must be (N,) or (levels, N), `truth` (={tuple(truth_N.shape)}) (N,)")
    known_N = truth_N >= 0
    levels_LN, class_N = levels_LN[:, known_N].to(torch.int64), torch.unique(truth_N[known_N], return_inverse=True)[1]
    rates = torch.tensor([_rates(level_N, class_N) for level_N in levels_LN], dtype=torch.float64).mean(0)
    return Rates(float(rates[0]), float(rates[1]))


def label_nmi(labels: Array, truth: Array, normaliser: Normaliser = "arithmetic") -> float:
    """Normalised mutual information of (N,) pseudo-labels p and classes y in [0, 1], as in scikit-learn.

        NMI = I(p; y) / mean(H(p), H(y))

    Samples of unknown class (below 0) are left out. A sample with a pseudo-label below 0 is a cluster of its own.

    Args:
        labels, truth: (N,).
        normaliser: mean of the entropies. One of "arithmetic" (scikit-learn's default), "geometric" (Strehl & Ghosh, 2002, which the IFND
            paper cites), or "min" or "max" of the two.
    """
    from sklearn.metrics import normalized_mutual_info_score

    if normaliser not in NORMALISERS:
        raise ValueError(f"`normaliser` (={normaliser!r}) must be one of {', '.join(NORMALISERS)}")
    labels_N, truth_N = torch.as_tensor(labels).cpu().to(torch.int64), torch.as_tensor(truth).cpu().to(torch.int64)
    known_N = truth_N >= 0
    if not bool(known_N.any()):
        raise KinfolkError("There are no labelled samples; clusters cannot be compared with labels.")
    return float(normalized_mutual_info_score(truth_N[known_N].numpy(), _alone(labels_N[known_N]).numpy(), average_method=normaliser))


def nmi(
    features: Array, truth: Array, num_clusters: int | None = None, seeds: Sequence[int] = SEEDS, normaliser: Normaliser = "arithmetic"
) -> Spread:
    """Normalised mutual information of the classes and the k-means clusters of the unit-norm features, over several k-means runs.

    Args:
        features: (N, F). They are normalised to unit length.
        truth: (N,) classes. Samples of unknown class (below 0) are left out.
        num_clusters: k. None means the number of classes.
        seeds: one k-means run for each.
        normaliser: see `label_nmi`.
    """
    from kinfolk.clustering.kmeans import kmeans

    if not seeds:
        raise ValueError("`seeds` (=()) must hold at least one seed")
    features_NF, truth_N = torch.as_tensor(features).cpu().float(), torch.as_tensor(truth).cpu().to(torch.int64)
    if features_NF.ndim != 2 or truth_N.shape != features_NF.shape[:1]:
        raise ValueError(
            f"`features` (={tuple(features_NF.shape)}) and `truth` (={tuple(truth_N.shape)}) must have the shapes (N, features), (N,)"
        )
    known_N = truth_N >= 0
    if not bool(known_N.any()):
        raise KinfolkError("There are no labelled samples; clusters cannot be compared with labels.")
    unit_NF, truth_N = functional.normalize(features_NF[known_N], dim=1), truth_N[known_N]
    k = len(torch.unique(truth_N)) if num_clusters is None else num_clusters
    found = [label_nmi(kmeans(unit_NF, k, seed=seed).labels, truth_N, normaliser) for seed in seeds]
    return spread(found)


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation (n − 1) of one or more values."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))


def quality_curve(epochs: Sequence[Mapping[str, Any]], names: Sequence[str] = ("nmi", "mtpr", "mtnr")) -> dict[str, list[float]]:
    """Clustering quality over the epochs of a training (Figure 6 of the paper), from the lines of metrics.jsonl (`Run.epochs()`).

    Returns:
        `epoch` and each of `names`, for the epochs that have all of them.
    """
    rows = [row for row in epochs if all(name in row for name in names)]
    return {name: [row[name] for row in rows] for name in ("epoch", *names)}


def _rates(label_N: Tensor, class_N: Tensor) -> tuple[float, float]:
    group_N = torch.unique(_alone(label_N), return_inverse=True)[1]
    in_group, in_class = torch.bincount(group_N), torch.bincount(class_N)
    pair_U, both_U = torch.unique(group_N * len(in_class) + class_N, return_counts=True)
    group_size_U, class_size_U = in_group[pair_U // len(in_class)], in_class[pair_U % len(in_class)]
    positives_U, negatives_U = class_size_U - 1, len(class_N) - class_size_U
    found_U = (both_U - 1).double() / positives_U
    kept_U = 1 - (group_size_U - both_U).double() / negatives_U
    return _mean(found_U, both_U, positives_U > 0), _mean(kept_U, both_U, negatives_U > 0)


def _mean(rate_U: Tensor, weight_U: Tensor, counts_U: Tensor) -> float:
    """Mean over the samples of the pairs selected by `counts_U`, each pair weighted by its number of samples."""
    return float((rate_U[counts_U] * weight_U[counts_U]).sum() / weight_U[counts_U].sum())


def _alone(label_N: Tensor) -> Tensor:
    """Replaces negative labels by labels that no other sample has."""
    if not len(label_N) or int(label_N.min()) >= 0:
        return label_N
    return label_N.where(label_N >= 0, int(label_N.max()) + 1 + torch.arange(len(label_N)))
