"""Batches by clusters: Mo et al., Siamese Prototypical Contrastive Learning, section 3.2: half of one prototype, half of others.

Dimension key: N samples, B batch, S batches of an epoch, H anchors of a batch (half of it), M samples looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 50
"""How often samples that clash are offered another batch; all but crafted cases need a handful."""


def cluster_pair_batches(labels: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """(S·B,) sample numbers, batch after batch, none twice: an epoch in which every batch is half of one cluster and half of others.

    Every cluster is cut into chunks of half a batch; what is left of each, a tiny cluster as a whole, is strung together, cluster by
    cluster, and cut likewise. S of these chunks, at random, are the anchors of the S batches; the samples of all others fill the other
    halves, also at random, but never beside a chunk with their own cluster, as far as there are enough others. As with a random
    order, every sample is visited once, and at the end fewer than B of them not at all. The places within a batch are random, so that any
    part of it, such as a rank's, has some of both halves.

    Args:
        labels: (N,) cluster of each sample in data-set order; any numbers, some of which may be nobody's.
        batch_size: B, at least 2 and at most N.
        generator: of all randomness, on the CPU.

    Example:
        >>> labels = torch.arange(8) // 4
        >>> order = cluster_pair_batches(labels, 4, torch.Generator().manual_seed(0))
        >>> [sorted(batch) for batch in labels[order].view(2, 4).tolist()]
        [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    if not 2 <= batch_size <= len(labels):
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 2 and at most the number of samples (={len(labels)})")
    _, cluster_N = torch.unique(labels.cpu(), return_inverse=True)
    steps, half = len(labels) // batch_size, batch_size // 2
    chunked_N = _chunked(cluster_N, half, generator)
    whole = chunked_N[: len(labels) // half * half].view(-1, half)
    chosen = torch.randperm(len(whole), generator=generator)
    anchors_SH = whole[chosen[:steps]]
    rest = torch.cat((whole[chosen[steps:]].flatten(), chunked_N[whole.numel() :]))
    rest = rest[torch.randperm(len(rest), generator=generator)]
    rest = _kept_apart(rest, cluster_N, anchors_SH, batch_size - half, generator)
    others = rest[: steps * (batch_size - half)].view(steps, -1)
    batches_SB = torch.cat((anchors_SH, others), 1)
    places_SB = torch.rand(steps, batch_size, generator=generator, dtype=torch.float64).argsort(1)
    return batches_SB.gather(1, places_SB).flatten()


def _chunked(cluster_N: Tensor, half: int, generator: torch.Generator) -> Tensor:
    """(N,) all samples: first the chunks of `half` samples of one cluster, then what is left of each, clusters in random order."""
    shuffled_N = torch.randperm(len(cluster_N), generator=generator)
    rank_K = torch.randperm(int(cluster_N.max()) + 1, generator=generator)
    shuffled_N = shuffled_N[rank_K[cluster_N[shuffled_N]].argsort(stable=True)]
    size_K = torch.bincount(rank_K[cluster_N])
    start_K = size_K.cumsum(0) - size_K
    within_N = torch.arange(len(cluster_N)) - start_K.repeat_interleave(size_K)
    left_N = within_N >= (size_K // half * half).repeat_interleave(size_K)
    return torch.cat((shuffled_N[~left_N], shuffled_N[left_N]))


def _kept_apart(rest: Tensor, cluster_N: Tensor, anchors_SH: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """`rest`, of which each `size` belong to a batch and those at the end to none, with samples swapped that share a cluster with the
    anchors of their batch. A swap is made where neither of the two clashes afterwards."""
    number = int(cluster_N.max()) + 1
    steps = len(anchors_SH)
    taken: Tensor = torch.unique(torch.arange(steps).unsqueeze(1) * number + cluster_N[anchors_SH])

    def clashes(samples_M: Tensor, places_M: Tensor) -> Tensor:
        step_M = places_M // size
        key_M = step_M * number + cluster_N[samples_M]
        found_M = torch.searchsorted(taken, key_M).clamp(max=len(taken) - 1)
        return (taken[found_M] == key_M) & (step_M < steps)

    rest = rest.clone()
    wrong = clashes(rest, torch.arange(len(rest))).nonzero().flatten()
    for turn in range(ROUNDS):
        if not len(wrong):
            break
        wrong = wrong[torch.randperm(len(wrong), generator=generator)]
        if turn % 2:  # among themselves
            here, there = wrong[: len(wrong) // 2], wrong[len(wrong) // 2 : len(wrong) // 2 * 2]
        else:  # with anybody else
            there = torch.unique(torch.randint(len(rest), (len(wrong),), generator=generator))
            there = there[~torch.isin(there, wrong)]
            here = wrong[: len(there)]
        free = ~clashes(rest[here], there) & ~clashes(rest[there], here)
        here, there = here[free], there[free]
        rest[here], rest[there] = rest[there], rest[here]
        wrong = wrong[clashes(rest[wrong], wrong)]
    return rest
