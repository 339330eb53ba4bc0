"""RCL and NNCLR: keys are retrieved from a support queue.

- RCL: Tang et al., ECCV 2022, equations 2 and 3, sections 4.3 and 5.3.
- NNCLR: Dwibedi et al., ICCV 2021, equations 1 to 4, in the form of Tang et al.

Dimension key: V views (2), B samples of a step, A = B·V rows, sample-major, D embedding, H
criteria, P predictors (1 or H), K keys, S support queue, N data set.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.clustering import dbscan_levels, kmeans_levels
from kinfolk.clustering.dbscan import count_levels, require_all_samples
from kinfolk.clustering.hierarchy import level_figures
from kinfolk.clustering.labels import check_falling
from kinfolk.detectors import Hierarchy
from kinfolk.detectors.base import Space
from kinfolk.errors import require, require_at_least, require_choice
from kinfolk.frameworks.base import ClusteringFramework
from kinfolk.frameworks.moco import MomentumFramework, MomentumSchedule, both_orders
from kinfolk.models.heads import embedding_size, prediction_head
from kinfolk.objectives import RelativeContrastLoss
from kinfolk.pairs import Pairs, integer_ids, unit
from kinfolk.stores.per_sample import OnHost, StepRandom, check_ids, is_broken, to_device

_BLOCK_ELEMENTS = 1 << 22
Kind = Literal["online", "kmeans", "dbscan"]
Retrieval = Literal["hierarchy", "each"]


class RowRandom(StepRandom):
    """A random number in [0, 1) for each row, the same for any number of ranks."""

    def rows(self, number: int, device: torch.device) -> Tensor:
        """(number,) random numbers of this rank's rows."""
        first, total = 0, number
        if distributed.world_size() > 1:
            sizes = distributed.batch_sizes(number, device)
            first, total = sum(sizes[: dist.get_rank()]), sum(sizes)
        everywhere = torch.rand(total, generator=self.generator(), dtype=torch.float64)
        return to_device(everywhere[first : first + number], device)


