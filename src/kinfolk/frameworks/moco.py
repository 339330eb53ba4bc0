"""MoCo, MoCo v3, and the momentum encoder and queue that several frameworks share.

- MoCo: He et al., CVPR 2020, equations 1 and 2, in the form of its second version (Chen et al.,
  2020).
- MoCo v3: Chen, Xie, He, ICCV 2021, equation 1 and algorithm 1.
- Momentum that rises to 1: Grill et al. (BYOL), NeurIPS 2020, section 3.3.

Dimension key: B batch, D embedding.
"""

from __future__ import annotations

import copy
import math
from abc import ABC
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.detectors import Teacher
from kinfolk.detectors.base import Detector
from kinfolk.errors import require, require_at_least, require_choice, warn
from kinfolk.frameworks.base import Framework
from kinfolk.models.heads import embedding_size, projection_head
from kinfolk.objectives import NTXentLoss, Objective
from kinfolk.pairs import Pairs, integer_ids, unit
from kinfolk.stats import Stats
from kinfolk.stores import Queue
from kinfolk.stores.per_sample import check_num_samples, finite

MomentumSchedule = Literal["constant", "cosine"]
ClusterEncoder = Literal["query", "momentum"]


class MomentumCopy(nn.Module):
    """A copy of encoder and head that follows them: θ′ ← m·θ′ + (1 − m)·θ after every optimiser
    step. Its buffers do not follow, as in the published code.

    Args:
        momentum: m in [0, 1).
        schedule: "constant", or "cosine": in epoch e of E, 1 − (1 − m) (1 + cos(π e / E)) / 2 (BYOL
            updates it in every step).
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        momentum: float,
        schedule: MomentumSchedule = "constant",
    ) -> None:
        super().__init__()
        must = "in [0, 1); at 1 the copy would never change"
        require(0 <= momentum < 1, "momentum", momentum, must)
        require_choice("momentum_schedule", schedule, get_args(MomentumSchedule))
        self.base_momentum = self.momentum = momentum
        self.schedule = schedule
        self.encoder, self.head = copy.deepcopy(encoder), copy.deepcopy(head)
        self.requires_grad_(False)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        if self.schedule == "cosine":
            falling = (1 + math.cos(math.pi * epoch / num_epochs)) / 2
            self.momentum = 1 - (1 - self.base_momentum) * falling

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.head(self.encoder(images))
        return embedded

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder(images)
        return features

    def embed(self, images: Tensor) -> Tensor:
        return F.normalize(self(images), dim=-1)

    @torch.no_grad()
    def follow(self, encoder: nn.Module, head: nn.Module) -> None:
        fast = [param.detach() for part in (encoder, head) for param in part.parameters()]
        slow = [param.detach() for part in (self.encoder, self.head) for param in part.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - self.momentum)


class MomentumFramework(Framework, ABC):
    """Abstract. A framework with a `MomentumCopy` and, after `add_queue`, a queue of its keys, used
    as it was before the step, or of the batch while it is empty. It has sample ids, so that an old
    key of the anchor's sample is no negative."""

    slow: MomentumCopy
    queue: Queue

    def add_queue(
        self, num_samples: int, queue_size: int, momentum: float, schedule: MomentumSchedule
    ) -> None:
        require_at_least(1, queue_size=queue_size)
        check_num_samples(num_samples)
        if queue_size >= num_samples:
            warn(
                f"`queue_size` (={queue_size}) is not smaller than the data set (={num_samples}"
                " samples), so the queue contains several keys of one sample, each a separate"
                " negative; choose a smaller queue"
            )
        self.slow = MomentumCopy(self.encoder, self.head, momentum, schedule)
        self.queue = Queue(queue_size, embedding_size(self.encoder, self.head))

    def make_keys(self, images: Tensor) -> Tensor:
        """(B, D) unit-norm keys."""
        return F.normalize(self.slow(images).to(self.queue.features.dtype), dim=1)

    def push(self, keys: Tensor, ids: Tensor, loss: Tensor) -> Tensor:
        """Adds the keys if the loss is finite, and returns whether it is."""
        is_finite = finite(loss)
        self.queue.push(keys, ids, is_finite)
        return is_finite

    def after_step(self) -> None:
        for copied in self._copies:
            copied.follow(self.encoder, self.head)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        for copied in self._copies:
            copied.set_progress(int(epoch), num_epochs)

    @property
    def _copies(self) -> list[MomentumCopy]:
        return [part for part in self.children() if isinstance(part, MomentumCopy)]


def both_orders(views: Tensor) -> tuple[Tensor, Tensor]:
    """(2B, …) both views of each sample in turn, and the other view of each row."""
    return views[:2].transpose(0, 1).flatten(0, 1), views[:2].flip(0).transpose(0, 1).flatten(0, 1)


