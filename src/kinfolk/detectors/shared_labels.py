"""Which candidates of a block have the anchor's label: one function for true labels, pseudo-labels and hierarchies.

Dimension key: L levels of labels, N data set.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kinfolk.clustering.labels import PseudoLabels
from kinfolk.kinship import Keys
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import check_ids


def same_label(of: Callable[[Tensor], Tensor], num_samples: int, block: Block, why: str = "`num_samples` is too small") -> Keys:
    """The candidates that have the anchor's label at any level. A label below 0 is shared with nothing.

    Args:
        of: returns (L, …) the labels of sample ids.
        num_samples: N.
        why: the reason in the error for an id that is not in [0, N).
    """
    for ids in (block.ids, block.candidate_ids):
        check_ids(ids, num_samples, why)
    return Keys(of(block.row_ids), of(block.candidate_ids))


def same_cluster(clusters: PseudoLabels, block: Block) -> Keys | None:
    """The candidates that have the anchor's pseudo-label at any level; None as long as no sample has one."""
    keys = same_label(clusters.of, clusters.num_samples, block)
    return keys if clusters.some else None


def cluster_again(clusters: PseudoLabels | None, features: Tensor | None) -> None:
    """The refresh of a detector that clusters the features of all samples."""
    if clusters is None or features is None:
        raise ValueError("`features` of all samples must be given to a detector that clusters them, and to no other")
    clusters.refresh(features)
