"""NNCLR: Dwibedi et al., With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual Representations, ICCV 2021,
equations 1 to 4, in the form used for comparison by Tang et al., ECCV 2022: RCL with one criterion and the nearest neighbour as the key.

Dimension key: A rows (both views of the batch), D embedding, K = 1 key, H = 1 criterion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk.frameworks.moco import MomentumSchedule
from kinfolk.frameworks.support_queue import SupportFramework, nearest
from kinfolk.objectives import RelativeContrast
from kinfolk.objectives.base import Shared


class NNCLR(SupportFramework):
    """Contrasts the prediction of each view with the queue. The positive is the entry nearest to the key of the other view.

        loss_i = −q_i·n_i / t + log( exp(q_i·n_i / t) + Σ_{j in queue, not of sample i} w_ij exp(q_i·s_j / t) )

    n_i is the entry of another sample that is most similar to the key of the other view of i. If the queue has none, it is the key itself.
    The loss is the mean over both directions. It equals `RCL` with `criteria=1, retrieval="nearest"` exactly.

    Args:
        encoder, head: encoder and head of the queries, which are evaluated and exported.
        num_samples: N. A queue that is not smaller causes a warning.
        queue_size: S, places of the support queue.
        momentum: m of the encoder of the keys. With 0 it equals that of the queries, as in the paper.
        momentum_schedule: "constant", or "cosine", where m rises to 1 as in BYOL; see `MomentumCopy`.
        predictor_size: width of the predictor's hidden layer.
        temperature, detector, action, min_negatives, kin_weight, block_rows: see `RelativeContrast`.

    State: the momentum copy, the predictor, the queue with its ids and pointer, and the state of the detector.

    Deviates from the paper in: the negatives are the entries of the queue, while the paper uses the other predictions of the batch; keys
    come from a momentum encoder; old entries of the anchor's own sample are neither neighbours nor negatives. n_i is also in the sum as an
    entry of the queue, as in equation 3 of RCL.
    """

    paper: ClassVar[str] = "Dwibedi et al., ICCV 2021"
    needs: ClassVar[str] = "queue smaller than the data"
    refused: ClassVar[Mapping[str, str]] = RelativeContrast.refused

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
    """(A, 1, D) the nearest entry of another sample, or the own key if there is none, and (A, 1, 1) ones, because it is positive."""
    place_A1 = nearest(keys, ids, support, support_ids)
    found_A1D = support[place_A1.clamp(min=0)]
    own_A1D = keys.unsqueeze(1).to(found_A1D.dtype)
    return torch.where(place_A1.unsqueeze(2) < 0, own_A1D, found_A1D), torch.ones(len(keys), 1, 1, device=keys.device)
