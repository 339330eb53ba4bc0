"""RCL: Tang et al., Relative Contrastive Loss for Unsupervised Representation Learning, ECCV 2022, equations 2 and 3, sections 4.3 and 5.3.

`Criteria` are levels of clusters over all samples; under each of them a pair is positive or negative. `RCL` is the framework.

Dimension key: N data set, B samples of a step, A rows (both views of the batch), D embedding, H criteria, K keys, S support queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.clustering import dbscan_levels, kmeans_levels
from kinfolk.clustering.dbscan import require_finite
from kinfolk.clustering.hierarchy import level_figures
from kinfolk.clustering.hierarchy_update import Rule
from kinfolk.clustering.labels import check_falling
from kinfolk.detectors import Hierarchy
from kinfolk.detectors.base import Detector, Refreshed, Space
from kinfolk.errors import warn_if_warmup_too_long
from kinfolk.frameworks.moco import MomentumSchedule
from kinfolk.frameworks.nnclr import RowRandom, SupportFramework, cluster_mates, nearest_keys
from kinfolk.objectives import RelativeContrast
from kinfolk.objectives.base import Shared
from kinfolk.stores.per_sample import OnHost


class Criteria(OnHost, ABC):
    """Abstract. The cluster of every sample under each of H criteria, equal on all ranks. Under the first, every sample is a cluster."""

    started: Tensor

    @abstractmethod
    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) clusters of the samples `ids`, in [0, N)."""

    @abstractmethod
    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch."""

    @abstractmethod
    def refresh(self, features: Tensor) -> None:
        """Sets all levels from the unit-norm embeddings (N, D) of all samples, in data-set order."""

    def update(self, ids: Tensor, features: Tensor, sound: Tensor) -> None:
        """Called in every step with the (B, D) embeddings of the samples (B,) of all ranks, and whether the loss is finite. Default: does
        nothing."""

    def follow(self, epoch: int) -> None:
        """Called at the start of an epoch, and after a resume. Default: does nothing."""


class OnlineCriteria(Criteria):
    """Initialised once by DBSCAN, then refined in every step.

    Args:
        hierarchy: a `Hierarchy` detector, used only for its labels.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        super().__init__()
        self.hierarchy = hierarchy

    @property
    def started(self) -> Tensor:  # type: ignore[override]
        return self.hierarchy.started

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.hierarchy.clusters.labels_of(ids)

    def due(self, epoch: int) -> bool:
        return self.hierarchy.due(epoch)

    def refresh(self, features: Tensor) -> None:
        self.hierarchy.refresh(features, 0.0)

    def follow(self, epoch: int) -> None:
        self.hierarchy.follow(epoch)

    def update(self, ids: Tensor, features: Tensor, sound: Tensor) -> None:
        if self.started:
            self.hierarchy.collect(ids, features, sound)


class OfflineCriteria(Criteria):
    """Recomputed every few epochs, each level separately, so that levels need not be nested (Table 4).

    Args:
        num_samples: N.
        number: H.
        cluster: (N, D) embeddings → (H, N) labels in [0, N). It is called on all ranks and returns the same labels on each.
        warmup_epochs: epochs before the first clustering.
        every: epochs between two clusterings.

    State: `labels` (H, N), where every sample is a cluster before the first clustering, and `started`.
    """

    on_host = ("started",)
    labels: Tensor

    def __init__(self, num_samples: int, number: int, cluster: Callable[[Tensor], Tensor], warmup_epochs: int, every: int) -> None:
        super().__init__()
        self.cluster, self.warmup_epochs, self.every = cluster, warmup_epochs, every
        self.register_buffer("labels", torch.arange(num_samples).repeat(number, 1))
        self.register_buffer("started", torch.tensor(False))

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.labels[:, ids]

    def due(self, epoch: int) -> bool:
        return epoch >= self.warmup_epochs and (epoch - self.warmup_epochs) % self.every == 0

    @torch.no_grad()
    def refresh(self, features: Tensor) -> None:
        """Sets the labels, which are the same on all ranks; see `kmeans` and `Hierarchy.refresh` for how ranks share the work."""
        if features.shape[:1] != self.labels.shape[1:]:
            wanted = (self.labels.shape[1], "any")
            raise ValueError(f"`features` (={tuple(features.shape)}) must have the shape {wanted}: all samples in data-set order")
        require_finite(features)
        self.labels.copy_(self.cluster(features.to(self.labels.device)))
        self.started.fill_(True)


def by_dbscan(like: Hierarchy, every: int) -> OfflineCriteria:
    """Separate DBSCAN for each level, with the radii of a hierarchy. Fitted radii are fitted each time."""

    def cluster(features: Tensor) -> Tensor:
        labels_HN = torch.empty(like.clusters.levels, len(features), dtype=torch.int64, device=features.device)
        if distributed.is_rank_zero():
            with distributed.threads_of_waiting_ranks():
                labels_HN.copy_(dbscan_levels(features, like.radii.fit(features), min_samples=like.min_samples))
        if distributed.world_size() > 1:
            dist.broadcast(labels_HN, 0)
        return labels_HN

    return OfflineCriteria(like.clusters.num_samples, like.clusters.levels, cluster, like.warmup_epochs, every)


