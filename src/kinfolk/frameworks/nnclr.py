"""NNCLR, and the base that it shares with RCL.

- The base has a momentum encoder, predictors, and a support queue from which the keys of an anchor
  are retrieved: Tang et al., Relative Contrastive Loss for Unsupervised Representation Learning,
  ECCV 2022, Figure 2. An entry of the anchor's own sample is never retrieved.
- NNCLR: Dwibedi et al., With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning
  of Visual Representations, ICCV 2021, equations 1 to 4, in the form of Tang et al.: RCL with one
  criterion and the nearest neighbour as the key.

Dimension key: V views (2), B batch, A = B·V rows, sample-major, D embedding, H criteria, P
predictors (1 or H), K keys, S support queue, N data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.errors import warn_if_queue_too_large
from kinfolk.frameworks.moco import MomentumCopy, MomentumFramework, MomentumSchedule
from kinfolk.models.heads import embedding_size, prediction_head
from kinfolk.objectives import RelativeContrastLoss
from kinfolk.objectives.base import Shared
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Queue
from kinfolk.stores.per_sample import StepRandom, check_num_samples, finite, sent, skips

_BLOCK_ELEMENTS = 1 << 22


class RowRandom(StepRandom):
    """A random number in [0, 1) for each row of a step. It depends only on seed, step and position
    of the row in the joined batch, so it is the same for any number of ranks."""

    def rows(self, number: int, device: torch.device) -> Tensor:
        """(number,) random numbers of the rows of this rank. Does not change the state."""
        first, total = 0, number
        if distributed.world_size() > 1:
            sizes = distributed.batch_sizes(number, device)
            first, total = sum(sizes[: dist.get_rank()]), sum(sizes)
        return sent(
            torch.rand(total, generator=self.generator(), dtype=torch.float64)[
                first : first + number
            ],
            device,
        )


def cluster_mates(
    labels: Tensor,
    ids: Tensor,
    support_labels: Tensor,
    support_ids: Tensor,
    number: int,
    random: Tensor,
    num_samples: int,
) -> Tensor:
    """(A, K) places of entries in the anchor's cluster, each at most once. −1 fills up if there are
    fewer than K.

    The entries of the cluster are arranged in a circle and K evenly spaced ones are taken, starting
    at a random one. All are equally likely.

    Args:
        labels, ids: (A,) cluster and sample of each anchor, both in [0, N).
        support_labels, support_ids: (S,) cluster and sample of each entry.
        number: K.
        random: (A,) random numbers in [0, 1).
        num_samples: N.

    Example:
        >>> one, two = torch.tensor([5]), torch.tensor([5, 5, 6, 5])
        >>> ids = torch.tensor([0, 1, 2, 3])
        >>> cluster_mates(one, torch.tensor([0]), two, ids, 3, torch.zeros(1), 9)
        tensor([[ 1,  3, -1]])
    """
    # sorted by cluster, then by sample
    names_S, order_S = (support_labels * num_samples + support_ids).sort(stable=True)
    start_A = labels * num_samples
    first_A, own_A, after_A, end_A = (
        torch.searchsorted(names_S, name, right=right)
        for name, right in (
            (start_A, False),
            (start_A + ids, False),
            (start_A + ids, True),
            (start_A + num_samples, False),
        )
    )
    count_A = (own_A - first_A) + (end_A - after_A)
    step_A1 = (count_A // number).clamp(min=1).unsqueeze(1)
    turn_K = torch.arange(number, device=ids.device)
    within_AK = ((random * count_A).long().unsqueeze(1) + turn_K * step_A1) % count_A.clamp(
        min=1
    ).unsqueeze(1)
    place_AK = first_A.unsqueeze(1) + within_AK
    place_AK = torch.where(
        place_AK < own_A.unsqueeze(1), place_AK, place_AK + (after_A - own_A).unsqueeze(1)
    )
    there_AK = turn_K < count_A.unsqueeze(1)
    return torch.where(there_AK, order_S[place_AK.where(there_AK, 0)], -1)


def nearest(keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> Tensor:
    """(A, 1) place of the entry most similar to each of (A, D) keys. Computed in full precision,
    because 16 bits change many results.

    Example:
        >>> nearest(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), torch.tensor([0, 0]))
        tensor([[-1],
                [ 1]])
    """
    found = []
    rows = max(1, _BLOCK_ELEMENTS // len(support))
    for keys_RD, ids_R in zip(torch.split(keys, rows), torch.split(ids, rows), strict=True):
        with torch.autocast(keys.device.type, enabled=False):
            best = (
                (keys_RD @ support.T)
                .masked_fill_(ids_R.unsqueeze(1) == support_ids, -torch.inf)
                .max(1)
            )
        found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(found).unsqueeze(1)


class SupportFramework(MomentumFramework, ABC):
    """Abstract. Contrasts the predictions of both views with retrieved keys and with the whole
    support queue.

    Each criterion has a predictor, or all share one. The negatives are the entries of the queue
    before the step, without the anchor's own sample. In training, the keys of both views of all
    ranks then enter the queue in rank order, but only if the loss is finite. In the first step,
    when the queue is empty, the keys of the batch are used.

    Args:
        encoder, head: encoder and head of the queries, which are evaluated and exported. Keys are
            made by a `MomentumCopy` of them.
        objective: equation 3.
        num_samples: N. A queue that is not smaller causes a warning.
        queue_size: S.
        momentum, momentum_schedule: see `MomentumCopy`.
        num_predictors: P.
        predictor_size: width of the hidden layer of the predictors.
    """

    head_options: ClassVar[Mapping[str, object]] = {"layers": 3, "last_norm": True}

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: RelativeContrastLoss,
        num_samples: int,
        queue_size: int,
        momentum: float,
        num_predictors: int,
        predictor_size: int,
        momentum_schedule: MomentumSchedule = "constant",
    ) -> None:
        super().__init__(encoder, head, objective)
        if queue_size < 1:
            raise ValueError(f"`queue_size` (={queue_size}) must be at least 1")
        check_num_samples(num_samples)
        warn_if_queue_too_large(queue_size, num_samples)
        size = embedding_size(encoder, head)
        self.predictors = nn.ModuleList(
            prediction_head(size, predictor_size) for _ in range(num_predictors)
        )
        self.slow = MomentumCopy(encoder, head, momentum, momentum_schedule)
        self.queue = Queue(queue_size, size)

    @abstractmethod
    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(A, K, D) keys of each row, and (A, H, K) whether they are positive (1) or not (0) under
        each criterion. Below 0 means no key.

        `keys` (A, D) are the keys of the other view of each row, of samples `ids` (A,). Does not
        change the state."""

    def learn(self, keys: Tensor, ids: Tensor, is_finite: Tensor) -> None:
        """Called once per training step with the keys of this rank and whether the loss is finite.
        On a CPU it is not called after a loss that is not finite. Default: does nothing."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        first, second = (
            torch.stack(pair, 1).flatten(0, 1)
            for pair in ((views[0], views[1]), (views[1], views[0]))
        )
        projected = self.head(self.encoder(first))
        anchors = torch.stack([predict(projected) for predict in self.predictors], 1).flatten(0, 1)
        keys = F.normalize(self.slow(second).to(self.queue.features.dtype), dim=1)
        row_ids, number = ids.repeat_interleave(2), len(self.predictors)
        support, support_ids = self.queue.candidates(keys, row_ids)
        with torch.no_grad():
            found_AKD, same_AHK = self.retrieve(keys, row_ids, support, support_ids)
            # one prediction for all criteria: P_c of equation 9
            degree = same_AHK.mean(1) if number == 1 else same_AHK.flatten(0, 1)
        positives = found_AKD.repeat_interleave(number, 0)
        pairs = Pairs(
            anchors,
            support,
            positives,
            ids,
            support_ids,
            2 * number,
            unit_candidates=True,
            degree=degree,
            collected=keys,  # embeddings as returned by `embed`, not predictions
        )
        loss = self.objective.on(pairs)
        if self.training:
            is_finite = finite(loss)  # of the joined batch, so all ranks agree
            self.queue.push(keys, row_ids, is_finite)
            if not skips(is_finite):
                self.learn(keys, row_ids, is_finite)
        return loss

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) unit-norm embeddings of the momentum encoder, as in the queue."""
        return self.slow.embed(images)


