"""Which entries of a support queue become keys of an anchor: of its cluster, drawn by chance, or the nearest to it.

Neither takes an entry of the anchor's own sample; where there is no other, the place is −1.

Dimension key: A anchors of this rank, S entries of the support queue, K keys of an anchor, D embedding, N data set.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kinfolk import distributed
from kinfolk.stores.exact import OnHost

_BLOCK_ELEMENTS = 1 << 22


class Chance(OnHost):
    """A number in [0, 1) for each row of a step, over all ranks; a function of its seed, of how often it advanced and of the row's place in
    the joined batch. So it is the same after a resume, and the same for any number of ranks.

    State: `seed`, drawn from torch's generator when it is made, and `count`.
    """

    on_host = ("count", "seed")
    count: Tensor
    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seed", torch.randint(1 << 62, ()))

    def rows(self, number: int, device: torch.device) -> Tensor:
        """(number,) those of this rank's rows; reads only."""
        first, total = 0, number
        if distributed.world_size() > 1:
            sizes = distributed.batch_sizes(number, device)
            first, total = sum(sizes[: dist.get_rank()]), sum(sizes)
        generator = torch.Generator().manual_seed(int(self.seed ^ self.count))
        return torch.rand(total, generator=generator, dtype=torch.float64)[first : first + number].to(device, non_blocking=True)

    def advance(self) -> None:
        """The next step draws others."""
        self.count += 1


def cluster_mates(
    labels: Tensor, ids: Tensor, support_labels: Tensor, support_ids: Tensor, number: int, chance: Tensor, num_samples: int
) -> Tensor:
    """(A, K) places of entries in the anchor's cluster, each at most once, −1 where it has fewer than K.

    They are K evenly spaced ones of the cluster's entries in a circle, the first by `chance`: each is as likely as any other.

    Args:
        labels, ids: (A,) cluster and sample of each anchor; both in [0, N).
        support_labels, support_ids: (S,) the same of the entries.
        number: K.
        chance: (A,) in [0, 1).
        num_samples: N.

    Example:
        >>> one, two = torch.tensor([5]), torch.tensor([5, 5, 6, 5])
        >>> cluster_mates(one, torch.tensor([0]), two, torch.tensor([0, 1, 2, 3]), 3, torch.zeros(1), 9)
        tensor([[ 1,  3, -1]])
    """
    names_S, order_S = (support_labels * num_samples + support_ids).sort(stable=True)  # clusters, and in each the samples, side by side
    start_A = labels * num_samples
    first_A, own_A, after_A, end_A = (
        torch.searchsorted(names_S, name, right=right)
        for name, right in ((start_A, False), (start_A + ids, False), (start_A + ids, True), (start_A + num_samples, False))
    )
    count_A = (own_A - first_A) + (end_A - after_A)
    step_A1 = (count_A // number).clamp(min=1).unsqueeze(1)
    turn_K = torch.arange(number, device=ids.device)
    within_AK = ((chance * count_A).long().unsqueeze(1) + turn_K * step_A1) % count_A.clamp(min=1).unsqueeze(1)
    place_AK = first_A.unsqueeze(1) + within_AK
    place_AK = torch.where(place_AK < own_A.unsqueeze(1), place_AK, place_AK + (after_A - own_A).unsqueeze(1))
    there_AK = turn_K < count_A.unsqueeze(1)
    return torch.where(there_AK, order_S[place_AK.where(there_AK, 0)], -1)


def nearest(keys: Tensor, ids: Tensor, support: Tensor, support_ids: Tensor) -> Tensor:
    """(A, 1) place of the entry most similar to each of (A, D) keys; in full precision, as rounding to 16 bits changes many of the picks.

    Example:
        >>> nearest(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), torch.tensor([0, 0]))
        tensor([[-1],
                [ 1]])
    """
    found = []
    rows = max(1, _BLOCK_ELEMENTS // len(support))
    for keys_RD, ids_R in zip(torch.split(keys, rows), torch.split(ids, rows), strict=True):
        with torch.autocast(keys.device.type, enabled=False):
            best = (keys_RD @ support.T).masked_fill_(ids_R.unsqueeze(1) == support_ids, -torch.inf).max(1)
        found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(found).unsqueeze(1)
