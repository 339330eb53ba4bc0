"""Cave: Wu et al., Conditional Negative Sampling for Contrastive Learning of Visual
Representations, ICLR 2021, appendix F.

Dimension key: R rows of a block, C candidates, N data set.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.detectors.base import Detector, register
from kinfolk.detectors.shared_labels import cluster_again, same_cluster
from kinfolk.errors import require
from kinfolk.pairs import Block, Kin


@register("cave", "Wu et al., ICLR 2021, appendix F", "clusters, refreshed each epoch")
class Cave(Detector):
    """Negatives are only the candidates of the anchor's own k-means cluster. Nothing is flagged as
    kin.

    An anchor whose cluster contains no other candidate keeps all its negatives. Before the first
    clustering, all anchors do.

    Args:
        num_samples: N; ids are in [0, N).
        num_clusters: K, below N. With a tuple, there are several clusterings, and candidates of the
            anchor's cluster in any of them remain.
        every: epochs between two clusterings.
        seed: of the clusterings.
        iterations, warm_iterations, points_per_cluster: see `PseudoLabels`.

    State: the cluster of every sample, and the centroids.

    Example:
        >>> detector = Cave(num_samples=4, num_clusters=2)
        >>> detector.refresh(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), progress=0.0)
        >>> (detector.clusters.labels[0, 0] == detector.clusters.labels[0, 1]).item()
        True
    """

    num_samples: int

    def __init__(
        self,
        *,
        num_samples: int,
        num_clusters: int | tuple[int, ...],
        every: int = 1,
        seed: int = 0,
        iterations: int = 20,
        warm_iterations: int = 5,
        points_per_cluster: int = 256,
    ) -> None:
        super().__init__()
        require(num_samples >= 2, "num_samples", num_samples, "at least 2")
        require(every >= 1, "every", every, "at least 1")
        self.num_samples, self.every = num_samples, every
        self.clusters = PseudoLabels(
            num_samples,
            None,
            num_clusters,
            seed=seed,
            iterations=iterations,
            warm_iterations=warm_iterations,
            points_per_cluster=points_per_cluster,
        )

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {"num_clusters": 100}

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        same_RC = same_cluster(self.clusters, block) > 0
        alone_R1 = ~(same_RC & (block.sim_RC > -2)).any(1, keepdim=True)
        return Kin(ignore=~(same_RC | alone_R1))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        one = 1 in self.clusters.num_clusters
        return (
            "`num_clusters` (=1) puts all candidates into the anchor's cluster; choose more"
            " clusters"
            if one
            else None
        )

    def due(self, epoch: int) -> bool:
        return epoch % self.every == 0

    def refresh(self, features: Tensor | None, progress: float) -> None:
        cluster_again(self.clusters, features)
