"""Who shares a cluster with whom in one block.

Dimension key: L levels of clusters.
"""

from __future__ import annotations

from torch import Tensor

from kinfolk.clustering.labels import ClusterLabels
from kinfolk.kinship import Keys
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import check_ids


def members(clusters: ClusterLabels, block: Block, apart: bool = False) -> Keys | None:
    """The candidates of the anchor's cluster at any level, or those `apart` from it; None before the first refresh."""
    for ids in (block.ids, block.candidate_ids):
        check_ids(ids, clusters.num_samples)
    if not clusters.refreshed:
        return None
    return Keys(clusters.labels[:, block.row_ids], clusters.labels[:, block.candidate_ids], apart=apart)


def refreshed_by(clusters: ClusterLabels | None, features: Tensor | None) -> None:
    """The once-per-epoch clustering of a detector."""
    if clusters is None or features is None:
        raise ValueError("`features` of all samples must be given to a detector that clusters them, and to no other")
    clusters.refresh(features)
