"""Which candidates of a block have the anchor's label: one question for true labels, pseudo-labels and clusters.

Dimension key: L levels of labels, N data set.
"""

from __future__ import annotations

from torch import Tensor

from kinfolk.clustering.labels import ClusterLabels
from kinfolk.kinship import Keys
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import check_ids


def same_label(
    labels_LN: Tensor, block: Block, level: int | None = None, apart: bool = False, why: str = "`num_samples` is too small"
) -> Keys:
    """The candidates with the anchor's label at a level, or at any of them; a label below 0 is shared with nothing.

    Args:
        labels_LN: of all samples.
        level: the one that decides; None: any.
        apart: turns it around; see `Keys`.
        why: the reason in the error for an id out of range.
    """
    for ids in (block.ids, block.candidate_ids):
        check_ids(ids, labels_LN.shape[1], why)
    chosen_LN = labels_LN if level is None else labels_LN[level : level + 1]
    return Keys(chosen_LN[:, block.row_ids], chosen_LN[:, block.candidate_ids], apart=apart)


def members(clusters: ClusterLabels, block: Block, apart: bool = False) -> Keys | None:
    """The candidates of the anchor's cluster at any level, or those `apart` from it; None before the first refresh."""
    keys = same_label(clusters.labels, block, apart=apart)
    return keys if clusters.refreshed else None


def refreshed_by(clusters: ClusterLabels | None, features: Tensor | None) -> None:
    """The once-per-epoch clustering of a detector."""
    if clusters is None or features is None:
        raise ValueError("`features` of all samples must be given to a detector that clusters them, and to no other")
    clusters.refresh(features)
