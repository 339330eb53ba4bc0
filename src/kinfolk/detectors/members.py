"""Who shares a cluster with whom in one block.

Dimension key: R rows of a block, C candidates, L levels of clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.clustering.labels import ClusterLabels
from kinfolk.pairs import Block
from kinfolk.stores.exact import check_ids


def member(clusters: ClusterLabels, block: Block) -> Tensor:
    """(R, C) True where the candidate, not the anchor's own, is of the anchor's cluster at any level; nobody before the first refresh."""
    for ids in (block.ids, block.candidate_ids):
        check_ids(ids, clusters.num_samples)
    if not clusters.refreshed:
        return torch.zeros_like(block.sim_RC, dtype=torch.bool)
    labels_LR, labels_LC = clusters.labels[:, block.row_ids], clusters.labels[:, block.candidate_ids]
    member_RC = labels_LR[0].unsqueeze(1) == labels_LC[0]
    for label_R, label_C in zip(labels_LR[1:], labels_LC[1:], strict=True):
        member_RC |= label_R.unsqueeze(1) == label_C
    return member_RC.logical_and_(block.sim_RC > -torch.inf)


def refreshed_by(clusters: ClusterLabels | None, features: Tensor | None) -> None:
    """The once-per-epoch clustering of a detector."""
    if clusters is None or features is None:
        raise ValueError("`features` of all samples must be given to a detector that clusters them, and to no other")
    clusters.refresh(features)
