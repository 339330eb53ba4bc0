"""Detectors that cluster the features of all samples by k-means.

- Cave: Wu et al., ICLR 2021, appendix F.
- The neighbours of LA: Zhuang et al., ICCV 2019, section 3.

Dimension key: R rows of a block, C candidates, L clusterings, N data set.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.detectors.base import Detector, Space, register
from kinfolk.errors import require_at_least, require_choice
from kinfolk.pairs import Block, Kin, same_key

PAPER_SIZE = 43  # samples per cluster in the paper of LA: 30,000 clusters of ImageNet


class Clustering(Detector, ABC):
    """Abstract. Clusters the features of all samples."""

    clusters: PseudoLabels | None
    every: int

    def due(self, epoch: int) -> bool:
        return self.clusters is not None and epoch % self.every == 0

    def refresh(self, features: Tensor | None, progress: float) -> None:
        if self.clusters is None or features is None:
            raise ValueError(
                "`features` of all samples must be given to a detector that clusters them, and to"
                " no other"
            )
        self.clusters.refresh(features)


def same_cluster(clusters: PseudoLabels, block: Block) -> Tensor:
    """(R, C) whether candidates are in the anchor's cluster in any of L clusterings."""
    keys_LR, keys_LC = clusters.of(block.row_ids), clusters.of(block.candidate_ids)
    same_RC = same_key(keys_LR[0], keys_LC[0])
    for key_R, key_C in zip(keys_LR[1:], keys_LC[1:], strict=True):
        same_RC = same_RC | same_key(key_R, key_C)
    return same_RC


@register("cave", "Wu et al., ICLR 2021, appendix F", "clusters, refreshed each epoch")
class Cave(Clustering):
    """Negatives are only the candidates of the anchor's own k-means cluster. Nothing is flagged as
    kin.

    An anchor without another candidate in its cluster keeps all its negatives, as all anchors do
    before the first clustering.

    Args:
        num_samples: N; ids are in [0, N).
        num_clusters: K, below N; a tuple: of several clusterings, any of which may be shared.
        every, seed: epochs between two clusterings, and their seed.

    State: the cluster of every sample, and the centroids.

    Example:
        >>> detector = Cave(num_samples=4, num_clusters=2)
        >>> detector.refresh(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), progress=0.0)
        >>> (detector.clusters.labels[0, 0] == detector.clusters.labels[0, 1]).item()
        True
    """

    num_samples: int
    clusters: PseudoLabels

    def __init__(
        self,
        *,
        num_samples: int,
        num_clusters: int | tuple[int, ...],
        every: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_at_least(2, num_samples=num_samples)
        require_at_least(1, every=every)
        self.num_samples, self.every = num_samples, every
        self.clusters = PseudoLabels(num_samples, num_clusters, seed=seed)

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"num_clusters": 100}

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        same_RC = same_cluster(self.clusters, block)
        alone_R1 = ~(same_RC & (block.sim_RC > -2)).any(1, keepdim=True)
        return Kin(ignore=~(same_RC | alone_R1))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        why = "`num_clusters` (=1) puts all candidates into the anchor's cluster; choose more"
        return why if 1 in self.clusters.num_clusters else None


@register("neighbours", "Zhuang et al., ICCV 2019", "clusters, refreshed each epoch")
class Neighbours(Clustering):
    """Kin are the samples that share the anchor's cluster in any of several clusterings (C_i),
    among those that are nearest to it (B_i).

        C_i = ∪_l { j : cluster_l(j) = cluster_l(i) }
        B_i = the `num_background` candidates that are most similar to the anchor

    Candidates outside of B_i are dropped, kin or not. Nothing is flagged before the first
    `refresh`.

    Args:
        num_samples: N.
        num_clusters: of each clustering; None: one for every 43 samples, as in the paper.
        num_clusterings: L clusterings with different seeds.
        num_background: size of B_i; None: all candidates.
        every, seed: epochs between two clusterings, and their seed.
        space: what is clustered: "projected" embeddings (a bank's, where there is one) or the
            encoder's "features".

    State: the labels and centroids of all clusterings.
    """

    num_samples: int
    clusters: PseudoLabels

    def __init__(
        self,
        *,
        num_samples: int,
        num_clusters: int | None = None,
        num_clusterings: int = 10,
        num_background: int | None = 4096,
        every: int = 1,
        space: Space = "projected",
        seed: int = 0,
    ) -> None:
        super().__init__()
        counts = {"num_background": num_background, "num_clusterings": num_clusterings}
        require_at_least(1, **counts, every=every)
        require_choice("space", space, get_args(Space))
        self.num_samples, self.num_background = num_samples, num_background
        self.every, self.space = every, space
        default = max(1, num_samples // PAPER_SIZE)
        self.num_clusters = default if num_clusters is None else num_clusters
        chosen = (self.num_clusters,) * num_clusterings
        self.clusters = PseudoLabels(num_samples, chosen, seed=seed)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        return Kin(
            same_cluster(self.clusters, block), ignore=distant(block.sim_RC, self.num_background)
        )


def distant(sim_RC: Tensor, num_background: int | None) -> Tensor | None:
    """(R, C) whether `num_background` candidates of the row are closer."""
    if num_background is None or num_background >= sim_RC.shape[1]:
        return None
    return sim_RC < sim_RC.topk(num_background, dim=1).values[:, -1:]
