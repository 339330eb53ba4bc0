"""Quality of false-negative detection, and of the clusters behind it, over a whole data set.

Dimension key: N samples, V views, D embedding, B anchor samples, b samples of a block, R = b·V
rows, C = N·V candidates, F features."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.detectors.thresholds import batch_quantile
from kinfolk.errors import KinfolkError, require, require_choice, show_progress
from kinfolk.pairs import OUT, Block, Kin, above
from kinfolk.stats import Stats, count

if TYPE_CHECKING:
    import numpy as np

    Array = Tensor | np.ndarray

_BLOCK_ELEMENTS = 1 << 23
Find = Callable[[Block], Kin | tuple[Kin, ...]]
"""Such as `Detector.find`."""


class Rates(NamedTuple):
    """Mean true positive rate and mean true negative rate; NaN without any pair."""

    mtpr: float
    mtnr: float


@dataclass
class DetectionQuality:
    """Counts of flagged pairs compared with the labels, and sums of the anchors' rates at the first
    level."""

    stats: Stats = field(default_factory=Stats.empty)
    rate_sums: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    rate_counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    @property
    def rates(self) -> Rates:
        return Rates(*(self.rate_sums / self.rate_counts).tolist())

    def metrics(self) -> dict[str, float]:
        return {**self.stats.detection(), **self.rates._asdict()}

    def add(self, block: Block, found: Kin | tuple[Kin, ...], labels_N: Tensor) -> None:
        labels_R, labels_C = labels_N[block.row_ids], labels_N[block.candidate_ids]
        known_RC = (labels_R >= 0).unsqueeze(1) & (labels_C >= 0) & (block.sim_RC > -2)
        same_RC = known_RC & (labels_R.unsqueeze(1) == labels_C)
        levels = found if isinstance(found, tuple) else (found,)
        masks = [flagged_mask(kin, block) for kin in levels]
        for kin_RC in masks:
            self.stats += Stats(count(block, kin_RC, (labels_N[block.ids], labels_C)))
        pairs = ((masks[0], same_RC), (~masks[0], known_RC & ~same_RC))
        for place, (right_RC, of_RC) in enumerate(pairs):
            number_R = of_RC.sum(1)
            rate_R = (right_RC & of_RC).sum(1) / number_R
            self.rate_sums[place] += rate_R[number_R > 0].double().sum()
            self.rate_counts[place] += (number_R > 0).sum()


class DetectionResult(NamedTuple):
    """For `find`, and for flagging everything above the exact quantiles, which are (B,)."""

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

    Args:
        embeddings, labels: (N, V, D) and (N,), where a label below 0 is unknown.
        alpha: share of the similarities of an anchor's views above its exact quantile.
        find: a rule to compare, such as that of a detector.
        anchors: (B,) ids of the anchor samples. None means all.
        candidates: (N, V, D) embeddings of the samples as candidates, such as their captions.
    """
    _check_shapes(embeddings, labels)
    require(0 < alpha < 1, "alpha", alpha, "in (0, 1)")
    if len(embeddings) < 2:
        raise KinfolkError("False negatives are other samples, so at least two samples are needed.")
    unit_NVD, labels_N = functional.normalize(embeddings.float(), dim=2), labels.to(torch.int64)
    other_NVD = unit_NVD if candidates is None else functional.normalize(candidates.float(), dim=2)
    ids_B = torch.arange(len(labels_N)) if anchors is None else anchors
    exact, rule, thresholds = DetectionQuality(), DetectionQuality(), []
    for block in _blocks(unit_NVD, other_NVD, ids_B, progress):
        level_b = batch_quantile(block.sim_bVC.flatten(1), block.num_per_sample, alpha).float()
        thresholds.append(level_b)
        exact.add(block, Kin(above(block, level_b)), labels_N)
        if find is not None:
            rule.add(block, find(block), labels_N)
    return DetectionResult(None if find is None else rule, exact, torch.cat(thresholds))


def _check_shapes(embeddings: Tensor, labels: Tensor) -> None:
    shape = tuple(embeddings.shape)
    if len(shape) != 3 or labels.shape != shape[:1]:
        raise ValueError(
            f"`embeddings` (={shape}) and `labels` (={tuple(labels.shape)}) must have the shapes"
            " (N, views, size), (N,)"
        )


