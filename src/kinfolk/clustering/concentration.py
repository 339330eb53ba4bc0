"""How concentrated clusters are: Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR 2021, equation 12.

Dimension key: N samples, D features, K clusters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def concentration(
    features: Tensor, labels: Tensor, centroids: Tensor, *, temperature: float = 1.0, alpha: float = 10.0, clip: float = 0.0
) -> Tensor:
    """(K,) the concentration φ of each cluster, scaled to the mean `temperature`: smaller is more concentrated. 0 for an empty cluster.

        φ_k = Σ_{i in k} ‖v_i − c_k‖ / (Z_k log(Z_k + α))        Z_k members

    A cluster of one member, or of equal ones, would have φ = 0 and an infinite pull; it is given the largest φ of the others, or where
    there are none, all have `temperature`.

    Args:
        features: (N, D) v.
        labels: (N,) cluster of each sample.
        centroids: (K, D) c.
        temperature: mean of φ over the clusters that are not empty.
        alpha: keeps small clusters from a φ too large.
        clip: φ is cut at this quantile and at 1 − it, before it is scaled; 0.1 in the published code, not in the paper.

    Example:
        >>> features = torch.tensor([[0.0], [2.0], [9.0], [9.0]])
        >>> concentration(features, torch.tensor([0, 0, 1, 1]), torch.tensor([[1.0], [9.0], [0.0]]), temperature=0.2)
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
    total_K = torch.zeros(len(centroids), dtype=torch.float64, device=features.device).index_add_(0, labels, distance_N)
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
