"""Batches by clusters: Mo et al., Siamese Prototypical Contrastive Learning, section 3.2: half of one prototype, half of others.

Dimension key: N samples, B batch, S batches of an epoch, H anchors of a batch (half of it), M samples looked at.

Heads that begin anew: their first weights again, others each time, and the same after a resume and on every rank.

The prototype of every sample: a k-means cluster of its features, or for comparison its true label. Mo et al., 2022, section 3.2.

Dimension key: N data set, F features, L levels, A features of a step.

SPCL: Mo, Sun and Li, Siamese Prototypical Contrastive Learning, 2022, algorithm 1 and equations 1 to 5.

Dimension key: V views, B batch, A features (A = B·V, sample-major), F features, D embedding, N data set, K prototypes, L levels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.clustering import ClusterLabels
from kinfolk.detectors.base import Detector, Space
from kinfolk.errors import warn_if_warmup_too_long
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size, embeddings, projection_head
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import Shared
from kinfolk.objectives.metric import SiameseMetric
from kinfolk.objectives.prototype import PrototypeCrossEntropy
from kinfolk.pairs import integer_ids

ROUNDS = 50
"""How often samples that clash are offered another batch; all but crafted cases need a handful."""


def cluster_pair_batches(labels: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """(S·B,) sample numbers, batch after batch, none twice: an epoch in which every batch is half of one cluster and half of others.

    Every cluster is cut into chunks of half a batch; what is left of each, a tiny cluster as a whole, is strung together, cluster by
    cluster, and cut likewise. S of these chunks, at random, are the anchors of the S batches; the samples of all others fill the other
    halves, also at random, but never beside a chunk with their own cluster, as far as there are enough others. As with a random
    order, every sample is visited once, and at the end fewer than B of them not at all. The places within a batch are random, so that any
    part of it, such as a rank's, has some of both halves.

    Args:
        labels: (N,) cluster of each sample in data-set order; any numbers, some of which may be nobody's.
        batch_size: B, at least 2 and at most N.
        generator: of all randomness, on the CPU.

    Example:
        >>> labels = torch.arange(8) // 4
        >>> order = cluster_pair_batches(labels, 4, torch.Generator().manual_seed(0))
        >>> [sorted(batch) for batch in labels[order].view(2, 4).tolist()]
        [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    if not 2 <= batch_size <= len(labels):
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 2 and at most the number of samples (={len(labels)})")
    _, cluster_N = torch.unique(labels.cpu(), return_inverse=True)
    steps, half = len(labels) // batch_size, batch_size // 2
    chunked_N = _chunked(cluster_N, half, generator)
    whole = chunked_N[: len(labels) // half * half].view(-1, half)
    chosen = torch.randperm(len(whole), generator=generator)
    anchors_SH = whole[chosen[:steps]]
    rest = torch.cat((whole[chosen[steps:]].flatten(), chunked_N[whole.numel() :]))
    rest = rest[torch.randperm(len(rest), generator=generator)]
    rest = _kept_apart(rest, cluster_N, anchors_SH, batch_size - half, generator)
    others = rest[: steps * (batch_size - half)].view(steps, -1)
    batches_SB = torch.cat((anchors_SH, others), 1)
    places_SB = torch.rand(steps, batch_size, generator=generator, dtype=torch.float64).argsort(1)
    return batches_SB.gather(1, places_SB).flatten()


def _chunked(cluster_N: Tensor, half: int, generator: torch.Generator) -> Tensor:
    """(N,) all samples: first the chunks of `half` samples of one cluster, then what is left of each, clusters in random order."""
    shuffled_N = torch.randperm(len(cluster_N), generator=generator)
    rank_K = torch.randperm(int(cluster_N.max()) + 1, generator=generator)
    shuffled_N = shuffled_N[rank_K[cluster_N[shuffled_N]].argsort(stable=True)]
    size_K = torch.bincount(rank_K[cluster_N])
    start_K = size_K.cumsum(0) - size_K
    within_N = torch.arange(len(cluster_N)) - start_K.repeat_interleave(size_K)
    left_N = within_N >= (size_K // half * half).repeat_interleave(size_K)
    return torch.cat((shuffled_N[~left_N], shuffled_N[left_N]))


def _kept_apart(rest: Tensor, cluster_N: Tensor, anchors_SH: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """`rest`, of which each `size` belong to a batch and those at the end to none, with samples swapped that share a cluster with the
    anchors of their batch. A swap is made where neither of the two clashes afterwards."""
    number = int(cluster_N.max()) + 1
    steps = len(anchors_SH)
    taken: Tensor = torch.unique(torch.arange(steps).unsqueeze(1) * number + cluster_N[anchors_SH])

    def clashes(samples_M: Tensor, places_M: Tensor) -> Tensor:
        step_M = places_M // size
        key_M = step_M * number + cluster_N[samples_M]
        found_M = torch.searchsorted(taken, key_M).clamp(max=len(taken) - 1)
        return (taken[found_M] == key_M) & (step_M < steps)

    rest = rest.clone()
    wrong = clashes(rest, torch.arange(len(rest))).nonzero().flatten()
    for turn in range(ROUNDS):
        if not len(wrong):
            break
        wrong = wrong[torch.randperm(len(wrong), generator=generator)]
        if turn % 2:  # among themselves
            here, there = wrong[: len(wrong) // 2], wrong[len(wrong) // 2 : len(wrong) // 2 * 2]
        else:  # with anybody else
            there = torch.unique(torch.randint(len(rest), (len(wrong),), generator=generator))
            there = there[~torch.isin(there, wrong)]
            here = wrong[: len(there)]
        free = ~clashes(rest[here], there) & ~clashes(rest[there], here)
        here, there = here[free], there[free]
        rest[here], rest[there] = rest[there], rest[here]
        wrong = wrong[clashes(rest[wrong], wrong)]
    return rest


@torch.no_grad()
def renew(heads: Iterable[nn.Module], seed: int) -> None:
    """Sets all parameters and running statistics of `heads` as their layers' `reset_parameters` would, by `seed` alone.

    In place, so that an optimiser and DDP keep them. Drawn on the CPU whatever the device, and torch's own generator is left where it was.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> renew([one], seed=1), renew([other], seed=1)
        (None, None)
        >>> torch.equal(one.weight, other.weight)
        True
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(draw.get_state())
        for head in heads:
            fresh = copy.deepcopy(head).cpu()
            for layer in fresh.modules():
                if _owns(layer):
                    layer.reset_parameters()  # type: ignore[operator]
            head.load_state_dict(fresh.state_dict())


def require_renewable(*heads: nn.Module) -> None:
    """Refuses heads with parameters that nothing says how to begin."""
    for layer in (layer for head in heads for layer in head.modules()):
        if _owns(layer) and not hasattr(layer, "reset_parameters"):
            raise ValueError(f"`reinitialise` needs heads whose layers have `reset_parameters`, and {type(layer).__name__} has not")


def _owns(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False)) or isinstance(layer, nn.modules.batchnorm._NormBase)


Source = Literal["clusters", "labels"]


class Assigned(nn.Module):
    """Prototypes of all samples at L numbers of them.

    Args:
        num_samples: N.
        num_features: F.
        source: "clusters", made anew at every refresh; "labels": the true ones, of one level, which need none.
        num_clusters: of each level, or of the only one; None: one, with a prototype for every 98 samples.
        labels: (N,) the true ones, −1: unknown; with "labels" only.
        seed, warm_start, iterations, warm_iterations, points_per_cluster: see `ClusterLabels`.

    State: the clusters. True labels are no state: they are given anew.
    """

    truth: Tensor | None
    clusters: ClusterLabels | None
    num_prototypes: tuple[int, ...]

    def __init__(
        self,
        num_samples: int,
        num_features: int,
        source: Source,
        num_clusters: int | tuple[int, ...] | None,
        labels: Tensor | None,
        seed: int,
        warm_start: bool,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        if source not in ("clusters", "labels"):
            raise ValueError(f"`prototypes` (={source!r}) must be 'clusters' or 'labels'")
        if source == "labels" and (labels is None or not (labels >= 0).any()):
            raise ValueError("`prototypes` (='labels') needs labels and the data has none; use 'clusters'")
        self.num_samples, self.clusters = num_samples, None
        self.register_buffer("truth", None, persistent=False)
        if source == "labels":
            assert labels is not None
            self.truth, self.num_prototypes = labels.to(torch.int64), (int(labels.max()) + 1,)
            return
        chosen = max(2, num_samples // 98) if num_clusters is None else num_clusters
        self.clusters = ClusterLabels(
            num_samples,
            num_features,
            chosen,
            seed=seed,
            warm_start=warm_start,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )
        self.num_prototypes = self.clusters.num_clusters

    @property
    def device(self) -> torch.device:
        """Where the prototypes are."""
        return self.truth.device if self.clusters is None and self.truth is not None else next(self.buffers()).device

    @property
    def ready(self) -> bool:
        """Whether there are any."""
        return self.clusters is None or bool(self.clusters.refreshed)

    def refresh(self, features: Tensor | None) -> None:
        """Clusters (N, F) features of all samples, in data-set order, at unit norm; with true labels nothing."""
        if self.clusters is not None:
            assert features is not None
            self.clusters.refresh(F.normalize(features, dim=1))

    def levels(self, ids: Tensor) -> Tensor:
        """(L, A) prototypes of these samples; −1: none, or none yet."""
        if self.truth is not None:
            return self.truth[ids].unsqueeze(0)
        assert self.clusters is not None
        return self.clusters.labels[:, ids] if self.ready else torch.full_like(ids, -1).expand(len(self.clusters.labels), -1)

    def first(self, ids: Tensor) -> Tensor:
        """(A,) prototypes of these samples at the first level; one that has none is its own."""
        first_A = self.levels(ids)[0]
        return first_A.where(first_A >= 0, -1 - ids)


Head = Literal["contrast", "metric", "prototype"]


class SPCL(Framework):
    """NT-Xent on batches that are half of one prototype, a siamese loss on prototypes, and a classifier of them; all anew every epoch.

        loss = α · NT-Xent(g_c(h)) + β · metric(g_m, h) + γ · cross-entropy(g_p(h))

    Prototypes are k-means clusters of the encoder's features h of all samples, at unit norm, made anew before every epoch. Eq. 1: the
    denominator of NT-Xent holds neither z nor z′. Metric: see `SiameseMetric`; prototype: see `PrototypeCrossEntropy`; batches: see
    `cluster_pair_batches`. Before there are prototypes, NT-Xent is alone, on random batches. Detector and action concern NT-Xent alone.
    With β = γ = 0 and `positive_in_denominator` it is SimCLR on batches by cluster.

    Args:
        encoder, head: f and g_c; see `Framework`.
        num_samples: N.
        num_clusters: K; of several, the prototype losses of all are averaged, batches and pairs go by the first. None: one for every 98
            samples, the paper's proportion for CIFAR.
        contrast_weight, metric_weight, prototype_weight: α, β, γ; 0: that loss and the training of its head are left out.
        warmup_epochs: before the first prototypes; the paper has none.
        prototypes: "clusters", or "labels": the true ones in their place (the paper's Table 2, for comparison).
        labels: (N,) of the samples, −1: unknown; with "labels" only.
        reinitialise: which heads begin anew at every refresh, as algorithm 1 has it.
        every: epochs between two refreshes.
        reverse_weight, log_zero: symmetric cross-entropy for noisy prototypes; see `prototype_cross_entropy`.
        warm_start, cluster_seed, iterations, warm_iterations, points_per_cluster: of k-means; see `ClusterLabels`.
        temperature, detector, action, min_negatives, kin_weight, block_rows, positive_in_denominator: see `NTXent`.

    State: the clusters, the heads, `seed` (drawn from torch's generator when it is made), the number of `draws` of pairs, and whether
    the prototypes have `begun`.

    Deviates from the paper in: losses are means where the equations have sums, in the same proportion to each other; features are
    clustered without augmentation and at unit norm; a batch of 2N goes by several prototypes where one has fewer than N samples.
    """

    on_host = ("seed", "draws", "begun")
    paper: ClassVar[str] = "Mo et al., 2022"
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        num_clusters: int | tuple[int, ...] | None = None,
        contrast_weight: float = 1.0,
        metric_weight: float = 1.0,
        prototype_weight: float = 1.0,
        warmup_epochs: int = 0,
        prototypes: Source = "clusters",
        labels: Tensor | None = None,
        reinitialise: tuple[Head, ...] = ("contrast", "metric", "prototype"),
        every: int = 1,
        reverse_weight: float = 0.0,
        log_zero: float = -4.0,
        warm_start: bool = True,
        cluster_seed: int = 0,
        temperature: float = 0.5,
        positive_in_denominator: bool = False,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
        **shared: Unpack[Shared],
    ) -> None:
        objective = NTXent(temperature, positive_in_denominator, **shared)
        super().__init__(encoder, head, objective)
        self.weights = {"contrast_weight": contrast_weight, "metric_weight": metric_weight, "prototype_weight": prototype_weight}
        _check(self.weights, reinitialise, warmup_epochs, every)
        self.warmup_epochs, self.every, self.reinitialise, self.epoch, self._told = warmup_epochs, every, reinitialise, 0, False
        size = embedding_size(encoder, nn.Identity())
        self.assigned = Assigned(
            num_samples,
            size,
            prototypes,
            num_clusters,
            labels,
            cluster_seed,
            warm_start,
            iterations,
            warm_iterations,
            points_per_cluster,
        )
        if not contrast_weight:
            head.requires_grad_(False)  # it is looked through for the measures alone; an optimiser and DDP must not wait for its gradient
        self.metric = SiameseMetric(projection_head(size, size, 1, norm=False)) if metric_weight else None
        self.prototype = PrototypeCrossEntropy(size, self.assigned.num_prototypes, reverse_weight, log_zero) if prototype_weight else None
        require_renewable(*self._renewed())
        self.seed: Tensor
        self.draws: Tensor
        self.begun: Tensor
        self.register_buffer("seed", torch.randint(1 << 62, ()))
        self.register_buffer("draws", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(not warmup_epochs))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        h: Tensor = self.encoder(views.flatten(0, 1))
        z1, z2 = self.head(h).chunk(2)
        contrast, metric, prototype = self.weights.values()
        begun = float(self._with_prototypes)  # a factor, as DDP waits for a gradient of every head in every step
        loss = contrast * self.objective(z1, z2, ids) if contrast else 0 * self._measure(z1, z2, ids)
        h_AF = h.view(len(views), len(ids), -1).transpose(0, 1).flatten(0, 1)
        if self.metric is not None:
            (everybody,) = distributed.joined(ids)
            draw = torch.Generator().manual_seed(int(self.seed) ^ int(self.draws))  # the same on all ranks and on resume
            loss = loss + begun * metric * self.metric(h_AF, self.assigned.first(everybody), draw)
            if self.training:
                self.draws.add_(1)
        if self.prototype is not None:
            loss = loss + begun * prototype * self.prototype(h_AF, self.assigned.levels(ids.repeat_interleave(len(views))))
        return loss

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        if not self._with_prototypes:
            return None
        everybody = torch.arange(self.assigned.num_samples, device=self.assigned.device)
        return cluster_pair_batches(self.assigned.first(everybody), batch_size, generator)

    @property
    def space(self) -> Space:
        return "features"

    @property
    def collects(self) -> bool:
        """With the labels for prototypes, features are needed only where a detector asks for them."""
        return self.assigned.clusters is None and all(each.collects or not each.due(self.epoch) for each in self.detectors)

    @property
    def renewed(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for head in self._renewed() for parameter in head.parameters()) if self._own_turn(self.epoch) else ()

    def due(self, epoch: int) -> bool:
        return self._own_turn(epoch) or super().due(epoch)

    def refresh(self, features: Tensor | None, progress: float) -> None:
        """Detectors that go by embeddings have those of g_c as it was trained, before it begins anew."""
        for detector in self.detectors:
            if detector.due(self.epoch):
                detector.refresh(self._seen_by(detector, features), progress)
        if not self._own_turn(self.epoch):
            return
        self.assigned.refresh(features)
        self.begun.fill_(True)
        renew(self._renewed(), int(self.seed) ^ 0x9E3779B1 * (self.epoch + 1))  # torch's generator goes by the lower 32 bits alone

    def finish(self, features: Tensor | None) -> None:
        for detector in self.detectors:
            if detector.refreshed_at_end:
                detector.refresh(self._seen_by(detector, features), 1.0)

    def _seen_by(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        """(N, F or D) what a detector is refreshed with: the encoder's features, their embeddings, or nothing where it collects its own."""
        if detector.collects or features is None:
            return None
        return features if detector.space == "features" else embeddings(self.head, features)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self._told = self._told or warn_if_warmup_too_long(self.warmup_epochs, num_epochs, "prototypes")
        self.epoch = epoch

    @property
    def _with_prototypes(self) -> bool:
        """Whether they have a say yet; of the state alone, as the order of an epoch is asked for before anybody says which it is."""
        return bool(self.begun) and self.assigned.ready

    def _own_turn(self, epoch: int) -> bool:
        since = epoch - self.warmup_epochs
        anew = self.assigned.clusters is not None or bool(self._renewed())
        return (since >= 0 and since % self.every == 0 and anew) or (since == 0 < epoch)

    def _renewed(self) -> list[nn.Module]:
        """The heads that a refresh sets anew."""
        heads = {"contrast": self.head, "metric": self.metric, "prototype": self.prototype}
        return [head for name, head in heads.items() if name in self.reinitialise and head is not None]

    @torch.no_grad()
    def _measure(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        """For the counts and the detector alone."""
        loss: Tensor = self.objective(z1, z2, ids)
        return loss.nan_to_num(0, 0, 0)


def _check(weights: dict[str, float], reinitialise: tuple[Head, ...], warmup_epochs: int, every: int) -> None:
    for name, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"`{name}` (={weight}) must not be negative")
    if not any(weights.values()):
        raise ValueError(f"one of {', '.join(f'`{name}`' for name in weights)} must be above 0")
    for head in reinitialise:
        if head not in ("contrast", "metric", "prototype"):
            raise ValueError(f"`reinitialise` (={head!r}) must hold 'contrast', 'metric' or 'prototype'")
    if warmup_epochs < 0:
        raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be at least 0")
    if warmup_epochs and not weights["contrast_weight"]:
        raise ValueError(f"`warmup_epochs` (={warmup_epochs}) must be 0 where `contrast_weight` is: there would be no loss before")
    if every < 1:
        raise ValueError(f"`every` (={every}) must be at least 1")
