"""How similar the views of a sample are, and samples of one class: SPCL paper, Table 2 and Figure 2; and how far thresholds are off.

Dimension key: N samples, V views, D embedding, K classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor


class Similarity(NamedTuple):
    """Mean cosines: of two views of a sample (true positives), of views of different samples of one class (false negatives), and of samples
    of different classes (true negatives). NaN where there are no such pairs."""

    true_positive: float
    false_negative: float
    true_negative: float


def kin_similarity(embeddings: Tensor, labels: Tensor) -> Similarity:
    """Over all pairs of the data set, from the sums of the samples and of the classes: no N × N matrix.

        Σ over pairs of samples of a class of z·z′ = ‖Σ z‖² − Σ ‖zᵢ‖²

    Args:
        embeddings: (N, V, D), made unit norm.
        labels: (N,) classes; below 0: unknown, counts for the true positives alone.

    Example:
        >>> kin_similarity(torch.eye(2).repeat_interleave(2, 0).unsqueeze(1).expand(4, 2, 2), torch.tensor([0, 0, 1, 1]))
        Similarity(true_positive=1.0, false_negative=1.0, true_negative=0.0)
    """
    if embeddings.ndim != 3 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"`embeddings` (={tuple(embeddings.shape)}) and `labels` (={tuple(labels.shape)}) must have the shapes (N, views, size), (N,)"
        )
    unit_NVD = functional.normalize(embeddings.double(), dim=2)
    num_views = unit_NVD.shape[1]
    sum_ND = unit_NVD.sum(1)
    square_N = sum_ND.square().sum(1)
    own = (square_N - num_views).sum() / (len(sum_ND) * num_views * (num_views - 1)) if num_views > 1 else torch.tensor(torch.nan)
    known_N = labels >= 0
    class_N = torch.unique(labels[known_N], return_inverse=True)[1]
    size_K = torch.bincount(class_N).double()
    sum_KD = torch.zeros(len(size_K), sum_ND.shape[1], dtype=torch.float64).index_add_(0, class_N, sum_ND[known_N])
    within, everybody = sum_KD.square().sum(), sum_KD.sum(0).square().sum()
    alike, others = (size_K * (size_K - 1)).sum(), size_K.sum().square() - size_K.square().sum()
    per_pair = num_views**2
    false_negative = float((within - square_N[known_N].sum()) / (alike * per_pair)) if alike else math.nan
    return Similarity(float(own), false_negative, float((everybody - within) / (others * per_pair)) if others else math.nan)


class ThresholdError(NamedTuple):
    """Learned thresholds against the exact quantiles: mean absolute error, root mean square error, and mean difference."""

    mae: float
    rmse: float
    bias: float


def threshold_error(thresholds: Tensor, exact: Tensor) -> ThresholdError:
    """How far (N,) thresholds are from (N,) exact ones; the GloFND paper's section 5 reports MAE and RMSE.

    Example:
        >>> threshold_error(torch.tensor([0.5, 0.7]), torch.tensor([0.25, 0.95]))
        ThresholdError(mae=0.25, rmse=0.25, bias=0.0)
    """
    if thresholds.shape != exact.shape or thresholds.ndim != 1 or not len(exact):
        raise ValueError(f"`thresholds` (={tuple(thresholds.shape)}) and `exact` (={tuple(exact.shape)}) must have one shape (N,)")
    error = thresholds.double() - exact.double()
    return ThresholdError(float(error.abs().mean()), float(error.square().mean().sqrt()), float(error.mean()))
