"""SPCL: Mo, Sun and Li, 2022, algorithm 1 and equations 1 to 5.

Dimension key: V views, B batch, A rows of features (A = B·V, sample-major), F features, N data set,
K prototypes, L levels, S batches of an epoch, H anchors of a batch (half of it), M samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.clustering import PseudoLabels
from kinfolk.detectors.base import Detector, Space
from kinfolk.errors import UsageError, require, require_at_least, require_choice
from kinfolk.frameworks.base import ClusteringFramework
from kinfolk.models.heads import embedding_size, embeddings, projection_head
from kinfolk.objectives import NTXentLoss
from kinfolk.objectives.prototypes import PrototypeCrossEntropy
from kinfolk.objectives.siamese import SiameseMetric, draw_partners
from kinfolk.pairs import integer_ids
from kinfolk.seeding import step_generator
from kinfolk.stats import Stats
from kinfolk.stores.memory_bank import distinct
from kinfolk.stores.per_sample import check_ids, check_num_samples

Source = Literal["clusters", "labels"]
Batches = Literal["chunks", "one_prototype"]
Head = Literal["contrast", "metric", "prototype"]


class PrototypeLabels(nn.Module):
    """The prototype of every sample at L levels: a k-means cluster of its features, reduced to the
    size `whiten`, or its true label (section 3.2)."""

    truth: Tensor | None

    def __init__(
        self, clusters: PseudoLabels | None, truth: Tensor | None, whiten: int | None
    ) -> None:
        super().__init__()
        self.clusters, self.whiten = clusters, whiten
        self.register_buffer("truth", truth, persistent=False)

    @property
    def num_prototypes(self) -> tuple[int, ...]:
        if self.clusters is not None:
            return self.clusters.num_clusters
        assert self.truth is not None
        return (int(self.truth.max()) + 1,)

    @property
    def ready(self) -> bool:
        return self.clusters is None or bool(self.clusters.refreshed)

    def refresh(self, features: Tensor | None) -> None:
        if self.clusters is not None:
            assert features is not None
            used = features if self.whiten is None else pca_whiten(features, self.whiten)
            self.clusters.refresh(F.normalize(used, dim=1))

    def levels(self, ids: Tensor) -> Tensor:
        """(L, A) prototypes, −1 where there is none (yet)."""
        if self.clusters is not None:
            return self.clusters.of(ids)
        assert self.truth is not None
        return self.truth[ids].unsqueeze(0)

    def first(self, ids: Tensor) -> Tensor:
        """(A,) prototypes at the first level, or a distinct negative number for a sample without
        one."""
        first_A = self.levels(ids)[0]
        return first_A.where(first_A >= 0, -1 - ids)


class SPCL(ClusteringFramework):
    """NT-Xent on batches that are half of one prototype, a siamese loss on prototypes, and a
    classifier of prototypes.

        loss = α · NT-Xent(g_c(h)) + β · metric(g_m, h) + γ · cross-entropy(g_p(h))

    Prototypes are k-means clusters of the unit-norm features h. Detector and action apply to
    NT-Xent, which is the loss, on random batches, before the first prototypes.
    """

    on_host = ("seed", "draws", "begun")
    seed: Tensor
    draws: Tensor
    begun: Tensor
    paper: ClassVar[str] = "Mo et al., 2022"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "an embedding pass and a clustering per epoch"
    clusters_are: ClassVar[str] = "prototypes"

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
        temperature: float = 0.5,
        decoupled: bool = True,
        whiten: int | None = None,
        contrast_apart: bool = False,
        batch_mode: Batches = "chunks",
        **given: Any,
    ) -> None:
        objective = NTXentLoss(temperature=temperature, decoupled=decoupled, **given)
        super().__init__(encoder, head, objective)
        self.weights = {
            "contrast_weight": contrast_weight,
            "metric_weight": metric_weight,
            "prototype_weight": prototype_weight,
        }
        check_num_samples(num_samples)
        self.set_schedule(warmup_epochs, every)
        require_at_least(0, **self.weights)
        if not any(self.weights.values()):
            raise ValueError(f"one of {', '.join(self.weights)} must be above 0")
        for each in reinitialise:
            require_choice("reinitialise", each, get_args(Head))
        alone = "0 if `contrast_weight` is 0, because there would be no loss before"
        require(not warmup_epochs or contrast_weight > 0, "warmup_epochs", warmup_epochs, alone)
        require_choice("prototypes", prototypes, get_args(Source))
        require_choice("batch_mode", batch_mode, get_args(Batches))
        require_at_least(1, whiten=whiten)
        self.num_samples, self.reinitialise = num_samples, reinitialise
        self.contrast_apart, self.batch_mode = contrast_apart, batch_mode
        self._stats: Stats | None = None
        size = embedding_size(encoder, nn.Identity())
        truth, clusters = None, None
        if prototypes == "labels":
            if labels is None or not (labels >= 0).any():
                raise ValueError("`prototypes` (='labels') needs labels and the data has none")
            truth = labels.to(torch.int64)
        else:
            clusters = PseudoLabels(
                num_samples,
                max(2, num_samples // 98) if num_clusters is None else num_clusters,
                seed=0,
                warm_start=whiten is None,  # the axes of two whitenings differ
            )
        self.assigned = PrototypeLabels(clusters, truth, whiten)
        if not contrast_weight:
            # used only for metrics, so the optimiser and DDP must not expect a gradient
            head.requires_grad_(False)
        self.metric = self.prototype = None
        if metric_weight:
            self.metric = SiameseMetric(projection_head(size, size, 1, norm=False))
        if prototype_weight:
            numbers = self.assigned.num_prototypes
            self.prototype = PrototypeCrossEntropy(size, numbers, reverse_weight, log_zero)
        require_resettable(*self._heads_to_reset())
        self.register_buffer("seed", torch.randint(1 << 62, ()))
        self.register_buffer("draws", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(not warmup_epochs))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        check_ids(ids, self.num_samples)
        h: Tensor = self.encoder(views.flatten(0, 1))
        z1, z2 = self.head(h).chunk(2)
        contrast, metric, prototype = self.weights.values()
        # a factor, because DDP expects a gradient of every head in every step
        begun = float(self._with_prototypes)
        if contrast:
            loss = contrast * self._contrast(z1, z2, ids)
        else:
            with torch.no_grad():  # only for the counts and the detector
                loss = 0 * self.objective(z1, z2, ids).nan_to_num(0, 0, 0)
        h_AF = h.view(len(views), len(ids), -1).transpose(0, 1).flatten(0, 1)
        if self.metric is not None:
            (all_ids,) = distributed.gather_all(ids)
            # equal on all ranks and after a resume
            draw = step_generator(int(self.seed), int(self.draws))
            loss = loss + begun * metric * self.metric(h_AF, self.assigned.first(all_ids), draw)
            if self.training:
                self.draws.add_(1)
        if self.prototype is not None:
            levels_LA = self.assigned.levels(ids.repeat_interleave(len(views)))
            loss = loss + begun * prototype * self.prototype(h_AF, levels_LA)
        return loss

    def batches(self, generator: torch.Generator, batch_size: int) -> Tensor | None:
        if not self._with_prototypes:
            return None
        all_ids = torch.arange(self.num_samples, device=next(self.assigned.buffers()).device)
        compose = cluster_pair_batches if self.batch_mode == "chunks" else one_prototype_batches
        return compose(self.assigned.first(all_ids), batch_size, generator)

    @property
    def stats(self) -> Stats:
        return super().stats if self._stats is None else self._stats

    def _contrast(self, z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        """NT-Xent of the batch, or of its halves (`contrast_apart`), weighted by their sizes."""
        self._stats = None
        if not self.contrast_apart or not self._with_prototypes:
            whole: Tensor = self.objective(z1, z2, ids)
            return whole
        if distributed.world_size() > 1:
            raise UsageError("`contrast_apart` (=True) is for one process")
        anchors_B = draw_partners(self.assigned.first(ids), 1, torch.Generator()).anchors_A
        losses, stats = [], Stats.empty(ids.device)
        for half_B in (anchors_B, ~anchors_B):
            some = half_B.nonzero().flatten()
            if len(some) > 1:  # a sample alone has no negatives
                losses.append(len(some) / len(ids) * self.objective(z1[some], z2[some], ids[some]))
                stats = stats + self.objective.stats
        self._stats = stats
        return torch.stack(losses).sum()

    @property
    def space(self) -> Space:
        return "features"

    @property
    def collects(self) -> bool:
        return self.assigned.clusters is None and all(
            each.collects or not each.due(self.epoch) for each in self.detectors
        )

    @property
    def reinitialised(self) -> tuple[nn.Parameter, ...]:
        if not self.clusters_in(self.epoch):
            return ()
        return tuple(p for head in self._heads_to_reset() for p in head.parameters())

    def clusters_in(self, epoch: int) -> bool:
        first = self.warmup_epochs == epoch > 0  # true labels begin then too
        changes = self.assigned.clusters is not None or bool(self._heads_to_reset())
        return first or (super().clusters_in(epoch) and changes)

    def cluster(self, features: Tensor | None, progress: float) -> None:
        self.assigned.refresh(features)
        self.begun.fill_(True)
        # torch's generator uses only the lower 32 bits
        reinitialise(self._heads_to_reset(), int(self.seed) ^ 0x9E3779B1 * (self.epoch + 1))

    def features_for(self, detector: Detector, features: Tensor | None) -> Tensor | None:
        # a detector that uses embeddings receives those of g_c before it is reset
        given = super().features_for(detector, features)
        if given is None or detector.space == "features":
            return given
        return embeddings(self.head, given)

    @property
    def _with_prototypes(self) -> bool:
        """Depends on the state alone, because `batches` is called before `set_progress`."""
        return bool(self.begun) and self.assigned.ready

    def _heads_to_reset(self) -> list[nn.Module]:
        heads = {"contrast": self.head, "metric": self.metric, "prototype": self.prototype}
        chosen = (heads[name] for name in heads if name in self.reinitialise)
        return [head for head in chosen if head is not None]


# Batches

ROUNDS = 50  # of swapping samples between batches, at most; realistic data needs only a few


def cluster_pair_batches(labels: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """(S·B,) samples of an epoch, each at most once. Every batch is half of one cluster.

    Clusters, and then their joined remainders, are cut into chunks of half a batch, of which S
    random ones are the anchors of the batches. Other samples, if possible of other clusters, fill
    the batches at random. The order within a batch is random, so that each rank has samples of both
    halves.
    """
    _check_batch_size(labels, batch_size)
    _, cluster_N = torch.unique(labels.cpu(), return_inverse=True)
    steps, half = len(labels) // batch_size, batch_size // 2
    chunked_N = _order_by_chunks(cluster_N, half, generator)
    whole = chunked_N[: len(labels) // half * half].view(-1, half)
    chosen = torch.randperm(len(whole), generator=generator)
    anchors_SH = whole[chosen[:steps]]
    rest = torch.cat((whole[chosen[steps:]].flatten(), chunked_N[whole.numel() :]))
    rest = rest[torch.randperm(len(rest), generator=generator)]
    rest = _separate(rest, cluster_N, anchors_SH, batch_size - half, generator)
    others = rest[: steps * (batch_size - half)].view(steps, -1)
    batches_SB = torch.cat((anchors_SH, others), 1)
    places_SB = torch.rand(steps, batch_size, generator=generator, dtype=torch.float64).argsort(1)
    return batches_SB.gather(1, places_SB).flatten()


def one_prototype_batches(labels: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """(S·B,) samples of an epoch, batch after batch. Every batch is half of exactly one cluster,
    and half of samples of the others (section 3.2 to the letter).

    Of a cluster with fewer samples, some are repeated, so an epoch repeats samples and leaves
    others out. A sample with a label below 0 is never in the first half.
    """
    _check_batch_size(labels, batch_size)
    label_K, cluster_N, size_K = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    steps, half = len(labels) // batch_size, batch_size // 2
    anchors = (label_K >= 0).nonzero().flatten()
    if len(size_K) < 2 or not len(anchors):
        return torch.randperm(len(labels), generator=generator)[: steps * batch_size]
    by_cluster_N, start_K = cluster_N.argsort(stable=True), size_K.cumsum(0) - size_K
    batches = []
    for draw in torch.randint(len(anchors), (steps,), generator=generator).tolist():
        start, size = int(start_K[anchors[draw]]), int(size_K[anchors[draw]])
        others = _in_turns(len(labels) - size, batch_size - half, generator)
        others += size * (others >= start)
        places = torch.cat((start + _in_turns(size, half, generator), others))
        batches.append(by_cluster_N[places[torch.randperm(batch_size, generator=generator)]])
    return torch.cat(batches)


def _in_turns(size: int, number: int, generator: torch.Generator) -> Tensor:
    """(number,) random numbers in [0, size), each repeated only after all of them were drawn."""
    turns = [torch.randperm(size, generator=generator) for _ in range(number // size)]
    return torch.cat((*turns, distinct(size, number % size, generator)))


def _check_batch_size(labels: Tensor, batch_size: int) -> None:
    must = f"at least 2 and at most the number of samples (={len(labels)})"
    require(2 <= batch_size <= len(labels), "batch_size", batch_size, must)


@torch.no_grad()
def pca_whiten(features: Tensor, size: int) -> Tensor:
    """(N, min(size, F)) projections of (N, F) features on principal axes, scaled to variance 1."""
    centred = features.double() - features.double().mean(0)
    variance_F, axes_FF = torch.linalg.eigh(centred.T @ centred / len(centred))
    variance_P, axes_FP = variance_F.flip(0)[:size], axes_FF.flip(1)[:, :size]
    kept_P = variance_P > variance_F[-1] * 1e-9
    scale_P = torch.where(kept_P, variance_P.clamp(min=1e-300).rsqrt(), 0.0)
    white_NP: Tensor = centred @ axes_FP * scale_P
    return white_NP.to(features.dtype)


def _order_by_chunks(cluster_N: Tensor, half: int, generator: torch.Generator) -> Tensor:
    """(N,) first the chunks of `half` samples of one cluster, then the remainders."""
    shuffled_N = torch.randperm(len(cluster_N), generator=generator)
    rank_K = torch.randperm(int(cluster_N.max()) + 1, generator=generator)
    shuffled_N = shuffled_N[rank_K[cluster_N[shuffled_N]].argsort(stable=True)]
    size_K = torch.bincount(rank_K[cluster_N])
    start_K = size_K.cumsum(0) - size_K
    within_N = torch.arange(len(cluster_N)) - start_K.repeat_interleave(size_K)
    left_N = within_N >= (size_K // half * half).repeat_interleave(size_K)
    return torch.cat((shuffled_N[~left_N], shuffled_N[left_N]))


def _separate(
    rest: Tensor, cluster_N: Tensor, anchors_SH: Tensor, size: int, generator: torch.Generator
) -> Tensor:
    """Swaps samples of `rest` that share a cluster with the anchors of their batch, which are
    `size` samples each."""
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
        if turn % 2:  # with each other
            here, there = wrong[: len(wrong) // 2], wrong[len(wrong) // 2 : len(wrong) // 2 * 2]
        else:  # with any other sample
            there = torch.unique(torch.randint(len(rest), (len(wrong),), generator=generator))
            there = there[~torch.isin(there, wrong)]
            here = wrong[: len(there)]
        free = ~clashes(rest[here], there) & ~clashes(rest[there], here)
        here, there = here[free], there[free]
        rest[here], rest[there] = rest[there], rest[here]
        wrong = wrong[clashes(rest[wrong], wrong)]
    return rest


@torch.no_grad()
def reinitialise(heads: Iterable[nn.Module], seed: int) -> None:
    """Resets the heads, depending only on `seed`; in place, so that the optimiser and DDP keep the
    parameters."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(draw.get_state())
        for head in heads:
            fresh = copy.deepcopy(head).cpu()
            for layer in fresh.modules():
                if hasattr(layer, "reset_parameters"):
                    layer.reset_parameters()  # type: ignore[operator]
            head.load_state_dict(fresh.state_dict())


def require_resettable(*heads: nn.Module) -> None:
    for layer in (layer for head in heads for layer in head.modules()):
        if list(layer.parameters(recurse=False)) and not hasattr(layer, "reset_parameters"):
            what = f"layers with `reset_parameters`, which {type(layer).__name__} does not have"
            raise ValueError(f"`reinitialise` needs {what}")