class NNCLR(SupportFramework):
    """Contrasts the prediction of each view with the queue. The positive is the entry nearest to
    the key of the other view.

        loss_i = −q_i·n_i / t + log( exp(q_i·n_i / t) + Σ_{j in queue, not of sample i} w_ij
        exp(q_i·s_j / t) )

    n_i is the entry of another sample that is most similar to the key of the other view of i. If
    the queue has none, it is the key itself. The loss is the mean over both directions. It equals
    `RCL` with `criteria=1, retrieval="nearest"` exactly.

    Args:
        encoder, head: encoder and head of the queries, which are evaluated and exported.
        num_samples: N. A queue that is not smaller causes a warning.
        queue_size: S, places of the support queue.
        momentum: m of the encoder of the keys. With 0 it equals that of the queries, as in the
            paper.
        momentum_schedule: "constant", or "cosine", where m rises to 1 as in BYOL; see
            `MomentumCopy`.
        predictor_size: width of the predictor's hidden layer.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see
            `RelativeContrastLoss`.

    State: the momentum copy, the predictor, the queue with its ids and pointer, and the state of
    the detector.

    Deviates from the paper in: the negatives are the entries of the queue, while the paper uses the
    other predictions of the batch; keys come from a momentum encoder; old entries of the anchor's
    own sample are neither neighbours nor negatives. n_i is also in the sum as an entry of the
    queue, as in equation 3 of RCL.
    """

    paper: ClassVar[str] = "Dwibedi et al., ICCV 2021"
    needs: ClassVar[str] = "queue smaller than the data"
    refused: ClassVar[Mapping[str, str]] = RelativeContrastLoss.refused

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
        **shared: Unpack[Shared],
    ) -> None:
        objective = RelativeContrastLoss(temperature=temperature, **shared)
        super().__init__(
            encoder,
            head,
            objective,
            num_samples,
            queue_size,
            momentum,
            1,
            predictor_size,
            momentum_schedule,
        )

    def retrieve(
        self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        return nearest_keys(keys, ids, support, support_ids)


def nearest_keys(
    keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """(A, 1, D) the nearest entry of another sample, or the own key if there is none, and (A, 1, 1)
    ones, because it is positive."""
    place_A1 = nearest(keys, ids, support, support_ids)
    found_A1D = support[place_A1.clamp(min=0)]
    own_A1D = keys.unsqueeze(1).to(found_A1D.dtype)
    return torch.where(place_A1.unsqueeze(2) < 0, own_A1D, found_A1D), torch.ones(
        len(keys), 1, 1, device=keys.device
    )