class MoCo(MomentumFramework):
    """Contrasts the query of the first view with a queue of keys of a momentum encoder.

        loss_i = −q_i·k_i / t + log( exp(q_i·k_i / t) + Σ_{j in queue, not of sample i} w_ij
        exp(q_i·k_j / t) )

    k_i is the key of the second view.
    """

    paper: ClassVar[str] = "He et al., CVPR 2020; Chen et al., 2020"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "queue smaller than the data"
    guides: ClassVar[frozenset[str]] = frozenset({"teacher"})

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        num_samples: int,
        queue_size: int = 65536,
        momentum: float = 0.999,
        temperature: float = 0.2,
        symmetric: bool = False,
        cluster_encoder: ClusterEncoder = "query",
        momentum_schedule: MomentumSchedule = "constant",
        **given: Any,
    ) -> None:
        super().__init__(encoder, head, NTXentLoss(temperature=temperature, **given))
        require_choice("cluster_encoder", cluster_encoder, get_args(ClusterEncoder))
        self.symmetric, self.cluster_encoder = symmetric, cluster_encoder
        self.has_teacher = keys_are_teacher(self.objective, symmetric)
        if self.has_teacher:
            self.weak_views = (1,)
        self.add_queue(num_samples, queue_size, momentum, momentum_schedule)

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids, number = integer_ids(ids, views.device), 2 if self.symmetric else 1
        first, second = both_orders(views) if self.symmetric else (views[0], views[1])
        queries: Tensor = self.head(self.encoder(first))
        keys, row_ids = self.make_keys(second), ids.repeat_interleave(number)
        candidates, candidate_ids = self.queue.candidates(keys, row_ids)
        pairs = Pairs(
            unit(queries), candidates, keys.unsqueeze(1), ids, candidate_ids, number, unit=True
        )
        if self.has_teacher:
            pairs = replace(pairs, guide=keys, candidate_guide=candidates)
        loss = self.objective.on(pairs)
        if self.training:
            self.push(keys, row_ids, loss)
        return loss

    @property
    def refresh_model(self) -> nn.Module:
        return self if self.cluster_encoder == "query" else self.slow


def keys_are_teacher(objective: Objective, symmetric: bool = False) -> bool:
    taught = objective.detector is not None and objective.detector.guide == "teacher"
    if taught and symmetric:
        raise ValueError("`symmetric` (=True) must be False with a teacher, which sees a weak view")
    if taught and getattr(teacher_of(objective.detector), "momentum", None) is not None:
        raise ValueError("`detector.momentum` must be left out: it is `framework.momentum`")
    return taught


def teacher_of(detector: Detector | None) -> Teacher | None:
    """The teacher, if the detector is one in any wrappers."""
    inner = None if detector is None else detector.inner
    return inner if isinstance(inner, Teacher) else None


class MoCoV3(MomentumFramework):
    """Contrasts the prediction of each view with the other views' keys of a momentum encoder.

        loss = ½ Σ_{(a, b) = (1, 2), (2, 1)} mean_i ( −q_i^a·k_i^b / t + log( exp(q_i^a·k_i^b / t) +
        Σ_{j ≠ i} w_ij exp(q_i^a·k_j^b / t) ) )

    q^a is the prediction of view a, k^b the key of view b; j runs over the samples of all ranks.
    """

    paper: ClassVar[str] = "Chen et al., ICCV 2021"
    loss_kind = NTXentLoss
    needs: ClassVar[str] = "large batches"
    guides: ClassVar[frozenset[str]] = frozenset({"teacher"})

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        momentum: float = 0.99,
        momentum_schedule: MomentumSchedule = "cosine",
        predictor_size: int = 4096,
        temperature: float = 0.2,
        **given: Any,
    ) -> None:
        super().__init__(encoder, head, NTXentLoss(temperature=temperature, **given))
        size = embedding_size(encoder, head)
        self.predictor = projection_head(
            size, predictor_size, size, last_norm=True, last_affine=False
        )
        self.slow = MomentumCopy(encoder, head, momentum, momentum_schedule)
        self._stats = Stats.empty()
        self.has_teacher = keys_are_teacher(self.objective)

    @property
    def stats(self) -> Stats:
        return self._stats

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids, images = integer_ids(ids, views.device), views.flatten(0, 1)
        queries = self.predictor(self.head(self.encoder(images))).chunk(2)
        keys = unit(self.slow(images)).chunk(2)
        losses, stats = [], Stats.empty(ids.device)
        for query, key in zip(queries, reversed(keys), strict=True):
            pairs = Pairs(
                *(unit(query), key, key.unsqueeze(1), ids, ids),
                unit=True,
                local_candidates=True,
                collected=key,
            )
            if self.has_teacher:
                pairs = replace(pairs, guide=key, candidate_guide=key)
            losses.append(self.objective.on(pairs))
            stats = stats + self.objective.stats
        self._stats = stats  # at once: another thread may read it
        return torch.stack(losses).mean()

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings of the momentum encoder, which makes the candidates."""
        return self.slow.embed(images)
