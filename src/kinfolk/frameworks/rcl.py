"""RCL: Tang et al., Relative Contrastive Loss for Unsupervised Representation Learning, ECCV 2022,
equations 2 and 3, sections 4.3 and 5.3.

`Criteria` are levels of clusters over all samples; under each of them a pair is positive or
negative. `RCL` is the framework.

Dimension key: N data set, B samples of a step, A rows (both views of the batch), D embedding, H
criteria, K keys, S support queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.clustering import dbscan_levels, kmeans_levels
from kinfolk.clustering.dbscan import count_levels, from_level_2, require_finite
from kinfolk.clustering.hierarchy import level_figures
from kinfolk.clustering.labels import check_falling
from kinfolk.detectors import Hierarchy
from kinfolk.detectors.base import Detector, Space
from kinfolk.errors import warn_if_warmup_too_long
from kinfolk.frameworks.moco import MomentumSchedule
from kinfolk.frameworks.nnclr import RowRandom, SupportFramework, cluster_mates, nearest_keys
from kinfolk.objectives import RelativeContrastLoss
from kinfolk.objectives.base import Shared
from kinfolk.stores.per_sample import OnHost, check_ids


class Criteria(OnHost, ABC):
    """Abstract. The cluster of every sample under each of H criteria, equal on all ranks. Under the
    first, every sample is a cluster."""

    started: Tensor

    @abstractmethod
    def labels_of(self, ids: Tensor) -> Tensor:
        """(H, …) clusters of the samples `ids`, in [0, N)."""

    @abstractmethod
    def due(self, epoch: int) -> bool:
        """Whether `refresh` must be called before this epoch."""

    @abstractmethod
    def refresh(self, features: Tensor) -> None:
        """Sets all levels from the unit-norm embeddings (N, D) of all samples, in data-set
        order."""

    def update(self, ids: Tensor, features: Tensor, is_finite: Tensor) -> None:
        """Called in every step with the (B, D) embeddings of the samples (B,) of all ranks, and
        whether the loss is finite. Default: does nothing."""

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

    def update(self, ids: Tensor, features: Tensor, is_finite: Tensor) -> None:
        if self.started:
            self.hierarchy.collect(ids, features, is_finite)


class OfflineCriteria(Criteria):
    """Recomputed every few epochs, each level separately, so that levels need not be nested (Table
    4).

    Args:
        num_samples: N.
        number: H.
        cluster: (N, D) embeddings → (H, N) labels in [0, N). It is called on all ranks and returns
            the same labels on each.
        warmup_epochs: epochs before the first clustering.
        every: epochs between two clusterings.

    State: `labels` (H, N), where every sample is a cluster before the first clustering, and
    `started`.
    """

    on_host = ("started",)
    labels: Tensor

    def __init__(
        self,
        num_samples: int,
        number: int,
        cluster: Callable[[Tensor], Tensor],
        warmup_epochs: int,
        every: int,
    ) -> None:
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
        """Sets the labels, which are the same on all ranks; see `kmeans` and `Hierarchy.refresh`
        for how ranks share the work."""
        if features.shape[:1] != self.labels.shape[1:]:
            wanted = (self.labels.shape[1], "any")
            raise ValueError(
                f"`features` (={tuple(features.shape)}) must have the shape {wanted}: all samples"
                " in data-set order"
            )
        require_finite(features)
        self.labels.copy_(self.cluster(features.to(self.labels.device)))
        self.started.fill_(True)


def by_dbscan(like: Hierarchy, every: int) -> OfflineCriteria:
    """Separate DBSCAN for each level, with the radii of a hierarchy. Fitted radii are fitted each
    time."""

    def cluster(features: Tensor) -> Tensor:
        labels_HN = torch.empty(
            like.clusters.levels, len(features), dtype=torch.int64, device=features.device
        )
        if distributed.is_rank_zero():
            with distributed.threads_of_waiting_ranks():
                labels_HN.copy_(
                    dbscan_levels(features, like.radii.fit(features), min_samples=like.min_samples)
                )
        if distributed.world_size() > 1:
            dist.broadcast(labels_HN, 0)
        return labels_HN

    return OfflineCriteria(
        like.clusters.num_samples, like.clusters.levels, cluster, like.warmup_epochs, every
    )


def by_kmeans(
    num_samples: int,
    number: int,
    warmup_epochs: int,
    every: int,
    num_clusters: int | Sequence[int] | None,
    seed: int,
) -> OfflineCriteria:
    """Separate k-means for each of the levels 2 … H, into `num_clusters` clusters.

    The default is N/5 at the last level and twice as many at each level before. With H > 4 it is ⅘
    N at level 2 and half as many at each level after. For H = 4 both give the proportions of the
    paper.
    """
    first = min(1 << (number - 2), 4) * num_samples // 5
    given = (num_clusters,) if isinstance(num_clusters, int) else num_clusters
    chosen = from_level_2(
        tuple(first >> level for level in range(number - 1)) if given is None else given,
        falling=True,
    )
    if len(chosen) != number - 1 or not all(1 <= each < num_samples for each in chosen):
        needed = (
            f"; {len(chosen)} numbers need `criteria` (={len(chosen) + 1})"
            if len(chosen) != number - 1
            else ""
        )
        rule = (
            f"must be one number below {num_samples} for each of the criteria 2 to {number}{needed}"
        )
        raise ValueError(f"`num_clusters` (={list(chosen)}) {rule}")
    check_falling(chosen)
    cluster = partial(kmeans_levels, num_clusters=chosen, seed=seed, over_ranks=True)
    return OfflineCriteria(num_samples, number, cluster, warmup_epochs, every)


Kind = Literal["online", "kmeans", "dbscan"]
Retrieval = Literal["hierarchy", "each", "nearest"]


class RCL(SupportFramework):
    """Retrieves keys from the anchor's cluster, attracts them under the criteria where they share
    its cluster, and repels them otherwise.

        loss_i = mean_{keys z′} mean_h ( log( exp(q_h·z′ / t) + Σ_j w_j exp(q_h·s_j / t) ) −
        1[Y_h(i) = Y_h(z′)] · q_h·z′ / t )

    q_h is the prediction of criterion h for a view of sample i, and s_j are the entries of the
    queue from other samples. Under criterion 1 every sample is a cluster; the clusters of the
    criteria 2 … H are larger and larger. The keys are that of the other view, positive under all
    criteria, and up to `num_keys` entries of the queue drawn from the anchor's cluster under the
    last criterion, or under each. Before the first clustering there is only the key of the other
    view: equation 1. Then DBSCAN on the momentum encoder's embeddings of all samples sets the
    clusters, and every step refines them with the keys of its samples. A step uses the clusters
    before its own refinement.

    Args:
        encoder, head: encoder and head of the queries, which are evaluated and exported.
        num_samples: N. A queue that is not smaller causes a warning.
        criteria: H. None: one more than there are `radii` or `num_clusters`, because criterion 1
            has none of them; 3 without either.
        hierarchy: "online", or clustered before each epoch, each level separately, by "kmeans" or
            "dbscan" (Table 4).
        retrieval: where keys are drawn: "hierarchy" from the anchor's cluster under the last
            criterion, "each" from its cluster under each of the criteria 2 … H, `num_keys` from
            each. "nearest", with one criterion, takes the entry nearest to the key of the other
            view as the only key, which is positive: `NNCLR`.
        num_keys: K entries retrieved for each anchor.
        own_key: whether the other view is always a key too. False: only for an anchor without a
            retrieved key, as in Figure 2.
        shared_predictor: one predictor for all criteria instead of H (Table 3).
        queue_size, momentum, momentum_schedule, predictor_size: see `NNCLR`.
        warmup_epochs: epochs before the first clustering.
        radii, min_samples: settings of DBSCAN; merge_similarity, parts, max_units,
            feature_momentum: settings of the refinement; see `Hierarchy`.
        num_clusters: clusters of k-means for the criteria 2 … H, or for H … 2 as the paper prints
            them. None: see `by_kmeans`.
        every: epochs between two offline clusterings.
        cluster_seed: seed of k-means.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see
            `RelativeContrastLoss`. The detector applies to the negatives in the queue. It does not
            choose keys.

    State: the momentum copy, the predictors, the queue, the clusters, the count of draws, and the
    state of the detector.

    A setting that has no effect, such as `radii` with k-means, is refused if it differs from its
    default; `warmup_epochs` alone is accepted with one criterion, so that H can be varied.

    Deviates from the paper in: by default the other view is a key beside the retrieved ones
    (`own_key`), and keys come from the last criterion alone (`retrieval`); Figure 2 retrieves all
    keys, with all criteria. Old entries of the anchor's own sample are neither keys nor negatives.
    A retrieved key is also in the sum as an entry of the queue, as in equation 3. The paper states
    neither the number of retrieved keys nor the momentum. See `Hierarchy` for the clusters.
    """

    paper: ClassVar[str] = "Tang et al., ECCV 2022"
    needs: ClassVar[str] = "queue smaller than the data; one DBSCAN of all samples"
    refused: ClassVar[Mapping[str, str]] = RelativeContrastLoss.refused

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        criteria: int | None = None,
        hierarchy: Kind = "online",
        retrieval: Retrieval = "hierarchy",
        num_keys: int = 1,
        own_key: bool = True,
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
        max_units: int = 32,
        feature_momentum: float = 0.5,
        num_clusters: int | Sequence[int] | None = None,
        every: int = 1,
        cluster_seed: int = 0,
        momentum_schedule: MomentumSchedule = "constant",
        **shared: Unpack[Shared],
    ) -> None:
        given = (num_clusters,) if isinstance(num_clusters, int) else num_clusters
        if criteria is None:
            criteria = (
                1 if retrieval == "nearest" else count_levels(radii if given is None else given)
            )
        _check(
            criteria, hierarchy, retrieval, num_keys, warmup_epochs, every, shared.get("detector")
        )
        clusters = criteria > 1
        online = clusters and hierarchy == "online"
        by_density = clusters and hierarchy != "kmeans"
        each = retrieval if retrieval == "each" else None
        for name, value, default, used, where in (
            ("num_clusters", num_clusters, None, clusters and hierarchy == "kmeans", "k-means"),
            ("cluster_seed", cluster_seed, 0, clusters and hierarchy == "kmeans", "k-means"),
            ("radii", radii, None, by_density, "DBSCAN"),
            ("min_samples", min_samples, 4, by_density, "DBSCAN"),
            ("merge_similarity", merge_similarity, None, online, "the online refinement"),
            ("parts", parts, 3, online, "the online refinement"),
            ("max_units", max_units, 32, online, "the online refinement"),
            ("feature_momentum", feature_momentum, 0.5, online, "the online refinement"),
            ("every", every, 1, clusters and not online, "offline clustering"),
            ("num_keys", num_keys, 1, clusters, "retrieval from clusters"),
            ("own_key", own_key, True, clusters, "retrieval from clusters"),
            ("retrieval", each, None, clusters, "retrieval from clusters"),
            ("hierarchy", hierarchy, "online", clusters, "clusters"),
            ("shared_predictor", shared_predictor, False, clusters, "several criteria"),
        ):
            if value != default and not used:
                how = f"`hierarchy` (={hierarchy!r})" if clusters else f"`criteria` (={criteria})"
                how = f"`retrieval` (={retrieval!r})" if retrieval == "nearest" else how
                raise ValueError(
                    f"`{name}` (={value!r}) is a setting of {where} and has no effect with {how};"
                    " leave it out"
                )
        objective = RelativeContrastLoss(temperature=temperature, **shared)
        predictors = 1 if shared_predictor else criteria
        super().__init__(
            encoder,
            head,
            objective,
            num_samples,
            queue_size,
            momentum,
            predictors,
            predictor_size,
            momentum_schedule,
        )
        self.num_samples, self.num_criteria, self.num_keys, self.warmup_epochs = (
            num_samples,
            criteria,
            num_keys,
            warmup_epochs,
        )
        self.retrieval, self.own_key, self.epoch, self._warned = retrieval, own_key, 0, False
        self.chance = RowRandom()
        self.criteria: Criteria | None = None
        if criteria > 1 and hierarchy == "kmeans":
            self.criteria = by_kmeans(
                num_samples, criteria, warmup_epochs, every, num_clusters, cluster_seed
            )
        elif criteria > 1:
            density = Hierarchy(
                num_samples=num_samples,
                levels=criteria,
                warmup_epochs=warmup_epochs,
                radii=radii,
                min_samples=min_samples,
                merge_similarity=merge_similarity,
                parts=parts,
                max_units=max_units,
                feature_momentum=feature_momentum,
            )
            self.criteria = OnlineCriteria(density) if online else by_dbscan(density, every)

    @property
    def labels(self) -> Tensor | None:
        """(H, N) clusters of all samples under every criterion. None before the first
        clustering."""
        if self.criteria is None or not self.criteria.started:
            return None
        return self.criteria.labels_of(
            torch.arange(self.num_samples, device=next(self.criteria.buffers()).device)
        )

    @property
    def metrics(self) -> dict[str, float]:
        return (
            super().metrics
            if self.labels is None
            else {**super().metrics, **level_figures(self.labels)}
        )

    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.retrieval == "nearest":
            return nearest_keys(keys, ids, support, support_ids)
        own_A1D, one_AH1 = (
            keys.unsqueeze(1),
            torch.ones(len(keys), self.num_criteria, 1, device=keys.device),
        )
        if self.criteria is None or not self.criteria.started:
            return own_A1D, one_AH1
        check_ids(ids, self.num_samples)
        self.objective.check_ids(ids)
        labels_HA, labels_HS = self.criteria.labels_of(ids), self.criteria.labels_of(support_ids)
        chance_A = self.chance.rows(len(ids), ids.device)
        number = self.num_criteria - 1 if self.retrieval == "each" else 1
        places = []
        for h in range(1, number + 1):  # from the last criterion down, each with a draw of its own
            one_A, support_S = labels_HA[-h], labels_HS[-h]
            draw_A = (chance_A + (h - 1) / number) % 1
            places.append(
                cluster_mates(
                    one_A, ids, support_S, support_ids, self.num_keys, draw_A, self.num_samples
                )
            )
        place_AK = torch.cat(places, 1)
        entry_AK, there_AK = place_AK.clamp(min=0), place_AK >= 0
        same_HAK = (labels_HA.unsqueeze(2) == labels_HS[:, entry_AK]) & there_AK
        self._count_keys(ids, support_ids[entry_AK], same_HAK, there_AK)
        same_AHK = same_HAK.to(one_AH1.dtype).masked_fill(~there_AK, -1.0).transpose(0, 1)
        # no key: a copy that the loss leaves out
        found_AKD = torch.where(there_AK.unsqueeze(2), support[entry_AK].to(keys.dtype), own_A1D)
        if not self.own_key:
            one_AH1 = one_AH1.masked_fill(there_AK.any(1).view(-1, 1, 1), -1.0)
        return torch.cat((own_A1D, found_AKD), 1), torch.cat((one_AH1, same_AHK), 2)

    def _count_keys(
        self, ids_A: Tensor, key_ids_AK: Tensor, same_HAK: Tensor, there_AK: Tensor
    ) -> None:
        """Sets `step_shares`: anchors with a retrieved key, and keys with the anchor's label; of
        all keys, and of those that are positive under each of the criteria 2 … H."""
        labels_N, total = self.objective.labels, ids_A.new_full((), len(ids_A))
        self.step_shares = {}
        for name, key_AK in (
            ("", there_AK),
            *((f"_{h + 1}", same_HAK[h]) for h in range(1, self.num_criteria)),
        ):
            self.step_shares[f"with_key{name}"] = torch.stack((key_AK.any(1).sum(), total))
            if labels_N is not None:
                one_A1, other_AK = (
                    labels_N.to(ids_A.device)[ids_A].unsqueeze(1),
                    labels_N.to(ids_A.device)[key_ids_AK],
                )
                judged_AK = key_AK & (one_A1 >= 0) & (other_AK >= 0)
                self.step_shares[f"key_precision{name}"] = torch.stack(
                    ((judged_AK & (one_A1 == other_AK)).sum(), judged_AK.sum())
                )

    def learn(self, keys: Tensor, ids: Tensor, is_finite: Tensor) -> None:
        if self.criteria is not None and self.criteria.started:
            all_keys, all_ids = distributed.joined(keys, ids)
            self.criteria.update(all_ids, all_keys, is_finite)
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
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(None if detector.collects else features, progress)
        if self.criteria is not None and self._clusters_in(self.epoch):
            assert features is not None, "`collects` is False in such an epoch"
            self.criteria.refresh(features)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        if self.criteria is not None:
            self._warned = self._warned or warn_if_warmup_too_long(
                self.warmup_epochs, num_epochs, "clusters"
            )
            self.criteria.follow(int(epoch))
        self.epoch = int(epoch)

    def _clusters_in(self, epoch: int) -> bool:
        return self.criteria is not None and self.criteria.due(epoch)


def _check(
    criteria: int,
    hierarchy: Kind,
    retrieval: Retrieval,
    num_keys: int,
    warmup_epochs: int,
    every: int,
    detector: Detector | None,
) -> None:
    for name, value, least in (
        ("criteria", criteria, 1),
        ("num_keys", num_keys, 1),
        ("warmup_epochs", warmup_epochs, 0),
        ("every", every, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"`{name}` (={value}) must be a whole number of at least {least}")
    if hierarchy not in ("online", "kmeans", "dbscan"):
        raise ValueError(f"`hierarchy` (={hierarchy!r}) must be 'online', 'kmeans' or 'dbscan'")
    if retrieval not in get_args(Retrieval):
        raise ValueError(
            f"`retrieval` (={retrieval!r}) must be one of {', '.join(get_args(Retrieval))}"
        )
    if retrieval == "nearest" and criteria > 1:
        raise ValueError(
            f"`criteria` (={criteria}) must be 1 with `retrieval` 'nearest', where the nearest"
            " entry is the only positive"
        )
    if criteria > 1 and detector is not None and detector.space != "projected":
        raise ValueError(
            f"`detector` (with `space` {detector.space!r}) must use projected embeddings, as the"
            " criteria do; remove its `space`"
        )