def _blocks(
    unit_NVD: Tensor, other_NVD: Tensor, anchors_B: Tensor, progress: bool
) -> Iterator[Block]:
    num, views, _ = unit_NVD.shape
    candidates_CD, ids_C = other_NVD.flatten(0, 1), torch.arange(num).repeat_interleave(views)
    parts = torch.split(anchors_B, max(1, _BLOCK_ELEMENTS // (num * views * views)))
    for ids_b in show_progress(parts, len(parts), "Comparing all with all", enabled=progress):
        sim_RC = unit_NVD[ids_b].flatten(0, 1) @ candidates_CD.T
        own_RC = ids_b.repeat_interleave(views).unsqueeze(1) == ids_C
        pos_RP = sim_RC[own_RC].view(len(sim_RC), views)
        if other_NVD is unit_NVD:  # a view is not its own positive
            others = ~torch.eye(views, dtype=torch.bool).repeat(len(ids_b), 1)
            pos_RP = pos_RP[others].view(len(sim_RC), views - 1)
        sim_RC.masked_fill_(own_RC, OUT)
        number_b = torch.full((len(ids_b),), (num - 1) * views)
        yield Block(sim_RC, ids_b, ids_C, views, number_b, pos_RP if pos_RP.shape[1] else None)


def flagged_mask(kin: Kin, block: Block, with_ignored: bool = False) -> Tensor:
    """(R, C) True where candidates are kin; `with_ignored`: also those that are ignored."""
    if kin.degree is None:
        return torch.zeros_like(block.sim_RC, dtype=torch.bool)
    kin_RC = (kin.degree > 0) & (block.sim_RC > -2)
    return kin_RC if kin.ignore is None or with_ignored else kin_RC & ~kin.ignore


class Similarity(NamedTuple):
    """Mean cosines of views of a sample, of samples of one class, and of different classes."""

    true_positive: float
    false_negative: float
    true_negative: float


def kin_similarity(
    embeddings: Tensor, labels: Tensor, candidates: Tensor | None = None
) -> Similarity:
    """Mean similarities over all pairs of the data set, from sums over samples and classes:

        Σ over pairs of samples of a class of z·z′ = ‖Σ z‖² − Σ ‖zᵢ‖²

    Args:
        embeddings, labels: (N, V, D) and (N,); below 0 is unknown.
        candidates: (N, V, D) embeddings of the samples as candidates, such as their captions, all
            of which are positives. None: `embeddings`, without pairs of a view and itself.
    """
    _check_shapes(embeddings, labels)
    sides = (embeddings, embeddings if candidates is None else candidates)
    one_ND, two_ND = (functional.normalize(each.double(), dim=2).sum(1) for each in sides)
    num, views = embeddings.shape[:2]
    itself = views if candidates is None else 0
    own_N = (one_ND * two_ND).sum(1)
    known_N = labels >= 0
    class_N = torch.unique(labels[known_N], return_inverse=True)[1]
    size_K = torch.bincount(class_N).double()
    one_KD, two_KD = (
        each.new_zeros(len(size_K), each.shape[1]).index_add_(0, class_N, each[known_N])
        for each in (one_ND, two_ND)
    )
    within, overall = (one_KD * two_KD).sum(), one_KD.sum(0) @ two_KD.sum(0)
    number = views**2
    sums_and_pairs = (
        ((own_N - itself).sum(), num * (number - itself)),
        (within - own_N[known_N].sum(), number * (size_K * (size_K - 1)).sum()),
        (overall - within, number * (size_K.sum().square() - size_K.square().sum())),
    )
    means = (float(total / pairs) if pairs else math.nan for total, pairs in sums_and_pairs)
    return Similarity(*means)


class ThresholdError(NamedTuple):
    """Mean absolute error, root mean square error, and mean difference."""

    mae: float
    rmse: float
    bias: float


def threshold_error(thresholds: Tensor, exact: Tensor) -> ThresholdError:
    _require_vectors(thresholds=thresholds, exact=exact)
    error = thresholds.double() - exact.double()
    figures = error.abs().mean(), error.square().mean().sqrt(), error.mean()
    return ThresholdError(*map(float, figures))


def _require_vectors(**tensors: Tensor) -> None:
    shapes = {tuple(each.shape) for each in tensors.values()}
    if len(shapes) > 1 or len(min(shapes)) != 1:
        given = " and ".join(f"`{name}` (={tuple(x.shape)})" for name, x in tensors.items())
        raise ValueError(f"{given} must have one shape (N,)")


# Clusters

Normaliser = Literal["arithmetic", "geometric", "min", "max"]
NORMALISERS: tuple[Normaliser, ...] = get_args(Normaliser)
SEEDS = (0, 1, 2, 3, 4)


class Spread(NamedTuple):
    mean: float
    deviation: float


def spread(values: Sequence[float]) -> Spread:
    """The deviation of a single value is NaN."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), deviation)


def mtpr_mtnr(labels: Array, truth: Array) -> Rates:
    """Mean true positive and true negative rates of pseudo-labels, per sample.

        MTPR = mean over i of |{j ≠ i : y_j = y_i, p_j = p_i}| / |{j ≠ i : y_j = y_i}|
        MTNR = mean over i of |{j : y_j ≠ y_i, p_j ≠ p_i}| / |{j : y_j ≠ y_i}|

    Args:
        labels: (N,) pseudo-labels p. A negative label is a separate cluster.
        truth: (N,) classes y. Samples of unknown class (below 0) are left out.
    """
    label_N, truth_N = torch.as_tensor(labels).cpu().long(), torch.as_tensor(truth).cpu().long()
    _require_vectors(labels=label_N, truth=truth_N)
    known_N = truth_N >= 0
    group_N = torch.unique(_number_unlabelled(label_N[known_N]), return_inverse=True)[1]
    class_N = torch.unique(truth_N[known_N], return_inverse=True)[1]
    in_group_N, in_class_N = (torch.bincount(each)[each] for each in (group_N, class_N))
    pair_N = group_N * len(class_N) + class_N
    _, place_N, sizes = torch.unique(pair_N, return_inverse=True, return_counts=True)
    both_N = sizes[place_N].double()
    others_N = len(class_N) - in_class_N
    found_N = ((both_N - 1) / (in_class_N - 1))[in_class_N > 1]
    kept_N = (1 - (in_group_N - both_N) / others_N)[others_N > 0]
    return Rates(float(found_N.mean()), float(kept_N.mean()))


def _number_unlabelled(label_N: Tensor) -> Tensor:
    if not len(label_N):
        return label_N
    return label_N.where(label_N >= 0, int(label_N.max()) + 1 + torch.arange(len(label_N)))


def label_nmi(labels: Array, truth: Array, normaliser: Normaliser = "arithmetic") -> float:
    """Normalised mutual information of (N,) pseudo-labels and (N,) classes, as in scikit-learn.
    Samples of unknown class (below 0) are left out; a negative pseudo-label is a separate
    cluster."""
    from sklearn.metrics import normalized_mutual_info_score

    require_choice("normaliser", normaliser, NORMALISERS)
    labels_N, truth_N = torch.as_tensor(labels).cpu().long(), torch.as_tensor(truth).cpu().long()
    known_N = _require_known(truth_N)
    pairs = truth_N[known_N].numpy(), _number_unlabelled(labels_N[known_N]).numpy()
    return float(normalized_mutual_info_score(*pairs, average_method=normaliser))


def _require_known(truth_N: Tensor) -> Tensor:
    known_N = truth_N >= 0
    if not bool(known_N.any()):
        raise KinfolkError("There are no labelled samples to compare clusters with.")
    return known_N


def nmi(
    features: Array,
    truth: Array,
    num_clusters: int | None = None,
    seeds: Sequence[int] = SEEDS,
    normaliser: Normaliser = "arithmetic",
) -> Spread:
    """`label_nmi` of the classes and k-means clusters of (N, F) unit-norm features, over several
    seeds. `num_clusters`: None means the number of classes."""
    from kinfolk.clustering.kmeans import kmeans

    require(bool(seeds), "seeds", seeds, "at least one seed")
    features_NF, truth_N = torch.as_tensor(features).cpu().float(), torch.as_tensor(truth).cpu()
    known_N = _require_known(truth_N)
    unit_NF, truth_N = functional.normalize(features_NF[known_N], dim=1), truth_N[known_N]
    k = len(torch.unique(truth_N)) if num_clusters is None else num_clusters
    found = [label_nmi(kmeans(unit_NF, k, seed=seed).labels, truth_N, normaliser) for seed in seeds]
    return spread(found)
