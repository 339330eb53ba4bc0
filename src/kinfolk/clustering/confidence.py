"""How sure the cluster of a sample is, and which samples are sure enough.

IFND: Chen et al., Incremental False Negative Detection for Contrastive Learning, ICLR 2022, equation 2.
PCL: Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR 2021, equation 9.

Dimension key: N samples, D features, K clusters, R rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22


def sample_confidence(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor, temperature: float) -> Tensor:
    """(N,) κ_i = exp(z_i·c_{y_i} / t) / Σ_j exp(z_i·c_j / t): near to its own centroid and far from all others. Both of unit norm."""
    parts = []
    rows = max(1, _BLOCK_ELEMENTS // len(centroids_KD))
    for features_RD, labels_R in zip(torch.split(features_ND, rows), torch.split(labels_N, rows), strict=True):
        logit_RK = (features_RD @ centroids_KD.T).div_(temperature)
        parts.append(torch.exp(logit_RK.gather(1, labels_R.unsqueeze(1)).squeeze(1) - logit_RK.logsumexp(1)))
    return torch.cat(parts)


def concentration(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    """(K,) φ = Σ ‖v − c‖ / (Z log(Z + 10)) over the Z samples of a cluster: small where they are many and close.

    As in the published code: a cluster of fewer than two samples has the largest φ of all, and the φ outside of the 10th and the 90th
    percentile are set to these.
    """
    num_clusters = len(centroids_KD)
    distance_N = (features_ND - centroids_KD[labels_N]).norm(dim=1)
    size_K = torch.bincount(labels_N, minlength=num_clusters)
    total_K = torch.zeros(num_clusters, dtype=distance_N.dtype, device=distance_N.device).index_add_(0, labels_N, distance_N)
    phi_K = total_K / (size_K * torch.log(size_K + 10.0)).clamp_min(1)
    phi_K = torch.where(size_K < 2, phi_K[size_K >= 2].max() if (size_K >= 2).any() else phi_K.new_ones(()), phi_K)
    low, high = phi_K.quantile(phi_K.new_tensor([0.1, 0.9]))
    return phi_K.clamp(low, high)


def cluster_confidence(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    """(N,) the mean φ over the φ of the sample's cluster: one confidence for all samples of a cluster, higher where it is concentrated."""
    phi_K = concentration(features_ND, centroids_KD, labels_N)
    return (phi_K.mean() / phi_K.clamp_min(torch.finfo(phi_K.dtype).tiny))[labels_N]


def accepted(confidence_N: Tensor, rate: float) -> Tensor:
    """(N,) True for exactly round(rate · N) samples, the most confident; of equal ones, those with the lower numbers."""
    count = round(rate * len(confidence_N))
    accepted_N = torch.zeros_like(confidence_N, dtype=torch.bool)
    accepted_N[confidence_N.argsort(descending=True, stable=True)[:count]] = True
    return accepted_N
