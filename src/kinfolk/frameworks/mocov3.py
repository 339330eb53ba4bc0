"""MoCo v3: Chen, Xie, He, An Empirical Study of Training Self-Supervised Vision Transformers, ICCV 2021, equation 1 and algorithm 1.

Dimension key: V = 2 views, B batch, D embedding.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.base import Framework
from kinfolk.frameworks.momentum import MomentumCopy, MomentumSchedule
from kinfolk.models.heads import embedding_size, projection_head
from kinfolk.objectives import NTXent
from kinfolk.objectives.base import Shared, unit
from kinfolk.pairs import Pairs, integer_ids
from kinfolk.stats import Stats


class MoCoV3(Framework):
    """Each view's prediction against the keys that a slow copy of the encoder makes of the batch's other views; there is no queue.

        loss = ½ Σ_{(a, b) = (1, 2), (2, 1)} mean_i ( −q_i^a·k_i^b / t + log( exp(q_i^a·k_i^b / t) + Σ_{j ≠ i} w_ij exp(q_i^a·k_j^b / t) ) )

    q^a is the prediction of view a, k^b the key of view b. The negatives are the keys of the same view of the other samples of all ranks.
    Each step visits the detector twice, once in each direction.

    Args:
        encoder, head: of the queries; the encoder is evaluated and exported. The keys' are a `MomentumCopy` of them.
        momentum: m of the copy.
        momentum_schedule: see `MomentumCopy`; "cosine" as in the paper.
        predictor_size: width of the predictor's hidden layer.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `NTXent`.

    State: the copy, the predictor, and the detector's.

    Deviates from the paper in: the loss is the mean of both directions, and without the factor 2t, so it is that of the paper divided by
    4t; the momentum moves once an epoch; a batch of both views goes through the encoder at once, so BatchNorm sees them together.
    """

    paper: ClassVar[str] = "Chen et al., ICCV 2021"
    needs: ClassVar[str] = "large batches"

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        momentum: float = 0.99,
        momentum_schedule: MomentumSchedule = "cosine",
        predictor_size: int = 4096,
        temperature: float = 0.2,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(encoder, head, NTXent(temperature, **shared))
        size = embedding_size(encoder, head)
        self.predictor = projection_head(size, predictor_size, size, last_norm=True, last_affine=False)
        self.slow = MomentumCopy(encoder, head, momentum, momentum_schedule)
        self._stats = Stats.empty()

    @property
    def stats(self) -> Stats:
        """The counts of the last step, over both directions."""
        return self._stats

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        ids, images = integer_ids(ids, views.device), views.flatten(0, 1)
        queries = self.predictor(self.head(self.encoder(images))).chunk(2)
        keys = unit(self.slow(images)).chunk(2)
        losses, self._stats = [], Stats.empty(ids.device)
        for query, key in zip(queries, reversed(keys), strict=True):
            pairs = Pairs(query, key, key.unsqueeze(1), ids, ids, unit_candidates=True, local_candidates=True, collected=key)
            losses.append(self.objective.on(pairs))
            self._stats = self._stats + self.objective.stats
        return torch.stack(losses).mean()

    def embed(self, images: Tensor) -> Tensor:
        """(B, D) the momentum encoder's embedding, which the candidates are made of."""
        return F.normalize(self.slow(images), dim=-1)

    def after_step(self) -> None:
        self.slow.follow(self.encoder, self.head)

    def set_progress(self, epoch: int, num_epochs: int) -> None:
        super().set_progress(epoch, num_epochs)
        self.slow.set_progress(epoch, num_epochs)
