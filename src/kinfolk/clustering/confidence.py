"""Confidence of cluster labels, which of them are accepted, and how many.

IFND: Chen et al., Incremental False Negative Detection for Contrastive Learning, ICLR 2022,
equation 2. PCL: Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR
2021, equation 12 (`concentration`).

Dimension key: N samples, D features, K clusters, R rows of a block.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor


def concentration(
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    *,
    temperature: float = 1.0,
    alpha: float = 10.0,
    clip: float = 0.0,
) -> Tensor:
    """(K,) the concentration φ of each cluster, scaled to the mean `temperature`: smaller is more
    concentrated. 0 for an empty cluster.

        φ_k = Σ_{i in k} ‖v_i − c_k‖ / (Z_k log(Z_k + α))        Z_k members

    A cluster of one member, or of equal ones, would have φ = 0 and an infinite pull; it is given
    the largest φ of the others, or where there are none, all have `temperature`.

    Args:
        features: (N, D) v.
        labels: (N,) cluster of each sample.
        centroids: (K, D) c.
        temperature: mean of φ over the clusters that are not empty.
        alpha: keeps small clusters from a φ too large.
        clip: φ is cut at this quantile and at 1 − it, before it is scaled; 0.1 in the published
            code, not in the paper.

    Example:
        >>> features = torch.tensor([[0.0], [2.0], [9.0], [9.0]])
        >>> labels, centroids = torch.tensor([0, 0, 1, 1]), torch.tensor([[1.0], [9.0], [0.0]])
        >>> concentration(features, labels, centroids, temperature=0.2)
        tensor([0.2000, 0.2000, 0.0000])
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` (={temperature}) must be above 0")
    if not (alpha >= 0 and math.isfinite(alpha)):
        raise ValueError(f"`alpha` (={alpha}) must be at least 0")
    if not 0 <= clip < 0.5:
        raise ValueError(f"`clip` (={clip}) must be in [0, 0.5)")
    distance_N = torch.linalg.vector_norm(features.double() - centroids.double()[labels], dim=1)
    size_K = torch.bincount(labels, minlength=len(centroids))
    total_K = torch.zeros(len(centroids), dtype=torch.float64, device=features.device).index_add_(
        0, labels, distance_N
    )
    phi_K = total_K / (size_K * torch.log(size_K + alpha))
    wide_K = (size_K > 1) & (phi_K > 1e-12)
    present_K = size_K > 0
    if not bool(wide_K.any()):
        phi_K = torch.full_like(phi_K, temperature)
    else:
        phi_K = phi_K.where(wide_K, phi_K[wide_K].max())
        low, high = (torch.quantile(phi_K[present_K], share) for share in (clip, 1 - clip))
        phi_K = phi_K.clamp(low, high)
        phi_K = phi_K * (temperature / phi_K[present_K].mean())
    return phi_K.masked_fill(~present_K, 0.0).to(centroids.dtype)


Schedule = Literal["linear", "step", "constant"]
"""How the share of accepted samples grows."""
Confidence = Literal["sample", "cluster"]
"""By what samples are accepted."""
_BLOCK_ELEMENTS = 1 << 22


def check_acceptance(
    schedule: Schedule, final_rate: float, confidence: Confidence, step_at: float = 0.0
) -> None:
    """Raises for settings that the functions below do not support."""
    for name, value, allowed in (
        ("schedule", schedule, get_args(Schedule)),
        ("confidence", confidence, get_args(Confidence)),
    ):
        if value not in allowed:
            raise ValueError(f"`{name}` (={value!r}) must be one of {', '.join(allowed)}")
    for name, share in (("final_rate", final_rate), ("step_at", step_at)):
        if not 0 <= share <= 1:
            raise ValueError(f"`{name}` (={share}) must be in [0, 1]")


def rate_at(
    schedule: Schedule, final_rate: float, progress: float, step_at: float = 0.0, last: float = 1.0
) -> float:
    """The share of samples that is accepted after the share `progress` of the training:
    `final_rate` from the beginning (constant), from `step_at` on (step), or growing with the
    progress from 0 to `final_rate` at the progress `last` (linear).

    `last` is that of the last clustering before an epoch, see `last_clustering`: the epochs after
    it are trained with the final rate.

    Example:
        >>> last = last_clustering(1, 5)
        >>> [round(rate_at("linear", 1.0, epoch / 5, last=last), 2) for epoch in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    share = {
        "linear": min(max(progress / last, 0.0), 1.0),
        "step": float(progress >= step_at),
        "constant": 1.0,
    }[schedule]
    return final_rate * share


def last_clustering(every: int, num_epochs: int, first: int = 0) -> float:
    """The progress at which the last of the clusterings before the epochs `first`, `first` +
    `every`, … is made; 1 where there is none but that before the epoch 0."""
    last = first + (num_epochs - 1 - first) // every * every
    return last / num_epochs if last > 0 else 1.0


def sample_confidence(
    features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor, temperature: float
) -> Tensor:
    """(N,) κ_i = exp(z_i·c_{y_i} / t) / Σ_j exp(z_i·c_j / t): near to its own centroid and far from
    all others. Both of unit norm."""
    parts = []
    rows = max(1, _BLOCK_ELEMENTS // len(centroids_KD))
    for features_RD, labels_R in zip(
        torch.split(features_ND, rows), torch.split(labels_N, rows), strict=True
    ):
        logit_RK = (features_RD @ centroids_KD.T).div_(temperature)
        parts.append(
            torch.exp(logit_RK.gather(1, labels_R.unsqueeze(1)).squeeze(1) - logit_RK.logsumexp(1))
        )
    return torch.cat(parts)


def cluster_confidence(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    """(N,) the mean φ over the φ of the sample's cluster (see `concentration`, cut at the 10th and
    90th percentile as in the published code): one confidence for all samples of a cluster, higher
    where it is concentrated."""
    return concentration(features_ND, labels_N, centroids_KD, clip=0.1)[labels_N].reciprocal()


def accepted(confidence_N: Tensor, rate: float, distance_N: Tensor | None = None) -> Tensor:
    """(N,) True for exactly round(rate · N) samples, the most confident; of equally confident ones,
    those with the least `distance_N`.

    Confidences of clusters are equal for all samples of a cluster, and at the cut of
    `concentration` for several clusters. Samples are often sorted by class, so without the
    distances the first classes would be accepted first.
    """
    count = round(rate * len(confidence_N))
    order_N = (
        torch.arange(len(confidence_N), device=confidence_N.device)
        if distance_N is None
        else distance_N.argsort(stable=True)
    )
    accepted_N = torch.zeros_like(confidence_N, dtype=torch.bool)
    accepted_N[order_N[confidence_N[order_N].argsort(descending=True, stable=True)[:count]]] = True
    return accepted_N


def centroid_distance(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    """(N,) ‖v_i − c_{y_i}‖: how far each sample is from the centroid of its cluster."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, features_ND.shape[1]))
    parts = zip(torch.split(features_ND, rows), torch.split(labels_N, rows), strict=True)
    return torch.cat(
        [
            torch.linalg.vector_norm(features_RD - centroids_KD[labels_R], dim=1)
            for features_RD, labels_R in parts
        ]
    )
