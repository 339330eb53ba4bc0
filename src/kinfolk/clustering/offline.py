"""Hierarchies clustered anew as a whole, each level for itself: what RCL compares its online clustering with (Table 4).

Nothing makes their levels nested; `conforming` measures how far they are.

Dimension key: N samples, D features, H levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.kmeans import kmeans


def kmeans_levels(features: Tensor, num_clusters: Sequence[int], *, seed: int, iterations: int = 20) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one k-means for each of `num_clusters`, which fall.

    The paper: 1,000,000, 500,000 and 250,000 clusters of ImageNet.
    """
    check_falling(num_clusters)
    levels = [
        kmeans(features, number, seed=seed + place, iterations=iterations, spherical=True).labels
        for place, number in enumerate(num_clusters)
    ]
    return _with_first(torch.stack(levels).to(features.device))


def dbscan_levels(features: Tensor, radii: Sequence[float], *, min_samples: int = 4) -> Tensor:
    """(H, N) labels: level 1 every sample its own, then one DBSCAN for each of `radii`, which grow. The paper: 0.6, 0.7 and 0.8."""
    return _with_first(dbscan(features, radii, min_samples=min_samples, nested=False))


def check_falling(num_clusters: Sequence[int]) -> None:
    """Refuses numbers of clusters that do not fall from one level to the next."""
    if any(a <= b for a, b in pairwise(num_clusters)):
        hint = "; the paper prints them from the last level to the first" if all(a < b for a, b in pairwise(num_clusters)) else ""
        raise ValueError(f"`num_clusters` (={list(num_clusters)}) must fall: higher levels have fewer clusters{hint}")


def _with_first(labels: Tensor) -> Tensor:
    return torch.cat((torch.arange(labels.shape[1], device=labels.device).unsqueeze(0), labels))
