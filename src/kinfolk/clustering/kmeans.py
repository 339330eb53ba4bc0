"""k-means by faiss: on the GPU where faiss sees one, otherwise on the CPU with as many threads as torch has.

Dimension key: N samples, F features, K clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.errors import KinfolkError


@dataclass(frozen=True)
class Clusters:
    """What a clustering came to: (N,) int64 labels in [0, K) and (K, F) float32 centroids, both on the CPU."""

    labels: Tensor
    centroids: Tensor


def kmeans(
    features: Tensor,
    num_clusters: int,
    *,
    seed: int,
    init: Tensor | None = None,
    iterations: int = 20,
    spherical: bool = False,
    points_per_cluster: int = 256,
) -> Clusters:
    """The clusters of (N, F) `features`; the same for the same features, seed and number of threads.

    A cluster that ends empty is given the sample farthest from its own centroid; with fewer distinct samples than clusters some stay empty.

    Args:
        features: (N, F), any device and type.
        num_clusters: K, below N.
        seed: of the first centroids and of the samples that are drawn.
        init: (K, F) centroids to start from (a warm start); None: K samples drawn at random.
        iterations: of Lloyd's algorithm.
        spherical: centroids of unit norm, and samples assigned by the inner product. For features of unit norm.
        points_per_cluster: centroids are learned from at most so many samples per cluster, drawn at random; all are labelled.

    Example:
        >>> kmeans(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), 2, seed=0).labels.unique(return_counts=True)[1]
        tensor([2, 2])
    """
    check(features, (num_clusters,))
    if iterations < 1:
        raise ValueError(f"`iterations` (={iterations}) must be at least 1")
    if points_per_cluster < 1:
        raise ValueError(f"`points_per_cluster` (={points_per_cluster}) must be at least 1")
    if init is not None and init.shape != (num_clusters, features.shape[1]):
        raise ValueError(f"`init` (={tuple(init.shape)}) must have the shape {(num_clusters, features.shape[1])}: clusters × features")
    import faiss  # here: `import kinfolk` needs only torch

    rows_NF = features.detach().to("cpu", torch.float32).contiguous()
    start_KF = None if init is None else init.detach().to("cpu", torch.float32).contiguous().numpy()
    with _threads(faiss):
        lloyd = faiss.Kmeans(
            rows_NF.shape[1],
            num_clusters,
            niter=iterations,
            seed=seed % 2**31,
            spherical=spherical,
            gpu=_gpu(faiss),
            min_points_per_centroid=1,  # faiss prints a warning below it
            max_points_per_centroid=points_per_cluster,
        )
        lloyd.train(rows_NF.numpy(), init_centroids=start_KF)
        _, nearest = lloyd.index.search(rows_NF.numpy(), 1)
        assert lloyd.centroids is not None
    labels_N, centroids_KF = torch.from_numpy(nearest).flatten(), torch.from_numpy(lloyd.centroids.copy())
    _repair(rows_NF, labels_N, centroids_KF, spherical)
    return Clusters(labels_N, centroids_KF)


def check(features: Tensor, num_clusters: tuple[int, ...]) -> None:
    """Refuses what cannot be clustered, in one sentence."""
    if features.ndim != 2:
        raise ValueError(f"`features` (={tuple(features.shape)}) must have the shape (samples, features)")
    for number in num_clusters:
        if not 1 <= number < len(features):
            raise KinfolkError(f"`num_clusters` (={number}) must be at least 1 and below the number of samples ({len(features)})")
    if not features.isfinite().all():
        row = int((~features.isfinite().all(1)).nonzero()[0])
        raise KinfolkError(
            f"the features of sample {row} are not finite, so they cannot be clustered; the training has diverged, lower the learning rate"
        )


def _repair(rows_NF: Tensor, labels_N: Tensor, centroids_KF: Tensor, spherical: bool) -> None:
    """Gives each empty cluster the sample farthest from its centroid, and all that equal it, in place."""
    empty = (torch.bincount(labels_N, minlength=len(centroids_KF)) == 0).nonzero().flatten().tolist()
    if not empty:
        return
    places_NF = labels_N.unsqueeze(1).expand_as(rows_NF)
    most_KF, least_KF = (
        torch.zeros_like(centroids_KF).scatter_reduce(0, places_NF, rows_NF, of, include_self=False) for of in ("amax", "amin")
    )
    mixed = (most_KF > least_KF).any(1).tolist()
    for row in (rows_NF - centroids_KF[labels_N]).square().sum(1).argsort(descending=True, stable=True).tolist():
        if not empty or not any(mixed):
            return
        left = int(labels_N[row])
        if not mixed[left]:
            continue
        cluster = empty.pop(0)
        labels_N[(labels_N == left) & (rows_NF == rows_NF[row]).all(1)] = cluster
        centroids_KF[cluster] = F.normalize(rows_NF[row], dim=0) if spherical else rows_NF[row]
        others_MF = rows_NF[labels_N == left]
        mixed[left] = bool((others_MF != others_MF[0]).any())


def _gpu(faiss: Any) -> bool:
    return bool(getattr(faiss, "get_num_gpus", lambda: 0)())


@contextmanager
def _threads(faiss: Any) -> Iterator[None]:
    """faiss brings an OpenMP of its own; it is given torch's number of threads, so that a process is not served twice."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
