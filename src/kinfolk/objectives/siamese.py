"""The siamese metric loss: Mo et al. (SPCL), 2022, equation 3.

Dimension key: B samples, V views, A features (A = B·V, sample-major), F size of a feature, M pairs
of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed
from kinfolk.stores.per_sample import to_device


class SiameseMetric(nn.Module):
    """The metric loss with its head g_m, (M, F) → (M, 1), which tells by |h − ĥ| whether two
    features have one prototype.

        mean over h^p of ( CE(g_m(|h^p − ĥ^p|), 1) + CE(g_m(|h^p − ĥ^q|), 0) ) / 2
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, prototypes: Tensor, generator: torch.Generator) -> Tensor:
        """Scalar loss of this rank's (A, F) features, sample-major, and the prototypes (B,) of the
        samples of **all** ranks. The generator must be in the same state on all ranks."""
        rows = len(features)
        if distributed.world_size() > 1:
            rows = sum(distributed.batch_sizes(rows, features.device))
        partners = draw_partners(prototypes, rows // len(prototypes), generator)
        return siamese_metric(features, partners, self.head)


@dataclass(frozen=True)
class Partners:
    """(A,) whether a feature is an anchor h^p, and the numbers of a feature with the same prototype
    and of one with another; −1: there is none."""

    anchors_A: Tensor
    same_A: Tensor
    other_A: Tensor


def draw_partners(prototypes: Tensor, num_views: int, generator: torch.Generator) -> Partners:
    """Draws the pairs of equation 3 in a batch with the (B,) `prototypes`. `generator`: on the CPU.

    The most frequent prototypes that have half of the batch are anchor prototypes p. The partner
    ĥ^p is a view of another sample of the anchor's prototype, or the next view of the only one; ĥ^q
    is any view of a sample of another prototype.

    Example:
        >>> found = draw_partners(torch.tensor([5, 2, 5, 7]), 1, torch.Generator().manual_seed(0))
        >>> found.anchors_A.tolist(), found.same_A[[0, 2]].tolist(), found.other_A[[0, 2]].tolist()
        ([True, False, True, False], [2, 0], [1, 3])
    """
    num_samples, device = len(prototypes), prototypes.device
    # the samples of a prototype are adjacent, so a draw can skip a range of them
    sorted_B, order_B = prototypes.sort(stable=True)
    place_B = order_B.argsort()
    start_B = torch.searchsorted(sorted_B, prototypes)
    size_B = torch.searchsorted(sorted_B, prototypes, right=True) - start_B
    # larger prototypes first, then smaller numbers
    rank_B = (num_samples - size_B) * num_samples + start_B
    # samples of the prototypes before: less than half
    anchors_B = 2 * torch.searchsorted(rank_B.sort().values, rank_B) < num_samples

    sample_A = torch.arange(num_samples, device=device).repeat_interleave(num_views)
    view_A = torch.arange(num_views, device=device).repeat(num_samples)
    anchors_A, start_A, size_A = anchors_B[sample_A], start_B[sample_A], size_B[sample_A]
    # the draws of the k-th of M anchors are the k-th and the (M + k)-th
    turn_A = (anchors_A.cumsum(0) - 1).clamp(min=0)
    uniform = to_device(
        torch.rand(2 * len(sample_A), generator=generator, dtype=torch.float64), device
    )
    first_A, second_A = uniform[turn_A], uniform[turn_A + anchors_A.sum()]

    drawn_A = (first_A * (size_A - 1) * num_views).long()
    own_A = (place_B[sample_A] - start_A) * num_views
    drawn_A = start_A * num_views + drawn_A + num_views * (drawn_A >= own_A)
    alone_A = sample_A * num_views + (view_A + 1) % num_views
    same_A = alone_A.where(size_A == 1, _feature(drawn_A, order_B, num_views))

    drawn_A = (second_A * (num_samples - size_A) * num_views).long()
    drawn_A = drawn_A + size_A * num_views * (drawn_A >= start_A * num_views)
    other_A = torch.where(size_A == num_samples, -1, _feature(drawn_A, order_B, num_views))
    return Partners(anchors_A, same_A, other_A)


def siamese_metric(
    features: Tensor, partners: Partners, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scalar: the mean over all pairs of all ranks. `features`: (A, F) of this rank, sample-major;
    `partners`: of all ranks in rank order."""
    with torch.autocast(features.device.type, enabled=False):
        features = features if features.dtype == torch.float64 else features.float()
        everything, start, several = features, 0, distributed.world_size() > 1
        if several:
            sizes = distributed.batch_sizes(len(features), features.device)
            (everything,) = distributed.gather_with_gradient(features, sizes)
            start = sum(sizes[: torch.distributed.get_rank()])
        anchors, same, other = partners.anchors_A, partners.same_A, partners.other_A
        used_2A = torch.stack((anchors, anchors & (other >= 0)))
        partner_2A = torch.stack((same, other.clamp(min=0)))
        mine = slice(start, start + len(features))
        apart_2AF = (features - everything[partner_2A[:, mine]]).abs()
        logit_A, other_logit_A = head(apart_2AF.flatten(0, 1)).view(2, -1)
        loss_2A = -F.logsigmoid(torch.stack((logit_A, -other_logit_A)))
        loss = torch.where(used_2A[:, mine], loss_2A, 0.0).sum() / used_2A.sum().clamp(min=1)
    return distributed.sum_over_ranks(loss) if several else loss


def _feature(drawn_A: Tensor, order_B: Tensor, num_views: int) -> Tensor:
    """The number of the `drawn_A`-th feature when samples are in the order `order_B`."""
    # beyond the end only where the draw is not used
    place_A = (drawn_A // num_views).clamp(max=len(order_B) - 1)
    return order_B[place_A] * num_views + drawn_A % num_views
