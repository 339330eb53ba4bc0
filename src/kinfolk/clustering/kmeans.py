"""k-means by faiss: on the GPU where faiss sees one, otherwise on the CPU with as many threads as torch has.

The first centroids are drawn by k-means++: Arthur and Vassilvitskii, k-means++: The Advantages of Careful Seeding, SODA 2007.

Dimension key: N samples, F features, K clusters, S samples that centroids are drawn from, M centroids drawn at a time, T trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.errors import KinfolkError

_ROUNDS, _TRIALS = 256, 16
"""Draws of k-means++, and samples tried in each: twelve groups whose members are half as far apart as the groups are still found."""
_BLOCK_ELEMENTS = 1 << 22


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
        init: (K, F) centroids to start from (a warm start); None: K samples drawn by k-means++, see `first_centroids`.
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
    start_KF = init
    if start_KF is None:
        generator = torch.Generator().manual_seed(seed % 2**63)
        start_KF = first_centroids(_drawn(features.detach().float(), num_clusters * points_per_cluster, generator), num_clusters, generator)
    start_KF = start_KF.detach().to("cpu", torch.float32).contiguous()
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
        lloyd.train(rows_NF.numpy(), init_centroids=start_KF.numpy())
        _, nearest = lloyd.index.search(rows_NF.numpy(), 1)
        assert lloyd.centroids is not None
    labels_N, centroids_KF = torch.from_numpy(nearest).flatten(), torch.from_numpy(lloyd.centroids.copy())
    _repair(rows_NF, labels_N, centroids_KF, spherical)
    return Clusters(labels_N, centroids_KF)


def first_centroids(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """(K, F) of the (S, F) `features`, drawn by k-means++: each with a probability in proportion to its squared distance from the nearest
    centroid drawn before, so that groups that lie apart have one each.

    Of 16 samples drawn that way, the one that leaves the smallest sum of squared distances is taken. Above 256 clusters several
    centroids are drawn at a time, without such trials: all distances then cost as much as one iteration of Lloyd's algorithm.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [9.0], [9.1], [-9.0], [-9.1]])
        >>> first_centroids(x, 3, torch.Generator().manual_seed(0)).round().flatten().sort().values
        tensor([-9.,  0.,  9.])
    """
    step = math.ceil(num_clusters / _ROUNDS)
    trials = _TRIALS if step == 1 else 1
    square_S = features.square().sum(1)
    chosen = torch.randint(len(features), (1,), generator=generator).to(features.device)
    nearest_S = _nearest(features, square_S, chosen.view(1, 1), torch.full_like(square_S, torch.inf))[0]
    while len(chosen) < num_clusters:
        number = min(step, num_clusters - len(chosen))
        total_S = nearest_S.double().cumsum(0)
        uniform_TM = torch.rand(trials, number, generator=generator, dtype=torch.float64).to(features.device)
        drawn_TM = torch.searchsorted(total_S, uniform_TM * total_S[-1], right=True).clamp_(max=len(features) - 1)
        nearest_TS = _nearest(features, square_S, drawn_TM, nearest_S)
        best = int(nearest_TS.double().sum(1).argmin())
        chosen, nearest_S = torch.cat((chosen, drawn_TM[best])), nearest_TS[best]
    return features[chosen]


def _nearest(features: Tensor, square_S: Tensor, drawn_TM: Tensor, nearest_S: Tensor) -> Tensor:
    """(T, S) squared distance of each sample from the nearest of the M samples drawn in a trial, or `nearest_S` where that is less."""
    centroids_KF, trials = features[drawn_TM.flatten()], len(drawn_TM)
    nearest_TS = nearest_S.repeat(trials, 1)
    rows = max(1, _BLOCK_ELEMENTS // len(centroids_KF))
    for first in range(0, len(features), rows):
        part = slice(first, first + rows)
        square_KR = torch.addmm(square_S[part], centroids_KF, features[part].T, alpha=-2).add_(square_S[drawn_TM.flatten()].unsqueeze(1))
        least_TR = square_KR.view(trials, drawn_TM.shape[1], -1).amin(1).clamp_(min=0)
        nearest_TS[:, part] = torch.minimum(nearest_TS[:, part], least_TR)
    nearest_TS.scatter_(1, drawn_TM, 0.0)  # exactly, so that no sample is drawn twice while others are left
    return nearest_TS


def _drawn(features: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """At most so many of the rows, at random."""
    if len(features) <= most:
        return features
    return features[torch.randperm(len(features), generator=generator)[:most].to(features.device)]


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
