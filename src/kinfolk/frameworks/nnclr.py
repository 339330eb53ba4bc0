"""NNCLR: Dwibedi et al., With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual Representations, ICCV 2021,
equations 1 to 4, in the form that Tang et al., ECCV 2022, compare with: RCL with one criterion and the nearest neighbour as the key.

Dimension key: A rows (both views of the batch), D embedding, K = 1 key, H = 1 criterion.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.moco import MomentumSchedule
from kinfolk.frameworks.support_queue import SupportFramework, nearest
from kinfolk.objectives import RelativeContrast
from kinfolk.objectives.base import Shared


class NNCLR(SupportFramework):
    """Each view's prediction against the entry of the queue that is nearest to the other view's key, and that is its positive.

        loss_i = −q_i·n_i / t + log( exp(q_i·n_i / t) + Σ_{j in queue, not of sample i} w_ij exp(q_i·s_j / t) )

    n_i is the entry most similar to the key of the other view of i, of another sample; where the queue has none, the key itself. The loss
    is the mean over both directions. It is `RCL` with `criteria=1, retrieval="nearest"`, to the last digit.

    Args:
        encoder, head: of the queries; these are evaluated and exported.
        num_samples: N; a queue that is not smaller is warned of.
        queue_size: S, places of the support queue.
        momentum: m of the keys' encoder; 0: the queries' own, as in the paper.
        momentum_schedule: "constant", or "cosine": m rises to 1, as BYOL's; see `MomentumCopy`.
        predictor_size: width of the predictor's hidden layer.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `RelativeContrast`.

    State: the momentum copy, the predictor, the queue with its ids and pointer, and the detector's.

    Deviates from the paper in: the negatives are the queue's, where the paper has the other predictions of the batch; keys come from a
    momentum encoder; an anchor's own old entries are neither its neighbour nor its negatives. n_i stands in the sum once more as an entry
    of the queue, as equation 3 of RCL has it.
    """

    paper: ClassVar[str] = "Dwibedi et al., ICCV 2021"
    needs: ClassVar[str] = "queue smaller than the data"

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
        objective = RelativeContrast(temperature, **shared)
        super().__init__(encoder, head, objective, num_samples, queue_size, momentum, 1, predictor_size, momentum_schedule)

    def retrieve(self, keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
        return nearest_keys(keys, ids, support, support_ids)


def nearest_keys(keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(A, 1, D) the nearest entry of another sample, or the own key where there is none; and (A, 1, 1) ones: it is positive."""
    place_A1 = nearest(keys, ids, support, support_ids)
    found_A1D = support[place_A1.clamp(min=0)]
    own_A1D = keys.unsqueeze(1).to(found_A1D.dtype)
    return torch.where(place_A1.unsqueeze(2) < 0, own_A1D, found_A1D), torch.ones(len(keys), 1, 1, device=keys.device)
