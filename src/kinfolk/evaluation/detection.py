"""Quality of false-negative detection, and of the clusters behind it, over a whole data set with
labels.

Exact, in row blocks; no N × N matrix is kept.

    precision, recall, F1    over all pairs of an anchor and a candidate of another sample, and
                             GloFND, Table 1 per anchor, averaged over the samples (`kinfolk.stats`)
    MTPR, MTNR               mean over the anchors of the share of their false negatives that is
                             IFND, section 4.4 flagged, and of their true negatives that is not
                             (first level)
    NMI                      normalised mutual information of clusters and labels, over several
                             IFND, Table 4, Figure 6 k-means runs or over the epochs of a training
    thresholds               learned against exact (1 − α) quantiles: MAE, RMSE
                             GloFND, section 5
    similarity               mean cosine of views of a sample (true positives), of samples of
                             SPCL, Table 2, Figure 2 one class (false negatives) and of different
                             classes

Dimension key: N samples, V views, D embedding, B anchor samples, b samples of a block, R = b·V
rows, C = N·V candidates, K classes, L levels, F features, U distinct pairs of pseudo-label and
class.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.errors import KinfolkError, show_progress
from kinfolk.kinship import Kin, above
from kinfolk.pairs import OUT, Block
from kinfolk.stats import Stats, count

if TYPE_CHECKING:
    import numpy as np

    Array = Tensor | np.ndarray

_BLOCK_ELEMENTS = 1 << 23
NAN = float("nan")
Find = Callable[[Block], Kin | tuple[Kin, ...]]
"""Returns the flagged candidates of a block, such as `Detector.find`."""


@dataclass
class DetectionQuality:
    """Counts of flagged pairs compared with the labels. Shares are in [0, 1], and NaN where nothing
    could be counted.

    Args:
        stats: counts over all pairs and levels.
        found, kept: sums over the anchors of the share of their false negatives that are flagged,
            and of their true negatives that are not, at the first level, as in the training metrics
            `mtpr` and `mtnr`.
        with_kin, with_others: number of anchors that have false negatives, and that have true
            negatives.
    """

    stats: Stats = field(default_factory=Stats.empty)
    found: float = 0.0
    kept: float = 0.0
    with_kin: int = 0
    with_others: int = 0

    @property
    def mtpr(self) -> float:
        """Mean true positive rate: the share of an anchor's false negatives that are flagged, mean
        over the anchors."""
        return self.found / self.with_kin if self.with_kin else NAN

    @property
    def mtnr(self) -> float:
        """Mean true negative rate: the share of an anchor's true negatives that are not flagged,
        mean over the anchors."""
        return self.kept / self.with_others if self.with_others else NAN

    def metrics(self) -> dict[str, float]:
        """All metrics by name."""
        return {**self.stats.detection(), "mtpr": self.mtpr, "mtnr": self.mtnr}


@dataclass(frozen=True)
class DetectionResult:
    """Result of `detection_quality`.

    Args:
        rule: quality of `find`. None if `find` is not given.
        exact: quality of flagging everything above the exact quantile.
        thresholds: (B,) the exact (1 − α) quantile of each anchor's similarities.
    """

    rule: DetectionQuality | None
    exact: DetectionQuality
    thresholds: Tensor


def detection_quality(
    embeddings: Tensor,
    labels: Tensor,
    alpha: float,
    find: Find | None = None,
    *,
    anchors: Tensor | None = None,
    candidates: Tensor | None = None,
    progress: bool = False,
) -> DetectionResult:
    """Measures how well `find`, and the exact quantile, detect false negatives among all samples.

    The views of a sample are not candidates of each other. A pair counts if both labels are known.
    A sample without a label is still a candidate.

    Args:
        embeddings: (N, V, D). They are normalised to unit length.
        labels: (N,) classes. Below 0 means unknown.
        alpha: share of an anchor's similarities above its exact quantile, taken over all its views.
        find: a rule to compare, such as that of a detector.
        anchors: (B,) ids of the anchor samples. None means all.
        candidates: (N, V, D) embeddings of the samples as candidates, such as their captions. None
            means `embeddings`.
        progress: whether to show a progress bar.
    """
    if embeddings.ndim != 3 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"`embeddings` (={tuple(embeddings.shape)}) and `labels` (={tuple(labels.shape)}) must"
            " have the shapes (N, views, size), (N,)"
        )
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` (={alpha}) must be in (0, 1)")
    if len(embeddings) < 2:
        raise KinfolkError("False negatives are other samples, so at least two samples are needed.")
    unit_NVD, labels_N = functional.normalize(embeddings.float(), dim=2), labels.to(torch.int64)
    other_NVD = unit_NVD if candidates is None else functional.normalize(candidates.float(), dim=2)
    chosen = torch.arange(len(labels_N)) if anchors is None else anchors
    exact, rule = DetectionQuality(), None if find is None else DetectionQuality()
    thresholds = []
    for block in _blocks(unit_NVD, other_NVD, chosen, progress):
        level_b = batch_quantile(block.per_sample, block.num_per_sample, alpha).float()
        thresholds.append(level_b)
        _add_block(exact, block, Kin(above(block, level_b)), labels_N)
        if find is not None and rule is not None:
            _add_block(rule, block, find(block), labels_N)
    return DetectionResult(rule, exact, torch.cat(thresholds))


class Similarity(NamedTuple):
    """Mean cosines of two views of a sample (true positives), of different samples of one class
    (false negatives), and of samples of different classes (true negatives). NaN where there are no
    such pairs."""

    true_positive: float
    false_negative: float
    true_negative: float


def kin_similarity(embeddings: Tensor, labels: Tensor) -> Similarity:
    """Mean similarities over all pairs of the data set, computed from sums over samples and classes
    without an N × N matrix.

        Σ over pairs of samples of a class of z·z′ = ‖Σ z‖² − Σ ‖zᵢ‖²

    Args:
        embeddings: (N, V, D). They are normalised to unit length.
        labels: (N,) classes. Samples of unknown class (below 0) count only for the true positives.

    Example:
        >>> two = torch.eye(2).repeat_interleave(2, 0).unsqueeze(1).expand(4, 2, 2)
        >>> kin_similarity(two, torch.tensor([0, 0, 1, 1]))
        Similarity(true_positive=1.0, false_negative=1.0, true_negative=0.0)
    """
    if embeddings.ndim != 3 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"`embeddings` (={tuple(embeddings.shape)}) and `labels` (={tuple(labels.shape)}) must"
            " have the shapes (N, views, size), (N,)"
        )
    unit_NVD = functional.normalize(embeddings.double(), dim=2)
    num_views = unit_NVD.shape[1]
    sum_ND = unit_NVD.sum(1)
    square_N = sum_ND.square().sum(1)
    own = (
        (square_N - num_views).sum() / (len(sum_ND) * num_views * (num_views - 1))
        if num_views > 1
        else torch.tensor(NAN)
    )
    known_N = labels >= 0
    class_N = torch.unique(labels[known_N], return_inverse=True)[1]
    size_K = torch.bincount(class_N).double()
    sum_KD = torch.zeros(len(size_K), sum_ND.shape[1], dtype=torch.float64).index_add_(
        0, class_N, sum_ND[known_N]
    )
    within, overall = sum_KD.square().sum(), sum_KD.sum(0).square().sum()
    alike, others = (size_K * (size_K - 1)).sum(), size_K.sum().square() - size_K.square().sum()
    per_pair = num_views**2
    false_negative = (
        float((within - square_N[known_N].sum()) / (alike * per_pair)) if alike else NAN
    )
    return Similarity(
        float(own),
        false_negative,
        float((overall - within) / (others * per_pair)) if others else NAN,
    )


class ThresholdError(NamedTuple):
    """Error of learned thresholds: mean absolute error, root mean square error, and mean
    difference."""

    mae: float
    rmse: float
    bias: float


def threshold_error(thresholds: Tensor, exact: Tensor) -> ThresholdError:
    """Error of (N,) thresholds relative to (N,) exact quantiles. Section 5 of the GloFND paper
    reports MAE and RMSE.

    Example:
        >>> threshold_error(torch.tensor([0.5, 0.7]), torch.tensor([0.25, 0.95]))
        ThresholdError(mae=0.25, rmse=0.25, bias=0.0)
    """
    if thresholds.shape != exact.shape or thresholds.ndim != 1 or not len(exact):
        raise ValueError(
            f"`thresholds` (={tuple(thresholds.shape)}) and `exact` (={tuple(exact.shape)}) must"
            " have one shape (N,)"
        )
    error = thresholds.double() - exact.double()
    return ThresholdError(
        float(error.abs().mean()), float(error.square().mean().sqrt()), float(error.mean())
    )


def _blocks(
    unit_NVD: Tensor, other_NVD: Tensor, anchors_B: Tensor, progress: bool
) -> Iterator[Block]:
    """Blocks of anchors against all samples."""
    num, views, _ = unit_NVD.shape
    candidates_CD, ids_C = other_NVD.flatten(0, 1), torch.arange(num).repeat_interleave(views)
    step = max(1, _BLOCK_ELEMENTS // (num * views * views))
    starts = range(0, len(anchors_B), step)
    for first in show_progress(starts, len(starts), "Comparing all with all", enabled=progress):
        ids_b = anchors_B[first : first + step]
        sim_RC = unit_NVD[ids_b].flatten(0, 1) @ candidates_CD.T
        own_RC = ids_b.repeat_interleave(views).unsqueeze(1) == ids_C
        pos_RP = sim_RC[own_RC].view(len(sim_RC), views)
        if other_NVD is unit_NVD:  # a view is not its own positive
            others = ~torch.eye(views, dtype=torch.bool).repeat(len(ids_b), 1)
            pos_RP = pos_RP[others].view(len(sim_RC), views - 1)
        sim_RC.masked_fill_(own_RC, OUT)
        number_b = torch.full((len(ids_b),), (num - 1) * views)
        yield Block(sim_RC, ids_b, ids_C, views, number_b, pos_RP if pos_RP.shape[1] else None)


def _add_block(
    quality: DetectionQuality, block: Block, found: Kin | tuple[Kin, ...], labels_N: Tensor
) -> None:
    """Adds a block to the counts. The rates of an anchor are those of the first level."""
    labels_R, labels_C = labels_N[block.row_ids], labels_N[block.candidate_ids]
    known_RC = (labels_R >= 0).unsqueeze(1) & (labels_C >= 0) & (block.sim_RC > -2)
    same_RC = known_RC & (labels_R.unsqueeze(1) == labels_C)
    alike_R, other_R = same_RC.sum(1), (known_RC & ~same_RC).sum(1)
    for level, kin in enumerate(found if isinstance(found, tuple) else (found,)):
        kin_RC = flagged(kin, block)
        counts = count(block, kin_RC, (labels_N[block.ids], labels_C))
        quality.stats = quality.stats + Stats.from_counts(counts)
        if level > 0:
            continue
        hits_R, counted_R = (kin_RC & same_RC).sum(1), (kin_RC & known_RC).sum(1)
        quality.found += float((hits_R / alike_R)[alike_R > 0].double().sum())
        quality.kept += float((1 - (counted_R - hits_R) / other_R)[other_R > 0].double().sum())
        quality.with_kin += int((alike_R > 0).sum())
        quality.with_others += int((other_R > 0).sum())


def flagged(kin: Kin, block: Block, with_ignored: bool = False) -> Tensor:
    """(R, C) bool: the candidates that are kin. `with_ignored`: also those that are ignored too."""
    if kin.degree is None:
        return torch.zeros_like(block.sim_RC, dtype=torch.bool)
    kin_RC = (kin.degree > 0) & (block.sim_RC > -2)
    return kin_RC if kin.ignore is None or with_ignored else kin_RC & ~kin.ignore


Normaliser = Literal["arithmetic", "geometric", "min", "max"]
NORMALISERS: tuple[Normaliser, ...] = get_args(Normaliser)
"""The mutual information is divided by a mean of the two entropies, or by one of them. The first is
the default."""
SEEDS = (0, 1, 2, 3, 4)


class Rates(NamedTuple):
    """Mean true positive rate and mean true negative rate, in [0, 1]. A rate is NaN if no sample
    has a positive, or a negative."""

    mtpr: float
    mtnr: float


class Spread(NamedTuple):
    """Mean and standard deviation over seeds. The deviation is NaN for a single seed."""

    mean: float
    deviation: float


def mtpr_mtnr(labels: Array, truth: Array) -> Rates:
    """Mean true positive and true negative rates of pseudo-labels, per sample.

        MTPR = mean over i of |{j ≠ i : y_j = y_i, p_j = p_i}| / |{j ≠ i : y_j = y_i}|
        MTNR = mean over i of |{j : y_j ≠ y_i, p_j ≠ p_i}| / |{j : y_j ≠ y_i}|

    The first is the share of false negatives that are found, the second the share of negatives that
    stay negatives. Computed from the counts of each pseudo-label, each class and each pair of them,
    without an N × N comparison. If every sample has a pseudo-label of its own, as in instance-level
    learning, MTPR is 0 and MTNR is 1. The first mean is over the samples whose class has another
    sample, the second over the samples that have a negative.

    Args:
        labels: (N,) pseudo-labels p, or (L, N) for several levels, whose mean is returned. A
            negative label is a cluster of its own.
        truth: (N,) classes y. Samples of unknown class (below 0) are left out.
    """
    levels_LN, truth_N = torch.as_tensor(labels).cpu(), torch.as_tensor(truth).cpu().to(torch.int64)
    levels_LN = levels_LN.unsqueeze(0) if levels_LN.ndim == 1 else levels_LN
    if levels_LN.ndim != 2 or truth_N.shape != levels_LN.shape[1:]:
        raise ValueError(
            f"`labels` (={tuple(levels_LN.shape)}) must be (N,) or (levels, N), `truth`"
            f" (={tuple(truth_N.shape)}) (N,)"
        )
    known_N = truth_N >= 0
    levels_LN, class_N = (
        levels_LN[:, known_N].to(torch.int64),
        torch.unique(truth_N[known_N], return_inverse=True)[1],
    )
    rates = torch.tensor(
        [_rates(level_N, class_N) for level_N in levels_LN], dtype=torch.float64
    ).mean(0)
    return Rates(float(rates[0]), float(rates[1]))


def label_nmi(labels: Array, truth: Array, normaliser: Normaliser = "arithmetic") -> float:
    """Normalised mutual information of (N,) pseudo-labels p and classes y in [0, 1], as in
    scikit-learn.

        NMI = I(p; y) / mean(H(p), H(y))

    Samples of unknown class (below 0) are left out. A sample with a pseudo-label below 0 is a
    cluster of its own.

    Args:
        labels, truth: (N,).
        normaliser: mean of the entropies. One of "arithmetic" (scikit-learn's default), "geometric"
            (Strehl & Ghosh, 2002, which the IFND paper cites), or "min" or "max" of the two.
    """
    from sklearn.metrics import normalized_mutual_info_score

    if normaliser not in NORMALISERS:
        raise ValueError(f"`normaliser` (={normaliser!r}) must be one of {', '.join(NORMALISERS)}")
    labels_N, truth_N = (
        torch.as_tensor(labels).cpu().to(torch.int64),
        torch.as_tensor(truth).cpu().to(torch.int64),
    )
    known_N = truth_N >= 0
    if not bool(known_N.any()):
        raise KinfolkError(
            "There are no labelled samples; clusters cannot be compared with labels."
        )
    return float(
        normalized_mutual_info_score(
            truth_N[known_N].numpy(), _alone(labels_N[known_N]).numpy(), average_method=normaliser
        )
    )


def nmi(
    features: Array,
    truth: Array,
    num_clusters: int | None = None,
    seeds: Sequence[int] = SEEDS,
    normaliser: Normaliser = "arithmetic",
) -> Spread:
    """Normalised mutual information of the classes and the k-means clusters of the unit-norm
    features, over several k-means runs.

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
    features_NF, truth_N = (
        torch.as_tensor(features).cpu().float(),
        torch.as_tensor(truth).cpu().to(torch.int64),
    )
    if features_NF.ndim != 2 or truth_N.shape != features_NF.shape[:1]:
        raise ValueError(
            f"`features` (={tuple(features_NF.shape)}) and `truth` (={tuple(truth_N.shape)}) must"
            " have the shapes (N, features), (N,)"
        )
    known_N = truth_N >= 0
    if not bool(known_N.any()):
        raise KinfolkError(
            "There are no labelled samples; clusters cannot be compared with labels."
        )
    unit_NF, truth_N = functional.normalize(features_NF[known_N], dim=1), truth_N[known_N]
    k = len(torch.unique(truth_N)) if num_clusters is None else num_clusters
    found = [label_nmi(kmeans(unit_NF, k, seed=seed).labels, truth_N, normaliser) for seed in seeds]
    return spread(found)


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation (n − 1) of one or more values."""
    return Spread(
        statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan")
    )


def quality_curve(
    epochs: Sequence[Mapping[str, Any]], names: Sequence[str] = ("nmi", "mtpr", "mtnr")
) -> dict[str, list[float]]:
    """Clustering quality over the epochs of a training (Figure 6 of the paper), from the lines of
    metrics.jsonl (`Run.epochs()`).

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
    """Mean over the samples of the pairs selected by `counts_U`, each pair weighted by its number
    of samples."""
    return float((rate_U[counts_U] * weight_U[counts_U]).sum() / weight_U[counts_U].sum())


def _alone(label_N: Tensor) -> Tensor:
    """Replaces negative labels by labels that no other sample has."""
    if not len(label_N) or int(label_N.min()) >= 0:
        return label_N
    return label_N.where(label_N >= 0, int(label_N.max()) + 1 + torch.arange(len(label_N)))