def cluster_mates(
    labels: Tensor,
    ids: Tensor,
    support_labels: Tensor,
    support_ids: Tensor,
    number: int,
    random: Tensor,
    num_samples: int,
) -> Tensor:
    """(A, K) places of entries in the anchor's cluster, each at most once; −1 fills up. They are
    evenly spaced, from one that `random` (A,) chooses."""
    # sorted by cluster, then by sample
    names_S, order_S = (support_labels * num_samples + support_ids).sort(stable=True)
    start_A = labels * num_samples
    first_A = torch.searchsorted(names_S, start_A)
    own_A = torch.searchsorted(names_S, start_A + ids)
    after_A = torch.searchsorted(names_S, start_A + ids, right=True)
    end_A = torch.searchsorted(names_S, start_A + num_samples)
    count_A = (own_A - first_A) + (end_A - after_A)
    turn_K, count_A1 = torch.arange(number, device=ids.device), count_A.unsqueeze(1)
    drawn_A1 = (random * count_A).long().unsqueeze(1)
    place_AK = drawn_A1 + turn_K * (count_A1 // number).clamp(min=1)
    place_AK = first_A.unsqueeze(1) + place_AK % count_A1.clamp(min=1)
    skipped_AK = (after_A - own_A).unsqueeze(1) * (place_AK >= own_A.unsqueeze(1))
    place_AK, there_AK = place_AK + skipped_AK, turn_K < count_A1
    return torch.where(there_AK, order_S[place_AK.where(there_AK, 0)], -1)


def nearest(keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> Tensor:
    """(A, 1) place of the most similar entry of another sample, −1 if there is none. In full
    precision, because 16 bits change many results."""
    found = []
    rows = max(1, _BLOCK_ELEMENTS // len(support))
    for keys_RD, ids_R in zip(torch.split(keys, rows), torch.split(ids, rows), strict=True):
        with torch.autocast(keys.device.type, enabled=False):
            sim_RS = keys_RD @ support.T
            best = sim_RS.masked_fill_(ids_R.unsqueeze(1) == support_ids, -torch.inf).max(1)
        found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(found).unsqueeze(1)


class SupportFramework(MomentumFramework, ABC):
    """Abstract. Contrasts the predictions of both views with retrieved keys and the support queue
    (RCL, Figure 2), without its entries of the anchor's sample. Each criterion has a predictor, or
    all share one."""

    loss_kind = RelativeContrastLoss
    refused: ClassVar[Mapping[str, str]] = RelativeContrastLoss.refused
    head_options: ClassVar[Mapping[str, object]] = {"layers": 3, "last_norm": True}

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        queue_size: int = 98304,
        momentum: float = 0.996,
        predictor_size: int = 4096,
        temperature: float = 0.1,
        momentum_schedule: MomentumSchedule = "constant",
        **given: Any,
    ) -> None:
        super().__init__(encoder, head, RelativeContrastLoss(temperature=temperature, **given))
        self.predictors = nn.ModuleList()
        self.add_predictors(1, predictor_size)
        self.add_queue(num_samples, queue_size, momentum, momentum_schedule)

    def add_predictors(self, number: int, hidden_size: int) -> None:
        size = embedding_size(self.encoder, self.head)
        self.predictors.extend(prediction_head(size, hidden_size) for _ in range(number))

    @abstractmethod
    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(A, K, D) keys of each row, and (A, H, K) whether they are positive under each criterion;
        below 0: no key. `keys` (A, D) are those of the other views."""

    def learn(self, keys: Tensor, ids: Tensor, is_finite: Tensor) -> None:
        """Called in training with the keys of this rank; on a CPU only if the loss is finite."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        first, second = both_orders(views)
        projected = self.head(self.encoder(first))
        anchors = torch.stack([predict(projected) for predict in self.predictors], 1).flatten(0, 1)
        keys = self.make_keys(second)
        row_ids, number = ids.repeat_interleave(2), len(self.predictors)
        support, support_ids = self.queue.candidates(keys, row_ids)
        with torch.no_grad():
            found_AKD, same_AHK = self.retrieve(keys, row_ids, support, support_ids)
            # one prediction for all criteria: P_c of equation 9
            degree = same_AHK.mean(1) if number == 1 else same_AHK.flatten(0, 1)
        positives = found_AKD.repeat_interleave(number, 0)
        pairs = Pairs(
            *(unit(anchors), support, positives, ids, support_ids, 2 * number),
            unit=True,
            degree=degree,
            collected=keys,  # embeddings as returned by `embed`, not predictions
        )
        loss = self.objective.on(pairs)
        if self.training:
            is_finite = self.push(keys, row_ids, loss)
            if not is_broken(is_finite):
                self.learn(keys, row_ids, is_finite)
        return loss

    def embed(self, images: Tensor) -> Tensor:
        return self.slow.embed(images)


class NNCLR(SupportFramework):
    """Contrasts the prediction of each view with the queue, whose nearest entry is the positive.

        loss_i = −q_i·n_i / t + log( exp(q_i·n_i / t) + Σ_{j in queue, not of sample i} w_ij
        exp(q_i·s_j / t) )

    n_i is the entry of another sample nearest to the key of the other view, or that key if there is
    none.
    """

    paper: ClassVar[str] = "Dwibedi et al., ICCV 2021"
    needs: ClassVar[str] = "queue smaller than the data"

    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        place_A1 = nearest(keys, ids, support, support_ids)
        own_A1D, found_A1D = keys.unsqueeze(1).to(support.dtype), support[place_A1.clamp(min=0)]
        found_A1D = torch.where(place_A1.unsqueeze(2) < 0, own_A1D, found_A1D)
        return found_A1D, torch.ones(len(keys), 1, 1, device=keys.device)


class OnlineCriteria(nn.Module):
    """Criteria that are refined in every step."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        super().__init__()
        self.hierarchy = hierarchy

    @property
    def started(self) -> Tensor:
        return self.hierarchy.started

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.hierarchy.clusters.labels_of(ids)

    def refresh(self, features: Tensor) -> None:
        self.hierarchy.refresh(features, 0.0)


class OfflineCriteria(OnHost):
    """Criteria that `cluster`, (N, D) → (H, N), computes every few epochs. Levels need not be
    nested (Table 4)."""

    on_host = ("started",)
    labels: Tensor
    started: Tensor

    def __init__(self, num_samples: int, number: int, cluster: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cluster = cluster
        self.register_buffer("labels", torch.arange(num_samples).repeat(number, 1))
        self.register_buffer("started", torch.tensor(False))

    def labels_of(self, ids: Tensor) -> Tensor:
        return self.labels[:, ids]

    @torch.no_grad()
    def refresh(self, features: Tensor) -> None:
        require_all_samples(features, self.labels.shape[1])
        self.labels.copy_(self.cluster(features.to(self.labels.device)))
        self.started.fill_(True)


def by_dbscan(like: Hierarchy) -> OfflineCriteria:
    """DBSCAN for each level; fitted radii are fitted each time."""

    def cluster(features: Tensor) -> Tensor:
        levels, min_samples = like.clusters.levels, like.min_samples
        return distributed.from_rank_zero(
            lambda: dbscan_levels(features, like.radii.fit(features), min_samples=min_samples),
            torch.empty(levels, len(features), dtype=torch.int64, device=features.device),
        )

    return OfflineCriteria(like.num_samples, like.clusters.levels, cluster)


def by_kmeans(num_samples: int, number: int, num_clusters: Sequence[int] | None) -> OfflineCriteria:
    """k-means for each level, by default into N/5 clusters at the last and twice as many at each
    before, at most ⅘ N, the proportions of the paper."""
    first = min(1 << (number - 2), 4) * num_samples // 5
    given = num_clusters or [first >> level for level in range(number - 1)]
    fits = len(given) == number - 1 and all(1 <= each < num_samples for each in given)
    must = f"one number below {num_samples} for each of the criteria 2 to {number} (`criteria`)"
    require(fits, "num_clusters", list(given), must)
    check_falling(given)
    cluster = partial(kmeans_levels, num_clusters=given, seed=0, over_ranks=True)
    return OfflineCriteria(num_samples, number, cluster)


_USED_BY = {  # settings that have an effect
    "online": ("radii", "min_samples", "merge_similarity", "parts", "feature_momentum"),
    "dbscan": ("radii", "min_samples", "every"),
    "kmeans": ("num_clusters", "every"),
}
_USED_BY_ALL = ("hierarchy", "retrieval", "num_keys", "own_key", "shared_predictor")


def _refuse_unused(given: Mapping[str, Any]) -> None:
    kind, clusters = given["hierarchy"], given["criteria"] != 1
    used = {*_USED_BY_ALL, *_USED_BY[kind]} if clusters else set()
    unused = {*_USED_BY_ALL, *chain(*_USED_BY.values())} - used
    for name, parameter in inspect.signature(RCL).parameters.items():
        if name in unused and given[name] != parameter.default:
            other = f"`hierarchy` (={kind!r})" if clusters else "`criteria` (=1)"
            raise ValueError(f"`{name}` (={given[name]!r}) has no effect with {other}; remove it")


class RCL(ClusteringFramework, SupportFramework):
    """Retrieves keys from the anchor's cluster; attracts them under the criteria where they share
    its cluster, else repels them.

        loss_i = mean_{keys z′} mean_h ( log( exp(q_h·z′ / t) + Σ_j w_j exp(q_h·s_j / t) ) −
        1[Y_h(i) = Y_h(z′)] · q_h·z′ / t )

    q_h is the prediction of criterion h for a view of sample i, and s_j are the entries of the
    queue from other samples. Under criterion 1 every sample is a cluster; clusters grow from 2 to
    H. The keys are that of the other view, positive under all criteria, and up to `num_keys`
    entries of the queue drawn from the anchor's cluster under the last criterion, or under each;
    before the first clustering only the former.
    """

    paper: ClassVar[str] = "Tang et al., ECCV 2022"
    needs: ClassVar[str] = "queue smaller than the data; one DBSCAN of all samples"

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
        feature_momentum: float = 0.5,
        num_clusters: Sequence[int] | None = None,
        every: int = 1,
        momentum_schedule: MomentumSchedule = "constant",
        **given: Any,
    ) -> None:
        settings = dict(locals())
        require_choice("hierarchy", hierarchy, get_args(Kind))
        require_choice("retrieval", retrieval, get_args(Retrieval))
        _refuse_unused(settings)
        if criteria is None:
            criteria = count_levels(radii if num_clusters is None else num_clusters)
        require_at_least(1, criteria=criteria, num_keys=num_keys)
        clusters = criteria > 1
        queue = queue_size, momentum, predictor_size, temperature, momentum_schedule
        super().__init__(encoder, head, num_samples, *queue, **given)
        self.add_predictors(0 if shared_predictor else criteria - 1, predictor_size)
        if clusters:
            self.require_projected("criteria")
        self.set_schedule(warmup_epochs if clusters else 0, every)
        self.num_samples, self.num_criteria, self.num_keys = num_samples, criteria, num_keys
        self.retrieval, self.own_key = retrieval, own_key
        self.chance = RowRandom()
        self.criteria: OnlineCriteria | OfflineCriteria | None = None
        if clusters and hierarchy == "kmeans":
            self.criteria = by_kmeans(num_samples, criteria, num_clusters)
        elif clusters:
            density = Hierarchy(
                num_samples=num_samples,
                levels=criteria,
                warmup_epochs=warmup_epochs,
                radii=radii,
                min_samples=min_samples,
                merge_similarity=merge_similarity,
                parts=parts,
                feature_momentum=feature_momentum,
            )
            online = hierarchy == "online"
            self.criteria = OnlineCriteria(density) if online else by_dbscan(density)

    @property
    def labels(self) -> Tensor | None:
        """(H, N) clusters of all samples, once there are any."""
        if self.criteria is None or not self.criteria.started:
            return None
        device = next(self.criteria.buffers()).device
        return self.criteria.labels_of(torch.arange(self.num_samples, device=device))

    @property
    def metrics(self) -> dict[str, float]:
        figures = {} if self.labels is None else level_figures(self.labels)
        return {**super().metrics, **figures}

    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        own_A1D = keys.unsqueeze(1)
        one_AH1 = torch.ones(len(keys), self.num_criteria, 1, device=keys.device)
        if self.criteria is None or not self.criteria.started:
            return own_A1D, one_AH1
        check_ids(ids, self.num_samples)
        self.objective.check_ids(ids)
        labels_HA, labels_HS = self.criteria.labels_of(ids), self.criteria.labels_of(support_ids)
        chance_A = self.chance.rows(len(ids), ids.device)
        number = self.num_criteria - 1 if self.retrieval == "each" else 1
        places = []
        for h in range(number):  # from the last criterion down, each with another draw
            labelled = labels_HA[-1 - h], ids, labels_HS[-1 - h], support_ids
            draw_A = (chance_A + h / number) % 1
            places.append(cluster_mates(*labelled, self.num_keys, draw_A, self.num_samples))
        place_AK = torch.cat(places, 1)
        entry_AK, there_AK = place_AK.clamp(min=0), place_AK >= 0
        same_HAK = (labels_HA.unsqueeze(2) == labels_HS[:, entry_AK]) & there_AK
        self._count_keys(ids, support_ids[entry_AK], there_AK)
        same_AHK = same_HAK.to(one_AH1.dtype).masked_fill(~there_AK, -1.0).transpose(0, 1)
        # no key: a copy that the loss leaves out
        found_AKD = torch.where(there_AK.unsqueeze(2), support[entry_AK].to(keys.dtype), own_A1D)
        if not self.own_key:
            one_AH1 = one_AH1.masked_fill(there_AK.any(1).view(-1, 1, 1), -1.0)
        return torch.cat((own_A1D, found_AKD), 1), torch.cat((one_AH1, same_AHK), 2)

    def _count_keys(self, ids_A: Tensor, key_ids_AK: Tensor, there_AK: Tensor) -> None:
        """For `step_shares`: anchors with a retrieved key, and keys with the anchor's label."""
        number = ids_A.new_full((), len(ids_A))
        self.step_shares = {"with_key": torch.stack((there_AK.any(1).sum(), number))}
        if self.objective.labels is not None:
            labels_N = self.objective.labels.to(ids_A.device)
            one_A1, other_AK = labels_N[ids_A].unsqueeze(1), labels_N[key_ids_AK]
            known_AK = there_AK & (one_A1 >= 0) & (other_AK >= 0)
            right_AK = known_AK & (one_A1 == other_AK)
            self.step_shares["key_precision"] = torch.stack((right_AK.sum(), known_AK.sum()))

    def learn(self, keys: Tensor, ids: Tensor, is_finite: Tensor) -> None:
        if self.criteria is not None and self.criteria.started:
            all_keys, all_ids = distributed.gather_all(keys, ids)
            if isinstance(self.criteria, OnlineCriteria):
                self.criteria.hierarchy.collect(all_ids, all_keys, is_finite)
            self.chance.advance()

    @property
    def space(self) -> Space:
        return "projected" if self.criteria is not None else super().space

    def clusters_in(self, epoch: int) -> bool:
        if self.criteria is None:
            return False
        if isinstance(self.criteria, OnlineCriteria):
            return epoch == self.warmup_epochs
        return super().clusters_in(epoch)

    def cluster(self, features: Tensor | None, progress: float) -> None:
        assert features is not None, "`collects` is False in such an epoch"
        assert self.criteria is not None
        self.criteria.refresh(features)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        if isinstance(self.criteria, OnlineCriteria):
            self.criteria.hierarchy.follow(int(epoch))