def by_kmeans(
    num_samples: int, number: int, warmup_epochs: int, every: int, num_clusters: int | Sequence[int] | None, seed: int
) -> OfflineCriteria:
    """Separate k-means for each of the levels 2 … H, into `num_clusters` clusters.

    The default is N/5 at the last level and twice as many at each level before. With H > 4 it is ⅘ N at level 2 and half as many at each
    level after. For H = 4 both give the proportions of the paper.
    """
    first = min(1 << (number - 2), 4) * num_samples // 5
    given = (num_clusters,) if isinstance(num_clusters, int) else num_clusters
    chosen = tuple(first >> level for level in range(number - 1)) if given is None else tuple(given)
    if len(chosen) != number - 1 or not all(1 <= each < num_samples for each in chosen):
        raise ValueError(f"`num_clusters` (={list(chosen)}) must be one number below {num_samples} for each of the criteria 2 to {number}")
    check_falling(chosen)
    cluster = partial(kmeans_levels, num_clusters=chosen, seed=seed, over_ranks=True)
    return OfflineCriteria(num_samples, number, cluster, warmup_epochs, every)


Kind = Literal["online", "kmeans", "dbscan"]
Retrieval = Literal["hierarchy", "nearest"]


class RCL(SupportFramework):
    """Retrieves keys from the anchor's cluster, attracts them under the criteria where they share its cluster, and repels them otherwise.

        loss_i = mean_{keys z′} mean_h ( log( exp(q_h·z′ / t) + Σ_j w_j exp(q_h·s_j / t) ) − 1[Y_h(i) = Y_h(z′)] · q_h·z′ / t )

    q_h is the prediction of criterion h for a view of sample i, and s_j are the entries of the queue from other samples. Under criterion 1
    every sample is a cluster; the clusters of the criteria 2 … H are larger and larger. The keys are that of the other view, positive under
    all criteria, and up to `num_keys` entries of the queue drawn from the anchor's cluster under the last criterion. Before the first
    clustering there is only the key of the other view: equation 1. Then DBSCAN on the momentum encoder's embeddings of all samples sets the
    clusters, and every step refines them with the keys of its samples. A step uses the clusters before its own refinement.

    Args:
        encoder, head: encoder and head of the queries, which are evaluated and exported.
        num_samples: N. A queue that is not smaller causes a warning.
        criteria: H.
        hierarchy: "online", or clustered before each epoch, each level separately, by "kmeans" or "dbscan" (Table 4).
        retrieval: "hierarchy", or "nearest" with one criterion, where the entry nearest to the key of the other view is the key and
            positive. The latter is `NNCLR`.
        num_keys: K entries retrieved for each anchor, in addition to its other view.
        shared_predictor: one predictor for all criteria instead of H (Table 3).
        queue_size, momentum, momentum_schedule, predictor_size: see `NNCLR`.
        warmup_epochs: epochs before the first clustering.
        radii, min_samples: settings of DBSCAN; merge_similarity, parts, rule, max_units, feature_momentum: settings of the refinement; see
            `Hierarchy`.
        num_clusters: clusters of k-means for the criteria 2 … H, decreasing (the paper prints the last first). None: see `by_kmeans`.
        every: epochs between two offline clusterings.
        cluster_seed: seed of k-means.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `RelativeContrast`. The detector applies to the
            negatives in the queue. It does not choose keys.

    State: the momentum copy, the predictors, the queue, the clusters, the count of draws, and the state of the detector.

    Deviates from the paper in: old entries of the anchor's own sample are neither keys nor negatives. A retrieved key is also in the sum as
    an entry of the queue, as in equation 3. The paper states neither the number of retrieved keys nor the momentum. See `Hierarchy` for the
    clusters.
    """

    paper: ClassVar[str] = "Tang et al., ECCV 2022"
    needs: ClassVar[str] = "queue smaller than the data; one DBSCAN of all samples"
    refused: ClassVar[Mapping[str, str]] = RelativeContrast.refused

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        criteria: int = 3,
        hierarchy: Kind = "online",
        retrieval: Retrieval = "hierarchy",
        num_keys: int = 1,
        shared_predictor: bool = False,
        queue_size: int = 98304,
        momentum: float = 0.996,
        predictor_size: int = 4096,
        temperature: float = 0.1,
        warmup_epochs: int = 10,
        radii: Sequence[float] | None = None,
        min_samples: int = 4,
        merge_similarity: float | Sequence[float] | None = None,
        parts: int = 3,
        rule: Rule = "centres",
        max_units: int = 32,
        feature_momentum: float = 0.5,
        num_clusters: int | Sequence[int] | None = None,
        every: int = 1,
        cluster_seed: int = 0,
        momentum_schedule: MomentumSchedule = "constant",
        **shared: Unpack[Shared],
    ) -> None:
        _check(criteria, hierarchy, retrieval, num_keys, warmup_epochs, every, shared.get("detector"))
        objective = RelativeContrast(temperature, **shared)
        predictors = 1 if shared_predictor else criteria
        super().__init__(encoder, head, objective, num_samples, queue_size, momentum, predictors, predictor_size, momentum_schedule)
        self.num_samples, self.num_criteria, self.num_keys, self.warmup_epochs = num_samples, criteria, num_keys, warmup_epochs
        self.retrieval, self.epoch, self._warned = retrieval, 0, False
        self.chance = RowRandom()
        self.criteria: Criteria | None = None
        if criteria > 1 and hierarchy == "kmeans":
            self.criteria = by_kmeans(num_samples, criteria, warmup_epochs, every, num_clusters, cluster_seed)
        elif criteria > 1:
            how = merge_similarity, parts, rule, max_units, feature_momentum
            online = Hierarchy(num_samples, criteria, None, warmup_epochs, radii, min_samples, *how)
            self.criteria = OnlineCriteria(online) if hierarchy == "online" else by_dbscan(online, every)

    @property
    def labels(self) -> Tensor | None:
        """(H, N) clusters of all samples under every criterion. None before the first clustering."""
        if self.criteria is None or not self.criteria.started:
            return None
        return self.criteria.labels_of(torch.arange(self.num_samples, device=next(self.criteria.buffers()).device))

    @property
    def metrics(self) -> dict[str, float]:
        return super().metrics if self.labels is None else {**super().metrics, **level_figures(self.labels)}

    def retrieve(self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.retrieval == "nearest":
            return nearest_keys(keys, ids, support, support_ids)
        own_A1D, one_AH1 = keys.unsqueeze(1), torch.ones(len(keys), self.num_criteria, 1, device=keys.device)
        if self.criteria is None or not self.criteria.started:
            return own_A1D, one_AH1
        labels_HA, labels_HS = self.criteria.labels_of(ids), self.criteria.labels_of(support_ids)
        chance_A = self.chance.rows(len(ids), ids.device)
        place_AK = cluster_mates(labels_HA[-1], ids, labels_HS[-1], support_ids, self.num_keys, chance_A, self.num_samples)
        entry_AK = place_AK.clamp(min=0)
        same_HAK = (labels_HA.unsqueeze(2) == labels_HS[:, entry_AK]).to(one_AH1.dtype)
        same_AHK = same_HAK.masked_fill(place_AK < 0, -1.0).transpose(0, 1)
        return torch.cat((own_A1D, support[entry_AK].to(keys.dtype)), 1), torch.cat((one_AH1, same_AHK), 2)

    def learn(self, keys: Tensor, ids: Tensor, sound: Tensor) -> None:
        if self.criteria is not None and self.criteria.started:
            all_keys, all_ids = distributed.joined(keys, ids)
            self.criteria.update(all_ids, all_keys, sound)
            self.chance.advance()

    @property
    def space(self) -> Space:
        return "projected" if self.criteria is not None else super().space

    @property
    def collects(self) -> bool:
        return super().collects and not self._clusters_in(self.epoch)

    def due(self, epoch: int) -> bool:
        return self._clusters_in(epoch) or super().due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        for detector in self.refreshed:
            if detector.due(self.epoch):
                detector.refresh(None if detector.collects else features, progress)
        if self.criteria is not None and self._clusters_in(self.epoch):
            assert features is not None, "`collects` is False in such an epoch"
            self.criteria.refresh(features)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        if self.criteria is not None:
            self._warned = self._warned or warn_if_warmup_too_long(self.warmup_epochs, num_epochs, "clusters")
            self.criteria.follow(epoch)
        self.epoch = epoch

    def _clusters_in(self, epoch: int) -> bool:
        return self.criteria is not None and self.criteria.due(epoch)


def _check(
    criteria: int, hierarchy: Kind, retrieval: Retrieval, num_keys: int, warmup_epochs: int, every: int, detector: Detector | None
) -> None:
    for name, value, least in (
        ("criteria", criteria, 1),
        ("num_keys", num_keys, 1),
        ("warmup_epochs", warmup_epochs, 0),
        ("every", every, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` (={value}) must be at least {least}")
    if hierarchy not in ("online", "kmeans", "dbscan"):
        raise ValueError(f"`hierarchy` (={hierarchy!r}) must be 'online', 'kmeans' or 'dbscan'")
    if retrieval not in ("hierarchy", "nearest"):
        raise ValueError(f"`retrieval` (={retrieval!r}) must be 'hierarchy' or 'nearest'")
    if retrieval == "nearest" and criteria > 1:
        raise ValueError(f"`criteria` (={criteria}) must be 1 with `retrieval` 'nearest', where the nearest entry is the only positive")
    if criteria > 1 and isinstance(detector, Refreshed) and detector.space != "projected":
        raise ValueError(
            f"`detector` (with `space` {detector.space!r}) must use projected embeddings, as the criteria do; remove its `space`"
        )
