"""MoCo: He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020, equations 1 and 2, in the form of its
second version (Chen et al., Improved Baselines with Momentum Contrastive Learning, 2020).

Dimension key: V views, B batch, A anchors (A = B, or 2B where symmetric), D embedding, Q places of the queue.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.cautions import warn_if_queue_too_large
from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.momentum import MomentumCopy, MomentumSchedule
from kinfolk.models.heads import embedding_size
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import Shared
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stores import Queue
from kinfolk.stores.exact import finite

ClusterEncoder = Literal["query", "momentum"]


class MoCo(Framework):
    """The first view's query against a queue of keys that a slow copy of the encoder made of earlier batches.

        loss_i = −q_i·k_i / t + log( exp(q_i·k_i / t) + Σ_{j in queue, not of sample i} w_ij exp(q_i·k_j / t) )

    k_i is the key of the second view. The queue is that of before the step; then the keys of all ranks enter it in the order of ranks,
    in training, and only if the loss is finite. It carries sample ids beside the features: an anchor's own old key is never its
    negative, and detectors look up labels and thresholds by them. In the first step, when the queue is empty, the batch's keys take its
    place.

    Args:
        encoder, head: of the queries; these are evaluated and exported. The keys' are a `MomentumCopy` of them.
        num_samples: N; a queue that is not smaller is warned of.
        queue_size: Q.
        momentum: m of the copy.
        cluster_encoder: whose features a detector that clusters all samples is given, where it does not collect its own: those of the
            "query" encoder, which is the one that is evaluated, or of the "momentum" encoder, as in the published code of PCL.
        momentum_schedule: "constant", or "cosine": m rises to 1, as BYOL's; see `MomentumCopy`.
        symmetric: both views are queries and both are keys; the loss is the mean over both directions, and both keys enter the queue.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `NTXent`.

    State: the copy, the queue with its ids and pointer, and the detector's.

    Deviates from the paper in: own old keys are left out; a queue that is not full yet is shorter, where the published code fills it with
    random vectors; the keys' batches are not shuffled between devices, so a device's BatchNorm sees queries and keys of the same samples.
    """

    paper: ClassVar[str] = "He et al., CVPR 2020; Chen et al., 2020"
    needs: ClassVar[str] = "queue smaller than the data"

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
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(encoder, head, NTXent(temperature, **shared))
        if queue_size < 1:
            raise ValueError(f"`queue_size` (={queue_size}) must be at least 1")
        warn_if_queue_too_large(queue_size, num_samples)
        if cluster_encoder not in get_args(ClusterEncoder):
            raise ValueError(f"`cluster_encoder` (={cluster_encoder!r}) must be one of {', '.join(get_args(ClusterEncoder))}")
        self.symmetric, self.cluster_encoder = symmetric, cluster_encoder
        self.slow = MomentumCopy(encoder, head, momentum, momentum_schedule)
        self.queue = Queue(queue_size, embedding_size(encoder, head))

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids, number = integer_ids(ids, views.device), 2 if self.symmetric else 1
        first, second = views[0], views[1]
        if self.symmetric:  # sample-major: both views of a sample are neighbours, and each one's key is the other's
            first, second = torch.stack((first, second), 1).flatten(0, 1), torch.stack((second, first), 1).flatten(0, 1)
        queries: Tensor = self.head(self.encoder(first))
        keys = F.normalize(self.slow(second).to(self.queue.features.dtype), dim=1)
        row_ids = ids.repeat_interleave(number)
        candidates, candidate_ids = self.queue.candidates(keys, row_ids)
        loss = self.objective.on(Pairs(queries, candidates, keys.unsqueeze(1), ids, candidate_ids, number, unit_candidates=True))
        if self.training:
            sound = finite(loss)  # the loss of the joined batch: all ranks agree
            self.queue.push(keys, row_ids, sound)
        return loss

    @property
    def refresh_model(self) -> nn.Module:
        return self if self.cluster_encoder == "query" else self.slow

    def after_step(self) -> None:
        self.slow.follow(self.encoder, self.head)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.slow.set_progress(epoch, num_epochs)
