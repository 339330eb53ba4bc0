"""The siamese metric loss: Mo et al., Siamese Prototypical Contrastive Learning, equation 3.

Dimension key: B samples, V views, A features (A = B·V, sample-major), F size of a feature, G prototypes of the batch, M metric anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk import distributed


class SiameseMetric(nn.Module):
    """The metric loss with its head: tells features of one prototype from features of two by |h − ĥ|.

        mean over h^p of ( CE(g_m(|h^p − ĥ^p|), 1) + CE(g_m(|h^p − ĥ^q|), 0) ) / 2

    See `draw_partners` and `siamese_metric`. No state but the head's.

    Args:
        head: g_m: (M, F) → (M, 1).
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, prototypes: Tensor, generator: torch.Generator) -> Tensor:
        """Scalar, of this rank's (A, F) features, sample-major, and the prototypes (B,) of the samples of **all** ranks; the generator
        must stand at the same place on all of them. The pairs depend on how many samples each prototype has, so they are drawn on the host:
        on an accelerator a step waits once, for the prototypes."""
        rows = len(features) if distributed.world_size() == 1 else sum(distributed.batch_sizes(len(features), features.device))
        return siamese_metric(features, draw_partners(prototypes.cpu(), rows // len(prototypes), generator), self.head)


@dataclass(frozen=True)
class Partners:
    """Numbers of features: (M,) anchors h^p, each with one of its own prototype and one of another; −1: there is no other."""

    anchor_M: Tensor
    same_M: Tensor
    other_M: Tensor


def draw_partners(prototypes: Tensor, num_views: int, generator: torch.Generator) -> Partners:
    """Draws the pairs of equation 3 among the features of a batch.

    The anchor prototype p is the one most samples of the batch have. Where it holds less than half of the batch, because its cluster is
    smaller than that, the next ones are anchor prototypes too, until half is held; each anchor goes by its own. The partner ĥ^p is a view
    of another sample of that prototype, of a sample that is alone its own next view; ĥ^q any view of a sample of another prototype.

    Args:
        prototypes: (B,) prototype of each sample.
        num_views: V.
        generator: on the CPU.

    Example:
        >>> draw_partners(torch.tensor([5, 2, 5, 7]), 1, torch.Generator().manual_seed(0))
        Partners(anchor_M=tensor([0, 2]), same_M=tensor([2, 0]), other_M=tensor([1, 3]))
    """
    num_samples, device = len(prototypes), prototypes.device
    _, group_B, size_G = torch.unique(prototypes, return_inverse=True, return_counts=True)
    by_size_G = size_G.argsort(descending=True, stable=True)
    before_G = torch.empty_like(size_G)
    before_G[by_size_G] = size_G[by_size_G].cumsum(0) - size_G[by_size_G]
    sample_M = (2 * before_G < num_samples)[group_B].nonzero().flatten().repeat_interleave(num_views)
    view_M = torch.arange(num_views, device=device).repeat(len(sample_M) // num_views)

    sorted_B = group_B.argsort(stable=True)  # the samples of a prototype side by side, so that one draw skips a stretch of them
    place_B = torch.empty_like(sorted_B)
    place_B[sorted_B] = torch.arange(num_samples, device=device)
    start_M, size_M = (size_G.cumsum(0) - size_G)[group_B[sample_M]], size_G[group_B[sample_M]]
    uniform = torch.rand(2, len(sample_M), generator=generator, dtype=torch.float64).to(device)

    drawn_M = (uniform[0] * (size_M - 1) * num_views).long()
    own_M = (place_B[sample_M] - start_M) * num_views
    drawn_M = start_M * num_views + drawn_M + num_views * (drawn_M >= own_M)
    alone_M = sample_M * num_views + (view_M + 1) % num_views
    same_M = alone_M.where(size_M == 1, _feature(drawn_M, sorted_B, num_views))

    drawn_M = (uniform[1] * (num_samples - size_M) * num_views).long()
    drawn_M = drawn_M + size_M * num_views * (drawn_M >= start_M * num_views)
    other_M = torch.where(size_M == num_samples, -1, _feature(drawn_M, sorted_B, num_views))
    return Partners(sample_M * num_views + view_M, same_M, other_M)


def siamese_metric(features: Tensor, partners: Partners, head: Callable[[Tensor], Tensor]) -> Tensor:
    """Scalar: the binary cross-entropy of g_m(|h − ĥ|) to 1 for partners of one prototype and to 0 for others, mean over all pairs of all
    ranks.

    Args:
        features: (A, F) h of this rank, sample-major; ranks may hold unequal numbers.
        partners: among the features of all ranks in the order of ranks, the same on all of them; on the host.
        head: g_m: (M, F) → (M, 1) or (M,).
    """
    with torch.autocast(features.device.type, enabled=False):
        features = features if features.dtype == torch.float64 else features.float()
        everything, start, several = features, 0, distributed.world_size() > 1
        if several:
            sizes = distributed.batch_sizes(len(features), features.device)
            (everything,) = distributed.gather_with_gradient(features, sizes)
            start = sum(sizes[: torch.distributed.get_rank()])
        mine_M = (partners.anchor_M >= start) & (partners.anchor_M < start + len(features))
        anchor_M, same_M, other_M = partners.anchor_M[mine_M], partners.same_M[mine_M], partners.other_M[mine_M]
        known_M = other_M >= 0
        places = torch.stack((torch.cat((anchor_M, anchor_M[known_M])), torch.cat((same_M, other_M[known_M]))))
        first, second = everything[places.to(features.device, non_blocking=True)]
        logit = head((first - second).abs()).flatten()
        target = torch.ones_like(logit)
        target[len(anchor_M) :] = 0.0
        number = len(partners.anchor_M) + int((partners.other_M >= 0).sum())
        loss = F.binary_cross_entropy_with_logits(logit, target, reduction="sum") / max(number, 1)
    return distributed.sum_over_ranks(loss) if several else loss


def _feature(drawn_M: Tensor, sorted_B: Tensor, num_views: int) -> Tensor:
    """Number of the feature that is the `drawn_M`-th when samples are in the order `sorted_B`."""
    place_M = (drawn_M // num_views).clamp(max=len(sorted_B) - 1)  # beyond the end only where the draw is not used
    return sorted_B[place_M] * num_views + drawn_M % num_views
