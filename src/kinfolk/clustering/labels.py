"""Pseudo-labels of all samples: confidence and growing acceptance (IFND, Chen et al., ICLR 2022,
equation 2), concentration (PCL, Li et al., ICLR 2021, equation 12), and levels (RCL, Table 4).

Dimension key: N samples, S samples that are clustered, D features, L or H levels, K clusters, R
rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.clustering.dbscan import dbscan
from kinfolk.clustering.kmeans import check_clusterable, check_num_clusters, kmeans
from kinfolk.errors import require, require_at_least, require_choice
from kinfolk.stores.per_sample import Exact

Schedule = Literal["linear", "step", "constant"]
Confidence = Literal["sample", "cluster"]
_BLOCK_ELEMENTS = 1 << 22
ConfidenceOf = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(S, D) features, (K, D) centroids, (S,) clusters, level → (S,) confidence."""


# Which labels are accepted


def concentration(
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    *,
    temperature: float = 1.0,
    alpha: float = 10.0,
    clip: float = 0.0,
) -> Tensor:
    """(K,) the concentration φ of each cluster, scaled to the mean `temperature`; 0 for an empty
    cluster.

        φ_k = Σ_{i in k} ‖v_i − c_k‖ / (Z_k log(Z_k + α))        Z_k members

    A cluster whose members are equal would have φ = 0 and an infinite pull; it gets the largest φ
    of the others, or `temperature`. φ is clamped to the quantiles `clip` and 1 − `clip`.
    """
    require(temperature > 0, "temperature", temperature, "above 0")
    require(0 <= alpha < math.inf, "alpha", alpha, "at least 0")
    require(0 <= clip < 0.5, "clip", clip, "in [0, 0.5)")
    norm = torch.linalg.vector_norm
    distance_N: Tensor = norm(features.double() - centroids.double()[labels], dim=1)
    size_K = torch.bincount(labels, minlength=len(centroids))
    total_K = distance_N.new_zeros(len(centroids)).index_add_(0, labels, distance_N)
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


def check_acceptance(
    schedule: Schedule, final_rate: float, confidence: Confidence, step_at: float = 0.0
) -> None:
    require_choice("schedule", schedule, get_args(Schedule))
    require_choice("confidence", confidence, get_args(Confidence))
    for name, share in (("final_rate", final_rate), ("step_at", step_at)):
        require(0 <= share <= 1, name, share, "in [0, 1]")


def rate_at(
    schedule: Schedule, final_rate: float, progress: float, step_at: float = 0.0, last: float = 1.0
) -> float:
    """The share of samples accepted at the `progress` in [0, 1]; "linear" ends at `last`."""
    share = {
        "linear": min(max(progress / last, 0.0), 1.0),
        "step": float(progress >= step_at),
        "constant": 1.0,
    }[schedule]
    return final_rate * share


def last_clustering(every: int, num_epochs: int, first: int = 0) -> float:
    """The progress at the last of the clusterings before the epochs `first`, `first` + `every`, …;
    1 if there is none after epoch 0."""
    last = first + (num_epochs - 1 - first) // every * every
    return last / num_epochs if last > 0 else 1.0


