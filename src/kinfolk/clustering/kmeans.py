"""k-means: Lloyd's algorithm by faiss, from centroids by k-means++ (Arthur and Vassilvitskii, SODA
2007).

Dimension key: N samples, F features, K clusters, S samples that centroids are drawn from, R rows of
a block, M centroids drawn at a time, T trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kinfolk import distributed
from kinfolk.errors import KinfolkError, require, require_at_least

_ROUNDS, _TRIALS = 256, 16  # draws of k-means++, and samples tried in each
_DRAW_ELEMENTS = 1 << 22  # of a block


@dataclass(frozen=True)
class Clusters:
    """(N,) labels in [0, K) and (K, F) float32 centroids."""

    labels: Tensor
    centroids: Tensor


@torch.no_grad()
def kmeans(
    features: Tensor,
    num_clusters: int,
    *,
    seed: int,
    init: Tensor | None = None,
    iterations: int = 20,
    spherical: bool = False,
    points_per_cluster: int = 256,
    device: torch.device | None = None,
    over_ranks: bool = False,
) -> Clusters:
    """Clusters (N, F) `features`; on the CPU the same for the same seed and number of threads.
    Clusters are empty only if there are fewer distinct samples.

    Args:
        num_clusters: K, below N.
        init: (K, F) centroids to start from; None: `first_centroids`.
        iterations: of Lloyd's algorithm.
        spherical: centroids of unit norm, and samples assigned by the inner product.
        points_per_cluster: samples that centroids are learned from, at most.
        device: of the result; None: that of the features. With faiss-gpu, CUDA also computes it.
        over_ranks: all ranks call this and receive the result of rank zero.
    """
    check_clusterable(features, (num_clusters,))
    require_at_least(1, iterations=iterations, points_per_cluster=points_per_cluster)
    shape = num_clusters, features.shape[1]
    got = None if init is None else tuple(init.shape)
    require(got in (None, shape), "init", got, f"of the shape {shape}: clusters × features")
    device = features.device if device is None else device

    def compute() -> Clusters:
        import faiss  # here: `import kinfolk` needs only torch

        rows_NF = features.detach().to("cpu", torch.float32).contiguous()
        start_KF = init
        if start_KF is None:
            draw = torch.Generator().manual_seed(seed % 2**63)
            drawn_SF, most = rows_NF, num_clusters * points_per_cluster
            if len(rows_NF) > most:
                drawn_SF = rows_NF[torch.randperm(len(rows_NF), generator=draw)[:most]]
            start_KF = first_centroids(drawn_SF, num_clusters, draw)
        start_KF = start_KF.detach().to("cpu", torch.float32).contiguous()
        with _threads(faiss):
            lloyd = faiss.Kmeans(
                rows_NF.shape[1],
                num_clusters,
                niter=iterations,
                seed=seed % 2**31,
                spherical=spherical,
                gpu=faiss.get_num_gpus() if device.type == "cuda" else 0,
                min_points_per_centroid=1,  # faiss prints a warning below it
                max_points_per_centroid=points_per_cluster,
            )
            lloyd.train(rows_NF.numpy(), init_centroids=start_KF.numpy())
            _, nearest = lloyd.index.search(rows_NF.numpy(), 1)
        labels_N, centroids_KF = torch.from_numpy(nearest).flatten(), torch.tensor(lloyd.centroids)
        _repair(rows_NF, labels_N, centroids_KF, spherical)
        return Clusters(labels_N.to(device), centroids_KF.to(device))

    if not over_ranks or distributed.world_size() == 1:
        return compute()
    if distributed.is_rank_zero():
        with distributed.threads_of_waiting_ranks():
            found = compute()
    else:
        labels_N = torch.empty(len(features), dtype=torch.int64, device=device)
        found = Clusters(labels_N, torch.empty(shape, device=device))
    dist.broadcast(found.labels, 0)
    dist.broadcast(found.centroids, 0)
    return found


def first_centroids(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """(K, F) rows of (S, F), drawn by k-means++, each the best of 16 draws. Above 256 clusters
    several are drawn at a time, without such trials."""
    step = math.ceil(num_clusters / _ROUNDS)
    trials = _TRIALS if step == 1 else 1
    square_S = features.square().sum(1)
    chosen = torch.randint(len(features), (1,), generator=generator)
    nearest_S = torch.full_like(square_S, torch.inf)
    nearest_S = _nearest(features, square_S, chosen.view(1, 1), nearest_S)[0]
    sizes = [trials * min(step, num_clusters - done) for done in range(1, num_clusters, step)]
    for size in sizes:
        uniform_TM = torch.rand(size, generator=generator, dtype=torch.float64).view(trials, -1)
        total_S = nearest_S.double().cumsum(0)
        drawn_TM = torch.searchsorted(total_S, uniform_TM * total_S[-1], right=True)
        drawn_TM.clamp_(max=len(features) - 1)
        nearest_TS = _nearest(features, square_S, drawn_TM, nearest_S)
        best = int(nearest_TS.double().sum(1).argmin())
        chosen, nearest_S = torch.cat((chosen, drawn_TM[best])), nearest_TS[best]
    return features[chosen]


def _nearest(features: Tensor, square_S: Tensor, drawn_TM: Tensor, nearest_S: Tensor) -> Tensor:
    """(T, S) squared distance of each sample from the nearest of the M drawn in a trial, at most
    `nearest_S`."""
    centroids_KF, trials = features[drawn_TM.flatten()], len(drawn_TM)
    nearest_TS = nearest_S.repeat(trials, 1)
    rows = max(1, _DRAW_ELEMENTS // len(centroids_KF))
    for first in range(0, len(features), rows):
        part = slice(first, first + rows)
        square_KR = torch.addmm(square_S[part], centroids_KF, features[part].T, alpha=-2).add_(
            square_S[drawn_TM.flatten()].unsqueeze(1)
        )
        least_TR = square_KR.view(trials, drawn_TM.shape[1], -1).amin(1).clamp_(min=0)
        nearest_TS[:, part] = torch.minimum(nearest_TS[:, part], least_TR)
    # exactly, so that no sample is drawn twice while others are left
    nearest_TS.scatter_(1, drawn_TM, 0.0)
    return nearest_TS


def check_num_clusters(num_clusters: tuple[int, ...], num_samples: int) -> None:
    must = f"at least 1 and below the number of samples ({num_samples})"
    for number in num_clusters:
        require(1 <= number < num_samples, "num_clusters", number, must)


def check_clusterable(features: Tensor, num_clusters: tuple[int, ...]) -> None:
    must = "of the shape (samples, features)"
    require(features.ndim == 2, "features", tuple(features.shape), must)
    check_num_clusters(num_clusters, len(features))
    if not features.isfinite().all():
        row = int((~features.isfinite().all(1)).nonzero()[0])
        raise KinfolkError(
            f"the features of sample {row} are not finite; the training has diverged, lower the"
            " learning rate"
        )


def _repair(rows_NF: Tensor, labels_N: Tensor, centroids_KF: Tensor, spherical: bool) -> None:
    """Gives each empty cluster the sample farthest from its centroid, and its equals, in place."""
    count_K = torch.bincount(labels_N, minlength=len(centroids_KF))
    empty = (count_K == 0).nonzero().flatten().tolist()
    if not empty:
        return
    kind_N = torch.unique(rows_NF, dim=0, return_inverse=True)[1]  # equal rows are of one kind
    spare = int(kind_N.max()) + 1 - int((count_K > 0).sum())
    distance_N = (rows_NF - centroids_KF[labels_N]).square().sum(1)
    farthest = iter(distance_N.argsort(descending=True, stable=True).tolist())
    for cluster in empty[:spare]:
        row = next(i for i in farthest if (kind_N[labels_N == labels_N[i]] != kind_N[i]).any())
        labels_N[kind_N == kind_N[row]] = cluster
        centroids_KF[cluster] = F.normalize(rows_NF[row], dim=0) if spherical else rows_NF[row]


@contextmanager
def _threads(faiss: Any) -> Iterator[None]:
    """Within, faiss, which has a separate OpenMP, has as many threads as torch."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
