"""How far levels of labels are nested: the share of samples that conform to the hierarchy (RCL, section 5.3).

Dimension key: N samples, H levels, P pairs of a cluster and one above it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def conforming(labels: Tensor, *, strict: bool = False) -> float:
    """Share in [0, 1] of the samples that conform, of (H, N) labels from the lowest level to the highest.

    A sample conforms if at every higher level it is with most of each of its lower clusters (the smallest label where two are equally
    many). `strict`: with all of it, so that one stray sample speaks against the whole cluster. Nested labels: 1. The paper gives figures
    (k-means 73.88 %, DBSCAN 97.3 %) and no definition.

    Example:
        >>> conforming(torch.tensor([[0, 0, 0, 1], [5, 5, 7, 7]]))
        0.75
        >>> conforming(torch.tensor([[0, 0, 0, 1], [5, 5, 7, 7]]), strict=True)
        0.25
    """
    if labels.ndim != 2 or not labels.shape[1]:
        raise ValueError(f"`labels` (={tuple(labels.shape)}) must have the shape (levels, samples)")
    good_N = torch.ones(labels.shape[1], dtype=torch.bool, device=labels.device)
    for high in range(1, len(labels)):
        for low in range(high):
            good_N &= _with_most(labels[low], labels[high], strict)
    return good_N.double().mean().item()


def level_figures(labels: Tensor) -> dict[str, float]:
    """What an epoch says of (H, N) levels: the share `conforming`; the share `clustered`, that are not alone at the highest level; the
    share of all samples in its `largest_cluster`.

    Example:
        >>> level_figures(torch.tensor([[0, 1, 2, 3], [5, 5, 7, 8]]))
        {'conforming': 1.0, 'clustered': 0.5, 'largest_cluster': 0.5}
    """
    size = torch.unique(labels[-1], return_counts=True)[1].double()
    total = labels.shape[1]
    return {
        "conforming": conforming(labels),
        "clustered": size[size > 1].sum().item() / total,
        "largest_cluster": size.max().item() / total,
    }


def _with_most(low_N: Tensor, high_N: Tensor, strict: bool) -> Tensor:
    """(N,) whether the sample's label above is that of most, or of all, of its cluster below."""
    low_N = torch.unique(low_N, return_inverse=True)[1]
    high_N = torch.unique(high_N, return_inverse=True)[1]
    span = int(high_N.max()) + 1
    pair_P, inverse_N, count_P = torch.unique(low_N * span + high_N, return_inverse=True, return_counts=True)
    cluster_P = pair_P // span
    size = torch.bincount(low_N)
    if strict:
        whole_N: Tensor = count_P[inverse_N] == size[low_N]
        return whole_N
    most = torch.zeros_like(size).scatter_reduce(0, cluster_P, count_P, "amax")
    largest_P = count_P == most[cluster_P]
    place_P = torch.arange(len(pair_P), device=low_N.device)
    first = torch.full_like(size, len(pair_P)).scatter_reduce(0, cluster_P[largest_P], place_P[largest_P], "amin")
    with_most_N: Tensor = first[low_N] == inverse_N
    return with_most_N