def sample_confidence(
    features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor, temperature: float
) -> Tensor:
    """(N,) κ_i = exp(z_i·c_{y_i} / t) / Σ_j exp(z_i·c_j / t) (IFND, equation 2), at unit norm."""
    parts = []
    rows = max(1, _BLOCK_ELEMENTS // len(centroids_KD))
    blocks = zip(torch.split(features_ND, rows), torch.split(labels_N, rows), strict=True)
    for features_RD, labels_R in blocks:
        logit_RK = (features_RD @ centroids_KD.T).div_(temperature)
        own_R = logit_RK.gather(1, labels_R.unsqueeze(1)).squeeze(1)
        parts.append((own_R - logit_RK.logsumexp(1)).exp())
    return torch.cat(parts)


def cluster_confidence(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    """(N,) the mean φ over the φ of the sample's cluster."""
    return concentration(features_ND, labels_N, centroids_KD, clip=0.1)[labels_N].reciprocal()


def accept_most_confident(
    confidence_N: Tensor, rate: float, distance_N: Tensor | None = None
) -> Tensor:
    """(N,) True for the round(rate · N) most confident samples; of equally confident ones, those
    with the least `distance_N`, because data sets are often sorted by class."""
    count = round(rate * len(confidence_N))
    distance_N = torch.zeros_like(confidence_N) if distance_N is None else distance_N
    order_N = distance_N.argsort(stable=True)
    order_N = order_N[confidence_N[order_N].argsort(descending=True, stable=True)]
    accepted_N = torch.zeros_like(confidence_N, dtype=torch.bool)
    accepted_N[order_N[:count]] = True
    return accepted_N


def centroid_distance(features_ND: Tensor, centroids_KD: Tensor, labels_N: Tensor) -> Tensor:
    rows = max(1, _BLOCK_ELEMENTS // max(1, features_ND.shape[1]))
    blocks = zip(torch.split(features_ND, rows), torch.split(labels_N, rows), strict=True)
    norm = torch.linalg.vector_norm
    return torch.cat([norm(x_RD - centroids_KD[label_R], dim=1) for x_RD, label_R in blocks])


# The labels


class PseudoLabels(Exact):
    """The k-means clusters of all samples at L levels, of which all or only the most confident are
    labels. Equal on all ranks.

    Args:
        num_samples: N.
        num_clusters: K of each level, each below N; a number means a single level.
        seed: level l has seed + l.
        accepts: whether only what `accept` chooses is a label. The owner then saves `accepted` and
            `confidence` (L, N), and loads them by `set_acceptance`.
        warm_start: a refresh starts from the last centroids, with `warm_iterations`.
        iterations, points_per_cluster: see `kmeans`.

    State: `labels` (L, N), `centroids` (ΣK, D), `refreshed`.
    """

    on_host = ("refreshed",)
    labels: Tensor
    centroids: Tensor
    refreshed: Tensor
    accepted: Tensor | None
    confidence: Tensor | None

    def __init__(
        self,
        num_samples: int,
        num_clusters: int | tuple[int, ...],
        *,
        seed: int,
        accepts: bool = False,
        warm_start: bool = True,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        given = (num_clusters,) if isinstance(num_clusters, int) else num_clusters
        self.num_clusters = tuple(given)
        require(len(self.num_clusters) > 0, "num_clusters", (), "at least one number")
        check_num_clusters(self.num_clusters, num_samples)
        self.num_samples, self.seed = num_samples, seed
        self.advice = f"use the same data set and the same `num_clusters` (={self.num_clusters})"
        self.warm_start, self.points_per_cluster = warm_start, points_per_cluster
        self.iterations, self.warm_iterations = iterations, warm_iterations
        require_at_least(1, iterations=iterations, warm_iterations=warm_iterations)
        require_at_least(1, points_per_cluster=points_per_cluster)
        shape = len(self.num_clusters), num_samples
        self.register_buffer("labels", torch.arange(num_samples).repeat(shape[0], 1))
        self.register_buffer("centroids", torch.zeros(sum(self.num_clusters), 0))
        self.register_buffer("refreshed", torch.tensor(False))
        for name, first in (
            ("accepted", torch.zeros(shape, dtype=torch.bool)),
            ("confidence", torch.zeros(shape)),
        ):
            self.register_buffer(name, first if accepts else None, persistent=False)
        self.has_labels = False  # known to the host

    def of(self, ids: Tensor) -> Tensor:
        """(L, …) the labels of the samples `ids`; −1 for a sample that has none."""
        if not self.has_labels:
            return torch.full_like(ids, -1).expand(len(self.labels), *ids.shape)
        labels = self.labels[:, ids]
        return labels if self.accepted is None else labels.where(self.accepted[:, ids], -1)

    @property
    def distinct(self) -> Tensor:
        """(L, N) the labels; a sample without one has K of the level plus its number."""
        if self.accepted is None:
            return self.labels if self.has_labels else self._singletons
        return self.labels.where(self.accepted, self._singletons)

    @property
    def _singletons(self) -> Tensor:
        numbers_N = torch.arange(self.num_samples, device=self.labels.device)
        return numbers_N + self.labels.new_tensor(self.num_clusters).unsqueeze(1)

    def level(self, level: int) -> Tensor:
        """(K, D) centroids."""
        first = sum(self.num_clusters[:level])
        return self.centroids[first : first + self.num_clusters[level]]

    @torch.no_grad()
    def refresh(self, features: Tensor, ids: Tensor | None = None) -> None:
        """Clusters `features`, equal on all ranks, of all samples or of `ids`; any other sample is
        then alone."""
        number = self.num_samples if ids is None else len(ids)
        must = f"of the shape ({number}, features): all samples in data-set order"
        require(len(features) == number, "features", tuple(features.shape), must)
        check_clusterable(features, self.num_clusters)
        is_known = bool(self.refreshed) and self.centroids.shape[1] == features.shape[1]
        warm = self.warm_start and is_known
        labels, centroids = self._singletons, []
        for level, number in enumerate(self.num_clusters):
            found = kmeans(
                features,
                number,
                seed=self.seed + level,
                init=self.level(level) if warm else None,
                iterations=self.warm_iterations if warm else self.iterations,
                points_per_cluster=self.points_per_cluster,
                device=self.labels.device,
                over_ranks=True,
            )
            labels[level, slice(None) if ids is None else ids] = found.labels
            centroids.append(found.centroids)
        self.labels, self.centroids = labels, torch.cat(centroids).to(self.centroids.dtype)
        self.refreshed.fill_(True)
        self.has_labels = self.accepted is None or self.has_labels

    @torch.no_grad()
    def accept(
        self, features: Tensor, rate: float, confidence: ConfidenceOf, ids: Tensor | None = None
    ) -> None:
        """Accepts the most confident share `rate` of the clustered samples at each level.
        `features`, `ids`: as in the last `refresh`."""
        assert self.accepted is not None, "`accepts` must be True"
        ids_S = torch.arange(self.num_samples, device=self.labels.device) if ids is None else ids
        accepted_LN = torch.zeros_like(self.accepted)
        confidence_LN = torch.zeros_like(self.accepted, dtype=torch.float32)
        for level, clusters_N in enumerate(self.labels):
            cluster_S, centroids_KD = clusters_N[ids_S], self.level(level).to(features.dtype)
            confidence_S = confidence(features, centroids_KD, cluster_S, level)
            distance_S = centroid_distance(features, centroids_KD, cluster_S)
            accepted_LN[level, ids_S] = accept_most_confident(confidence_S, rate, distance_S)
            confidence_LN[level, ids_S] = confidence_S.to(confidence_LN.dtype)
        if distributed.world_size() > 1:  # sums on an accelerator may differ in the last bit
            for result in (accepted_LN, confidence_LN):
                dist.broadcast(result, 0)
        self.set_acceptance(accepted_LN, confidence_LN)

    def set_acceptance(
        self, accepted: Tensor | None = None, confidence: Tensor | None = None
    ) -> None:
        """(L, N) each. None: none are accepted."""
        assert self.accepted is not None
        assert self.confidence is not None
        old, sure = self.accepted, self.confidence
        self.accepted = torch.zeros_like(old) if accepted is None else accepted.to(old)
        self.confidence = torch.zeros_like(sure) if confidence is None else confidence.to(sure)
        self.has_labels = bool(self.accepted.any())

    def sizes_of(self) -> Mapping[str, Mapping[str, int]]:
        labels = {"levels": len(self.num_clusters), "num_samples": self.num_samples}
        return {"labels": labels, "centroids": {"clusters": sum(self.num_clusters)}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        centroids = state_dict.get(prefix + "centroids")
        if centroids is not None and len(centroids) == len(self.centroids):
            self.centroids = self.centroids.new_zeros(centroids.shape)  # of any size of a feature
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self.accepted is None:
            self.has_labels = bool(self.refreshed)


def kmeans_levels(
    features: Tensor, num_clusters: Sequence[int], *, seed: int, over_ranks: bool = False
) -> Tensor:
    """(H, N) labels: level 1 every sample alone, then k-means for each of `num_clusters`, which
    fall."""
    check_falling(num_clusters)
    levels = [
        kmeans(features, number, seed=seed + place, spherical=True, over_ranks=over_ranks).labels
        for place, number in enumerate(num_clusters)
    ]
    return _with_first(torch.stack(levels))


def dbscan_levels(features: Tensor, radii: Sequence[float], *, min_samples: int = 4) -> Tensor:
    """(H, N) labels: level 1 every sample alone, then DBSCAN for each of `radii`, which grow."""
    return _with_first(dbscan(features, radii, min_samples=min_samples, nested=False))


def check_falling(num_clusters: Sequence[int]) -> None:
    falls = all(a > b for a, b in pairwise(num_clusters))
    require(falls, "num_clusters", list(num_clusters), "falling from one level to the next")


def _with_first(labels: Tensor) -> Tensor:
    return torch.cat((torch.arange(labels.shape[1], device=labels.device).unsqueeze(0), labels))
