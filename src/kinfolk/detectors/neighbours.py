"""The neighbours of LA: Zhuang et al., Local Aggregation for Unsupervised Learning of Visual
Embeddings, ICCV 2019, section 3.

Dimension key: R rows of a block, C candidates, L clusterings, N data set.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.detectors.base import Detector, Space, register
from kinfolk.detectors.shared_labels import cluster_again, same_cluster
from kinfolk.errors import require, require_choice
from kinfolk.pairs import Block, Kin

PAPER_SIZE = 43
"""Samples per cluster in the paper: 30,000 clusters of ImageNet's 1.28 million images."""


@register("neighbours", "Zhuang et al., ICCV 2019", "clusters, refreshed each epoch")
class Neighbours(Detector):
    """Kin are the samples that share the anchor's cluster in any of several clusterings (C_i),
    among those that are nearest to it (B_i).

        C_i = ∪_l { j : cluster_l(j) = cluster_l(i) }
        B_i = the `num_background` candidates that are most similar to the anchor

    Candidates outside of B_i are dropped, kin or not; all candidates at exactly the last similarity
    stay. Nothing is flagged before the first `refresh`.

    Args:
        num_samples: N.
        num_clusters: of each clustering; None: one for every 43 samples, as in the paper.
        num_clusterings: L clusterings with different seeds.
        num_background: size of B_i. All candidates if there are no more, or with None.
        every: epochs between two clusterings.
        space: what is clustered: "projected" embeddings (a bank's, where the framework keeps one)
            or the encoder's "features".
        warm_start: clusterings start from the last centroids.
        seed: of the clusterings.
        iterations, warm_iterations, points_per_cluster: see `PseudoLabels`.

    State: the labels and centroids of all clusterings.
    """

    num_samples: int

    def __init__(
        self,
        *,
        num_samples: int,
        num_clusters: int | None = None,
        num_clusterings: int = 10,
        num_background: int | None = 4096,
        every: int = 1,
        space: Space = "projected",
        warm_start: bool = True,
        seed: int = 0,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_clusterings", num_clusterings),
            ("num_background", num_background),
            ("every", every),
        ):
            require(value is None or value >= 1, name, value, "at least 1")
        require_choice("space", space, get_args(Space))
        self.num_samples, self.num_background = num_samples, num_background
        self.every, self.space = every, space
        default = max(1, num_samples // PAPER_SIZE)
        self.num_clusters = default if num_clusters is None else num_clusters
        self.clusters = PseudoLabels(
            num_samples,
            None,
            (self.num_clusters,) * num_clusterings,
            seed=seed,
            warm_start=warm_start,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        return Kin(
            same_cluster(self.clusters, block), ignore=distant(block.sim_RC, self.num_background)
        )

    def due(self, epoch: int) -> bool:
        return epoch % self.every == 0

    def refresh(self, features: Tensor | None, progress: float) -> None:
        cluster_again(self.clusters, features)


def distant(sim_RC: Tensor, num_background: int | None) -> Tensor | None:
    """(R, C) bool: candidates to which `num_background` of the row are closer. None: there are
    none."""
    if num_background is None or num_background >= sim_RC.shape[1]:
        return None
    return sim_RC < sim_RC.topk(num_background, dim=1).values[:, -1:]
