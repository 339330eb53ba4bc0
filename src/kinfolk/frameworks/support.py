"""A momentum encoder, predictors and a queue from which an anchor's keys are retrieved: what NNCLR and RCL share. Tang et al., Relative
Contrastive Loss for Unsupervised Representation Learning, ECCV 2022, Figure 2.

Dimension key: V views (2), B batch, A = B·V rows, sample-major, D embedding, H criteria, P predictors (1 or H), K keys, S support queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.cautions import warn_if_queue_too_large
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.momentum import MomentumCopy, MomentumSchedule
from kinfolk.models.heads import embedding_size, prediction_head
from kinfolk.objectives import RelativeContrast
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Queue
from kinfolk.stores.exact import finite, skips


class SupportFramework(Framework, ABC):
    """Abstract. Predictions of both views against keys that are retrieved, and against all of the support queue.

    Each criterion has a predictor, or one serves all. The negatives are the queue of before the step without the anchor's own sample; then
    the keys of both views of all ranks enter it in the order of ranks, in training, and only if the loss is finite. In the first step, when
    it is empty, the batch's keys take its place.

    Args:
        encoder, head: of the queries; these are evaluated and exported. The keys' are a `MomentumCopy` of them.
        objective: equation 3.
        num_samples: N; a queue that is not smaller is warned of.
        queue_size: S.
        momentum, momentum_schedule: of the copy.
        num_predictors: P.
        predictor_size: width of their hidden layer.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        objective: RelativeContrast,
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
        warn_if_queue_too_large(queue_size, num_samples)
        size = embedding_size(encoder, head)
        self.predictors = nn.ModuleList(prediction_head(size, predictor_size) for _ in range(num_predictors))
        self.slow = MomentumCopy(encoder, head, momentum, momentum_schedule)
        self.queue = Queue(queue_size, size)

    @abstractmethod
    def retrieve(self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(A, K, D) the keys of each row, and (A, H, K) whether they are positive, 1 or 0, under each criterion; below 0: no key.

        `keys` (A, D) are those of the rows' own other views, of samples `ids` (A,). Reads only."""

    def learn(self, keys: Tensor, ids: Tensor) -> None:
        """Called once a step, in training, after a finite loss, with this rank's keys. Default: nothing."""

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids = integer_ids(ids, views.device)
        first, second = (torch.stack(pair, 1).flatten(0, 1) for pair in ((views[0], views[1]), (views[1], views[0])))
        projected = self.head(self.encoder(first))
        anchors = torch.stack([predict(projected) for predict in self.predictors], 1).flatten(0, 1)
        keys = F.normalize(self.slow(second).to(self.queue.features.dtype), dim=1)
        row_ids, number = ids.repeat_interleave(2), len(self.predictors)
        support, support_ids = self.queue.candidates(keys, row_ids)
        with torch.no_grad():
            found_AKD, same_AHK = self.retrieve(keys, row_ids, support, support_ids)
            degree = same_AHK.mean(1) if number == 1 else same_AHK.flatten(0, 1)  # one prediction for all: P_c of equation 9
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
            collected=keys,  # embeddings as `embed` has them, not predictions
        )
        loss = self.objective.on(pairs)
        if self.training:
            sound = finite(loss)  # the loss of the joined batch: all ranks agree
            self.queue.push(keys, row_ids, sound)
            if not skips(sound):
                self.learn(keys, row_ids)
        return loss

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) the momentum encoder's embedding, as the queue has it."""
        return F.normalize(self.slow(images), dim=-1)

    def after_step(self) -> None:
        self.slow.follow(self.encoder, self.head)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.slow.set_progress(epoch, num_epochs)
